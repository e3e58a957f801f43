"""Compiler of grammars in background threads, with a bounded cache of compiled ones."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec
from llguidance import LLMatcher, LLTokenizer

from ..core.grammar_state import PENDING, READY, GrammarState, GrammarStatus
from ..core.messages import Constraint
from ..core.statistics import GrammarStatistics
from .completions import Ending, ending_of
from .deep_stack import start_thread
from .faults import fault_of_matcher, has_failed
from .limits import LIMITS
from .thread_priority import lower_priority

THREADS = 2
"""Most grammars that are compiled at once: others pass a dear one."""
MAX_GRAMMARS = 256
MAX_CHARS = 64 << 20
"""Bounds of the cache: grammars, and characters of their texts."""

CLOSE_S = 2.0
"""Longest wait for grammars that are compiled when the compiler is closed: an interpreter that ends beside such a
thread may crash. It is well below the time that an owner has to stop."""

_Work = Callable[[], None]

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Grammar:
    """A grammar in the cache. `used`: a matcher of `compiled` was handed out, so sequences share its lexer. `closes`: a
    constraint with `close_at_limit` asked for it, which waits for `ending`."""

    status: GrammarStatus = PENDING
    compiled: LLMatcher | None = None
    used: bool = False
    closes: bool = False
    ending: Ending | None = None


class GrammarCompiler:
    """Compiler for one vocabulary. One thread calls it; others do all the work, without the GIL.

    The cache holds the `max_grammars` grammars used last, whose texts have at most `max_chars` characters together.
    Those being compiled are never dropped. Without a `tokenizer` every grammar fails with the message `unavailable`.
    `statistics` counts since the start.

    Matchers copied from one another share the states of their lexer: they wait for each other while masks are filled,
    and those states count against the limit of all. So a grammar whose matcher was handed out is compiled anew for
    later sequences, when nothing else is left to compile.
    """

    def __init__(
        self,
        tokenizer: LLTokenizer | None,
        *,
        unavailable: str = "",
        max_grammars: int = MAX_GRAMMARS,
        max_chars: int = MAX_CHARS,
    ) -> None:
        self.tokenizer = tokenizer
        self.unavailable = unavailable
        self.statistics = GrammarStatistics()
        self._max_grammars = max_grammars
        self._max_chars = max_chars
        self._cache: OrderedDict[str, _Grammar] = OrderedDict()
        self._chars = 0
        self._changed = threading.Condition()
        self._new: deque[_Work] = deque()
        self._again: deque[_Work] = deque()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._closed = False
        self._notify: Callable[[], None] = lambda: None

    def notify(self, changed: Callable[[], None]) -> None:
        """Call `changed`, from any thread, whenever a grammar has been compiled or has failed."""
        self._notify = changed

    def state(self, constraint: Constraint) -> GrammarStatus:
        """Return the state of a constraint's grammar. The first call begins to compile it, and the first with
        `close_at_limit` to find its ending."""
        if self.tokenizer is None:
            return GrammarStatus(GrammarState.FAILED, self.unavailable)
        text = constraint.grammar
        with self._changed:
            grammar = self._cache.get(text)
            if grammar is None:
                grammar = self._add(text)
            self._cache.move_to_end(text)
            return self._closable(text, grammar) if constraint.close_at_limit else grammar.status

    def matcher(self, constraint: Constraint) -> LLMatcher | None:
        """Return a new matcher at the beginning of a constraint's grammar; None unless that is READY."""
        with self._changed:
            grammar = self._cache.get(constraint.grammar)
            if grammar is None or grammar.compiled is None:
                return None
            if not grammar.used:
                grammar.used = True
                self._enqueue(self._again, partial(self._make, constraint.grammar))
            return grammar.compiled.deep_copy()

    def ending(self, constraint: Constraint) -> Ending | None:
        """Return the ending of a constraint's grammar; None without `close_at_limit`, and unless that is READY."""
        with self._changed:
            grammar = self._cache.get(constraint.grammar)
            return grammar.ending if constraint.close_at_limit and grammar is not None else None

    def count_not_closed(self) -> None:
        """Count a sequence with `close_at_limit` for which no completion was found."""
        with self._changed:
            self.statistics = msgspec.structs.replace(self.statistics, not_closed=self.statistics.not_closed + 1)

    def forget(self, constraint: Constraint) -> None:
        """Drop the grammar of a constraint, on which llguidance failed: copies of its matcher fail, too. It is compiled
        anew when a request asks for it."""
        with self._changed:
            grammar = self._cache.get(constraint.grammar)
            if grammar is not None and grammar.status is not PENDING:
                self._drop(constraint.grammar)

    def close(self) -> None:
        """Forget all grammars, and end the threads after those that they are compiling; wait for that up to CLOSE_S."""
        with self._changed:
            self._closed = True
            self._cache.clear()
            self._changed.notify_all()
        end = time.monotonic() + CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    # The cache -----------------------------------------------------------------------------------------------------

    def _add(self, text: str) -> _Grammar:
        grammar = self._cache[text] = _Grammar()
        self._chars += len(text)
        self._evict()
        self._enqueue(self._new, partial(self._make, text))
        return grammar

    def _closable(self, text: str, grammar: _Grammar) -> GrammarStatus:
        """Return the state of a grammar whose ending is needed too."""
        if not grammar.closes:
            grammar.closes = True
            if grammar.status is READY:
                self._enqueue(self._new, partial(self._find_ending, text))
        return PENDING if grammar.status is READY and grammar.ending is None else grammar.status

    def _evict(self) -> None:
        """Drop the grammars used longest ago until the cache is within its bounds."""
        for text in list(self._cache):
            if len(self._cache) <= self._max_grammars and self._chars <= self._max_chars:
                return
            if self._cache[text].status is not PENDING:
                self._drop(text)

    def _drop(self, text: str) -> None:
        del self._cache[text]
        self._chars -= len(text)

    def _store(self, text: str, compiled: _Grammar, seconds: float) -> bool:
        """Put a compiled grammar into the cache. Return whether its state has changed."""
        with self._changed:
            before = self.statistics
            grammar = self._cache.get(text)
            first = grammar is not None and grammar.status is PENDING
            if grammar is not None:
                compiled.closes, compiled.ending = grammar.closes, grammar.ending
                self._cache[text] = compiled
            self.statistics = msgspec.structs.replace(
                before,
                compiled=before.compiled + (first and compiled.status is READY),
                failed=before.failed + (first and compiled.status is not READY),
                compile_s=before.compile_s + seconds,
                cached=len(self._cache),
                cached_chars=self._chars,
            )
            return first

    # The threads ---------------------------------------------------------------------------------------------------

    def _enqueue(self, queue: deque[_Work], work: _Work) -> None:
        queue.append(work)
        if self._idle < len(self._new) + len(self._again) and len(self._threads) < THREADS:
            self._threads.append(start_thread(self._run, "grammar-compiler"))
        self._changed.notify()

    def _run(self) -> None:
        lower_priority()
        while (work := self._next()) is not None:
            work()

    def _make(self, text: str) -> None:
        """Compile a grammar, and find its ending where one waits for that."""
        began = time.monotonic()
        compiled = self._compile(text)
        if self._store(text, compiled, time.monotonic() - began):
            self._notify()
        self._find_ending(text)

    def _find_ending(self, text: str) -> None:
        """Find the ending of a compiled grammar where one waits for it."""
        began = time.monotonic()
        with self._changed:
            grammar = self._cache.get(text)
            if grammar is None or grammar.compiled is None or grammar.ending is not None or not grammar.closes:
                return
            matcher = grammar.compiled.deep_copy()
        ending = self._ending(text, matcher)
        usable = self._compile(text).compiled if _is_broken(matcher) else None
        with self._changed:
            if (grammar := self._cache.get(text)) is not None:
                grammar.ending = ending
                grammar.compiled = usable or grammar.compiled
            self.statistics = msgspec.structs.replace(
                self.statistics, compile_s=self.statistics.compile_s + time.monotonic() - began
            )
        self._notify()

    def _ending(self, text: str, matcher: LLMatcher) -> Ending:
        assert self.tokenizer is not None
        try:
            return ending_of(self.tokenizer, text, matcher)
        except BaseException:  # a panic in Rust is no Exception
            log.exception(
                "the end of a grammar could not be searched, and close_at_limit has no effect on its requests"
            )
            return Ending((), None, 0)

    def _next(self) -> _Work | None:
        """Return the next work, that of new grammars first; None after the end."""
        with self._changed:
            self._idle += 1
            while not (self._closed or self._new or self._again):
                self._changed.wait()
            self._idle -= 1
            if self._closed:
                return None
            return (self._new or self._again).popleft()

    def _compile(self, text: str) -> _Grammar:
        """Compile a grammar and fill its first mask, which is often its dearest."""
        assert self.tokenizer is not None
        try:
            matcher = LLMatcher(self.tokenizer, text, log_level=0, limits=LIMITS)
            if not matcher.is_error():
                matcher.compute_bitmask()
            error = fault_of_matcher(matcher) if matcher.is_error() else ""
        except BaseException as raised:  # a panic in Rust is no Exception
            log.exception("a grammar could not be compiled, and its request fails")
            error = f"{type(raised).__name__} in llguidance"
        if error:
            return _Grammar(GrammarStatus(GrammarState.FAILED, f"the grammar can't be compiled: {error}"))
        return _Grammar(READY, matcher)


def _is_broken(matcher: LLMatcher) -> bool:
    """Whether llguidance has failed on a copy of a matcher, and fails on all from then on."""
    copy = matcher.deep_copy()
    copy.compute_bitmask()
    return copy.is_error() and has_failed(fault_of_matcher(copy))
