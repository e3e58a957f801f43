"""Compiler of grammars in background threads, with a bounded cache of compiled ones."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from llguidance import LLMatcher, LLTokenizer

from ..core.grammar_state import PENDING, READY, GrammarState, GrammarStatus
from ..core.messages import Constraint, GrammarStatistics
from ..errors import one_line
from .limits import LIMITS

THREADS = 2
"""Most grammars that are compiled at once: a dear one lets the others pass."""
MAX_GRAMMARS = 256
MAX_BYTES = 64 << 20
"""Bounds of the cache: grammars, and bytes of their texts."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Entry:
    status: GrammarStatus
    compiled: LLMatcher | None = None


class GrammarCompiler:
    """Compiler for one vocabulary. One thread calls it; others do all the work, without the GIL.

    The cache holds the `max_grammars` grammars used last, whose texts have at most `max_bytes` bytes together. Those
    being compiled are never dropped. Without a `tokenizer` every grammar fails with the message `unavailable`.
    `statistics` counts since the start.
    """

    def __init__(
        self,
        tokenizer: LLTokenizer | None,
        *,
        unavailable: str = "",
        max_grammars: int = MAX_GRAMMARS,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self.tokenizer = tokenizer
        self.unavailable = unavailable
        self._max_grammars = max_grammars
        self._max_bytes = max_bytes
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._bytes = 0
        self._work = threading.Condition()
        self._queue: deque[str] = deque()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._closed = False
        self._notify: Callable[[], None] = lambda: None
        self.statistics = GrammarStatistics()

    def notify(self, changed: Callable[[], None]) -> None:
        """Call `changed`, from any thread, whenever a grammar has been compiled or has failed."""
        self._notify = changed

    def state(self, constraint: Constraint) -> GrammarStatus:
        """Return the state of a constraint's grammar. The first call begins to compile it."""
        if self.tokenizer is None:
            return GrammarStatus(GrammarState.FAILED, self.unavailable)
        grammar = constraint.grammar
        with self._work:
            entry = self._entries.get(grammar)
            if entry is None:
                self._enqueue(grammar)
                return PENDING
            self._entries.move_to_end(grammar)
            return entry.status

    def matcher(self, constraint: Constraint) -> LLMatcher | None:
        """Return a new matcher at the beginning of a constraint's grammar; None unless that is READY."""
        with self._work:
            entry = self._entries.get(constraint.grammar)
        return None if entry is None or entry.compiled is None else entry.compiled.deep_copy()

    def close(self) -> None:
        """End the threads after the grammars that they are compiling."""
        with self._work:
            self._closed = True
            self._queue.clear()
            self._entries.clear()
            self._work.notify_all()

    def _enqueue(self, grammar: str) -> None:
        self._entries[grammar] = _Entry(PENDING)
        self._bytes += len(grammar)
        self._evict()
        self._queue.append(grammar)
        if self._idle < len(self._queue) and len(self._threads) < THREADS:
            thread = threading.Thread(target=self._run, name="grammar-compiler", daemon=True)
            self._threads.append(thread)
            thread.start()
        self._work.notify()

    def _evict(self) -> None:
        for grammar in list(self._entries):
            if len(self._entries) <= self._max_grammars and self._bytes <= self._max_bytes:
                return
            if self._entries[grammar].status is not PENDING:
                del self._entries[grammar]
                self._bytes -= len(grammar)

    def _run(self) -> None:
        while (grammar := self._next()) is not None:
            began = time.monotonic()
            entry = self._compile(grammar)
            self._store(grammar, entry, time.monotonic() - began)
            self._notify()

    def _next(self) -> str | None:
        with self._work:
            self._idle += 1
            while not (self._queue or self._closed):
                self._work.wait()
            self._idle -= 1
            return None if self._closed else self._queue.popleft()

    def _store(self, grammar: str, entry: _Entry, seconds: float) -> None:
        with self._work:
            if not self._closed:
                self._entries[grammar] = entry
            before = self.statistics
            self.statistics = GrammarStatistics(
                compiled=before.compiled + (entry.compiled is not None),
                failed=before.failed + (entry.compiled is None),
                compile_s=before.compile_s + seconds,
                cached=len(self._entries),
                cached_bytes=self._bytes,
            )

    def _compile(self, grammar: str) -> _Entry:
        """Compile and fill the first mask, which is the dearest one."""
        assert self.tokenizer is not None
        try:
            compiled = LLMatcher(self.tokenizer, grammar, log_level=0, limits=LIMITS)
            if not compiled.is_error():
                compiled.compute_bitmask()
            error = compiled.get_error() if compiled.is_error() else ""
        except BaseException as raised:  # a panic in Rust is no Exception
            log.exception("a grammar could not be compiled: its request fails")
            error = one_line(raised)
        if error:
            return _Entry(GrammarStatus(GrammarState.FAILED, f"the grammar can't be compiled: {one_line(error)}"))
        return _Entry(READY, compiled)
