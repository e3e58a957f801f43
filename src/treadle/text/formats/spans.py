"""Places of the visible text within all generated text, for log-probabilities that go with it."""

from __future__ import annotations

from collections import deque


class VisibleSpans:
    """Spans of the generated text that are visible, in order. Lengths and places are in characters."""

    def __init__(self) -> None:
        self._spans: deque[tuple[int, int, int]] = deque()  # start and end in all text, start in the visible text
        self._written = 0

    def add(self, length: int, end: int) -> None:
        """Add visible text that ends at `end`."""
        start = end - length
        if self._spans and self._spans[-1][1] == start:
            before, _, first = self._spans.pop()
            self._spans.append((before, end, first))
        else:
            self._spans.append((start, end, self._written))
        self._written += length

    def find(self, start: int, end: int) -> tuple[int, int] | None:
        """Return the start and end, in the visible text, of what is visible of a part of all text; None if nothing is.
        Parts are asked for in order: spans before `start` are forgotten."""
        while self._spans and self._spans[0][1] <= start:
            self._spans.popleft()
        if not self._spans or self._spans[0][0] >= end:
            return None
        begin, _, first = self._spans[0]
        last_start, last_end, last_first = next(span for span in reversed(self._spans) if span[0] < end)
        return first + max(start - begin, 0), last_first + min(end, last_end) - last_start
