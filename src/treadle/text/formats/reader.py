"""Reader of an answer: turns generated text, as it comes, into events of text, reasoning and tool calls.

The contract of the reader, and so of every format's parser:

- Incremental: an event is returned as soon as the text allows, in constant time per character, whatever the text is.
- Final: nothing that was returned is taken back. Held back are only a proper prefix of a marker, white space beside a
  call or reasoning (it belongs to neither), a call until its name is known, and of arguments a number, a literal or an
  escape until it is complete.
- Independent of cuts: the same text in any pieces gives the same events after neighbours of one kind are merged.
- Arguments are JSON. Formats that write JSON pass it on as it is generated; the others build it, with strings passed on
  as they come and all other values when they are complete, by the parameters' declared types. Control characters in
  strings and backslashes that escape nothing are mended.
- A call is complete with its arguments; a missing closing marker is no mistake.
- A malformed call, or one that is cut before its name is known, becomes one Malformed event, and what was not yet an
  event becomes Text. A call that is cut later keeps its CallStart and CallArguments and has no CallEnd.
- In an answer that a grammar makes calls, one that is cut before its name is known is dropped.
- A call of an unknown function is a call: a client answers it with an error, from which a model recovers, whereas a
  call shown as text ends an agent's loop. Only where text may look like a call (in reasoning, or JSON without a marker)
  the name must be a known tool's.
- Markers inside arguments belong to the arguments.
- Reasoning that is never closed is Reasoning to the end. A call inside it, of a known tool, closes it. Before its name
  is known, the reasoning's closing marker ends it, and so does the beginning of another call: it was none.
- Special tokens that are no markers are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable

import msgspec

from ..events import Event
from .base import CallContext
from .reasoning import ReasoningMarkers
from .registry import find
from .scanner import EndOfAnswer, Markers, Mismatch, Scanner, Steps
from .spans import VisibleSpans
from .writer import EventWriter

Segment = tuple[str, bool]
"""Text, and whether it is a special token."""


class ReaderSetup(msgspec.Struct, frozen=True, omit_defaults=True):
    """Setup of the reader of one request's answers; plain values.

    `format` is a name of the registry; None: no calls are read. `reasoning` are the markers of reasoning, None where
    the answer has none or the format reads its own; `opened`: the prompt ends inside the reasoning. `tools` are the
    names of the tools that may be called. `types` are the JSON types of each tool's parameters, for formats that write
    no JSON (see `typed_values`). `forced`: a grammar makes the whole answer calls, so the beginning of one at its end
    is no text.
    """

    format: str | None = None
    reasoning: ReasoningMarkers | None = None
    opened: bool = False
    tools: tuple[str, ...] = ()
    types: dict[str, dict[str, tuple[str, ...]]] = {}
    forced: bool = False


class AnswerReader:
    """Reader of one answer. `spans` gets the places of visible text; None where they are not needed."""

    def __init__(self, setup: ReaderSetup, spans: VisibleSpans | None = None) -> None:
        self._format = None if setup.format is None else find(setup.format)
        self._reasoning = setup.reasoning
        self._starts = () if self._format is None else self._format.starts
        self._bare_starts = () if self._format is None else self._format.bare_starts
        self._set_markers(setup.reasoning)
        self._scan = Scanner()
        self._out = EventWriter(self._scan, setup.tools, hold_space=self._format is not None, spans=spans)
        self._context = CallContext(self._scan, self._out, setup.types)
        self._forced = setup.forced
        self._stray_close = False
        self._steps: Generator[None, None, None] | None = self._read_answer(opened=setup.opened)
        next(self._steps)

    def _set_markers(self, reasoning: ReasoningMarkers | None) -> None:
        opening = (reasoning.open,) if reasoning else ()
        closing = (reasoning.close,) if reasoning else ()
        self._in_text = Markers(*self._starts, *(opening if reasoning and reasoning.anywhere else ()))
        self._in_reasoning = Markers(*self._starts, *closing)
        self._at_start = (*self._starts, *self._bare_starts, *opening)
        more = () if self._format is None else self._format.special
        self.markers = frozenset((*self._starts, *more, *opening, *closing))

    @property
    def in_reasoning(self) -> bool:
        """Whether the text read so far ends inside the reasoning."""
        return self._out.in_reasoning

    @property
    def decided(self) -> int:
        """Number of characters of the text read so far of which it is known whether they are visible."""
        return self._out.decided

    def push(self, segments: Iterable[Segment]) -> tuple[Event, ...]:
        """Read more text and return the new events."""
        for text, special in segments:
            if text and not (special and self._is_no_marker(text)):
                self._scan.feed(text)
                self._resume()
        return self._out.take()

    def _is_no_marker(self, token: str) -> bool:
        """Whether a special token is neither a marker nor a part of one."""
        return token not in self.markers and not any(token in marker for marker in self.markers)

    def finish(self) -> tuple[Event, ...]:
        """End the answer and return the last events. A second call returns none."""
        self._scan.ended = True
        self._resume()
        return self._out.take()

    def _resume(self) -> None:
        if self._steps is not None:
            try:
                next(self._steps)
            except StopIteration:
                self._steps = None

    def _read_answer(self, *, opened: bool) -> Steps[None]:
        if opened:
            yield from self._read_reasoning()
        at_start = True
        while (yield from self._scan.peek()):
            at_start = yield from self._read_block(at_start)
        self._out.finish()

    def _read_block(self, at_start: bool) -> Steps[bool]:
        """Read text up to a marker, and what the marker begins. Return whether another block begins behind it."""
        found = (yield from self._accept_at_start()) if at_start else None
        if found is None:
            found = yield from self._pass_text()
        if found is None:
            return False
        if self._reasoning is not None and found == self._reasoning.open:
            yield from self._read_reasoning()
            return True
        return (yield from self._read_calls(found, certain=found in self._starts))

    def _pass_text(self) -> Steps[str | None]:
        """Read text up to a marker, and return the marker; None at the end of the answer."""
        if not self._forced:
            return (yield from self._scan.pass_until(self._in_text, self._out.text))
        parts: list[str] = []
        found = yield from self._scan.pass_until(self._in_text, parts.append)
        text = "".join(parts)
        if found is not None or not any(start.startswith(text.strip()) for start in self._at_start):
            self._out.text(text)
        return found

    def _accept_at_start(self) -> Steps[str | None]:
        """Consume the white space at the start of a block, and the marker that follows, if any."""
        yield from self._scan.pass_space(self._out.text)
        if self._stray_close and self._reasoning is not None:
            self._stray_close = False
            if (yield from self._scan.accept(self._reasoning.close)):
                yield from self._scan.pass_space(self._out.text)
        return (yield from self._scan.accept(*self._at_start))

    def _read_reasoning(self) -> Steps[None]:
        self._out.begin_reasoning()
        while True:
            found = yield from self._scan.pass_until(self._in_reasoning, self._out.reasoning)
            if found is None:
                return
            if self._reasoning is not None and found == self._reasoning.close:
                self._out.end_reasoning()
                return
            self._scan.stop_before(self._in_reasoning)
            is_call = yield from self._read_calls(found, certain=False)
            self._scan.go_on()
            if is_call:
                self._stray_close = True
                return

    def _read_calls(self, start: str, *, certain: bool) -> Steps[bool]:
        """Read the calls behind `start`. Return whether there was one; otherwise the text was written as it is."""
        assert self._format is not None
        write = self._out.reasoning if self._out.in_reasoning else self._out.text
        before = self._out.calls
        self._out.known_tools_only = not certain
        self._scan.record(start)
        try:
            yield from self._format.read(self._context, start)
        except Mismatch as mismatch:
            if self._forced and isinstance(mismatch, EndOfAnswer):
                self._scan.drop_rest()
                return True
            is_call = self._out.calls > before
            if is_call:
                self._end_broken_call(mismatch)
            else:
                self._write_no_call(write, mismatch.reason if certain else "")
            return is_call
        if not certain and self._out.calls == before:
            self._write_no_call(write)
            return False
        self._scan.take_recorded()
        return True

    def _write_no_call(self, write: Callable[[str], None], report: str = "") -> None:
        text = self._scan.take_recorded()
        if report:
            self._out.malformed(report)
        write(text)

    def _end_broken_call(self, mismatch: Mismatch) -> None:
        """End calls of which at least one was begun. The rest of a call that was cut off is dropped."""
        rest = self._scan.take_recorded()
        if isinstance(mismatch, EndOfAnswer) and (self._out.call_open or not _has_words(rest)):
            return
        if self._out.call_open or _has_words(rest):
            self._out.malformed(mismatch.reason)
        self._out.text(rest)


def _has_words(text: str) -> bool:
    return any(char.isalnum() for char in text)
