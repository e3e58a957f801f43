"""Writer of the events of one answer: parsers write what they read, and neighbours of one kind are merged."""

from __future__ import annotations

from collections.abc import Callable, Collection

from ..events import CallArguments, CallEnd, CallStart, Event, Malformed, Reasoning, Text
from ..json_escapes import WholePairs
from .scanner import Scanner
from .spans import VisibleSpans


class EventWriter:
    """Writer of the events of one answer.

    White space between text and a call, and at the borders of reasoning, belongs to neither and is dropped: it is held
    back until the next other character decides. `hold_space` is false where no call can follow, and text is passed on
    at once. `spans` gets the places of visible text. Each event of a call makes `scan` forget the text that it came
    from.
    """

    def __init__(
        self, scan: Scanner, tools: Collection[str], *, hold_space: bool, spans: VisibleSpans | None = None
    ) -> None:
        self._scan = scan
        self._tools = frozenset(tools)
        self._hold_space = hold_space
        self._spans = spans
        self._space: list[str] = []
        self._held = 0  # characters of white space
        self._end_of_space = 0
        self._make: Callable[[str], Event] | None = None
        self._parts: list[str] = []
        self._pairs = WholePairs()
        self._events: list[Event] = []
        self._calls = 0
        self._at_start = True
        self._behind_reasoning = False
        self._has_text = False
        self._has_reasoning = False
        self.known_tools_only = False
        self.call_open = False
        self.in_reasoning = False

    @property
    def calls(self) -> int:
        """Number of calls that were begun."""
        return self._calls

    @property
    def has_tools(self) -> bool:
        """Whether there are tools to call."""
        return bool(self._tools)

    @property
    def decided(self) -> int:
        """Number of generated characters of which it is known whether they are visible."""
        return self._end_of_space - self._held if self._held else self._scan.unrecorded

    def take(self) -> tuple[Event, ...]:
        """Return the events since the last time."""
        self._flush()
        events, self._events = tuple(self._events), []
        return events

    def text(self, text: str) -> None:
        """Write visible text."""
        new, end_of_space = text, self._end_of_space
        if self._at_start:
            text = self._without_leading_space(text, self._leading_space)
        if self._hold_space:
            text = self._without_trailing_space(text)
        if text:
            self._add_text(text)
            if self._spans is not None:
                self._add_span(max(len(text) + self._held - len(new), 0), end_of_space)
                self._add_span(min(len(text), len(new) - self._held), self._scan.position - self._held)

    def reasoning(self, text: str) -> None:
        """Write a piece of the reasoning."""
        if self._at_start:
            text = self._without_leading_space(text, lambda space: "")
        if text := self._without_trailing_space(text):
            self._add(Reasoning, text)

    def begin_reasoning(self) -> None:
        """Begin a block of reasoning."""
        self._begin_block()
        self._has_reasoning = self.in_reasoning = True

    def end_reasoning(self) -> None:
        """End a block of reasoning."""
        self._begin_block()
        self.in_reasoning = False
        self._behind_reasoning = True

    def call_start(self, name: str, call_id: str | None = None) -> None:
        """Begin a tool call. Raises Mismatch for a name that can't be one."""
        name = name.strip()
        if not name or (self.known_tools_only and name not in self._tools):
            self._scan.fail(f"no tool is named {name[:64]!r}")
        self._scan.go_on()
        self._begin_block()
        self.call_open, self.in_reasoning = True, False
        self._emit(CallStart(self._calls, name, call_id))
        self._calls += 1

    def arguments(self, text: str) -> None:
        """Write a piece of the arguments' JSON text, without halves of surrogate pairs: not every client reads them."""
        if text:
            self._scan.forget()
            self._add_arguments(self._pairs.feed(text))

    def call_end(self) -> None:
        """Complete the tool call."""
        self._add_arguments(self._pairs.end())
        self.call_open = False
        self._emit(CallEnd(self._calls - 1))

    def malformed(self, reason: str) -> None:
        """Report that what was recorded is no tool call."""
        self._add_arguments(self._pairs.end())
        self.call_open = False
        self._emit(Malformed(reason))

    def finish(self) -> None:
        """End the answer: held white space is written, but at the border of a call or of reasoning."""
        self._add_arguments(self._pairs.end())
        is_all = self._at_start and not (self._has_text or self._has_reasoning or self._calls)
        is_inside, space = not self._at_start, self._take_space()
        if space and is_inside and self._make is Reasoning:
            self._add(Reasoning, space)
        elif space and (is_all or is_inside):
            self._add_text(space)
            self._add_span(len(space), self._end_of_space)

    def _make_arguments(self, text: str) -> Event:
        return CallArguments(self._calls - 1, text)

    def _begin_block(self) -> None:
        self._take_space()
        self._at_start, self._behind_reasoning = True, False

    def _without_leading_space(self, text: str, keep: Callable[[str], str]) -> str:
        """Hold back the white space at the start of a block. Return the rest, behind what `keep` returns of it."""
        rest = text.lstrip()
        self._hold(text[: len(text) - len(rest)])
        if not rest:
            return ""
        self._at_start = False
        return keep(self._take_space()) + rest

    def _leading_space(self, space: str) -> str:
        if not self._behind_reasoning and (self._has_text or not self._calls):
            return space
        return space[space.rfind("\n") + 1 :] if "\n" in space else ""

    def _without_trailing_space(self, text: str) -> str:
        """Hold back the white space at the end of `text`. Return the rest, behind what was held before."""
        visible = text.rstrip()
        before = self._take_space() if visible else ""
        self._hold(text[len(visible) :])
        return before + visible

    def _hold(self, space: str) -> None:
        if space:
            self._space.append(space)
            self._held += len(space)
            self._end_of_space = self._scan.position

    def _take_space(self) -> str:
        space = "".join(self._space)
        self._space, self._held = [], 0
        return space

    def _add_arguments(self, text: str) -> None:
        if text:
            self._add(self._make_arguments, text)

    def _add_text(self, text: str) -> None:
        self._has_text = True
        self._add(Text, text)

    def _add_span(self, length: int, end: int) -> None:
        if self._spans is not None and length:
            self._spans.add(length, end)

    def _add(self, make: Callable[[str], Event], text: str) -> None:
        if make != self._make:
            self._flush()
            self._make = make
        self._parts.append(text)

    def _emit(self, event: Event) -> None:
        self._scan.forget()
        self._flush()
        self._make = None
        self._events.append(event)

    def _flush(self) -> None:
        if self._parts:
            assert self._make is not None
            self._events.append(self._make("".join(self._parts)))
            self._parts = []
