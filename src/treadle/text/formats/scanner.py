"""Scanner of generated text: the primitives with which parsers of tool calls read an answer while it is generated.

A parser is a generator that yields where it needs more text. Each primitive consumes characters as soon as their
meaning is known and returns the same wherever the text was cut, so a parser made of them does too. Consumed characters
are never read again: the unread rest is shorter than a marker.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from itertools import pairwise
from typing import NoReturn, TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A parser that returns T. It yields where it needs more text."""

SPACE = re.compile(r"\s*")


class Mismatch(Exception):
    """The text is not what the parser expects."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class EndOfAnswer(Mismatch):
    """The answer ended where the parser expects more."""


class Markers:
    """Texts to search for, none of them a prefix of another."""

    def __init__(self, *texts: str) -> None:
        unique = sorted(dict.fromkeys(texts))
        assert all(texts), "a marker is empty"
        assert not any(b.startswith(a) for a, b in pairwise(unique)), f"a marker begins another: {unique}"
        self.texts = tuple(unique)
        self._longest = max(map(len, unique), default=0)
        prefixes = {text[:length] for text in unique for length in range(1, len(text))}
        self._whole = re.compile("|".join(map(re.escape, unique)) or "(?!)")
        self._part = re.compile(rf"(?:{'|'.join(map(re.escape, sorted(prefixes, key=len, reverse=True))) or '(?!)'})\Z")

    def find(self, text: str, start: int, last: int | None = None) -> re.Match[str] | None:
        """Return the first marker in `text` that begins at `start` or behind, and at `last` at the latest."""
        return self._whole.search(text, start, len(text) if last is None else last + self._longest)

    def safe_end(self, text: str, start: int) -> int:
        """Return where a proper prefix of a marker at the end of `text` begins; the text's length if there is none."""
        part = self._part.search(text, max(start, len(text) - self._longest + 1))
        return len(text) if part is None else part.start()


class Scanner:
    """Unread text of one answer. While `recording`, consumed text is kept until `forget` or `take_recorded`.

    From `stop_before` on, text ends in front of the first of some markers, as if the answer did, until `go_on`. Only
    `accept` and a search for the marker itself go past it.
    """

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._before = 0  # characters consumed before `_text`
        self._recorded: list[str] = []
        self._recorded_from = 0
        self._cut_at = -1  # the position behind which the answer ends in the beginning of an accepted text
        self._stops: Markers | None = None
        self._stop_at = -1  # where the first of them begins in `_text`, behind its end if nowhere; -1: not searched
        self.recording = False
        self.ended = False

    @property
    def position(self) -> int:
        """Number of consumed characters."""
        return self._before + self._at

    @property
    def unrecorded(self) -> int:
        """Number of consumed characters before the recorded ones."""
        return self._recorded_from if self.recording else self.position

    @property
    def is_done(self) -> bool:
        """Whether the answer has ended and all of it was read."""
        return self.ended and self._at == len(self._text)

    def feed(self, text: str) -> None:
        """Add generated text."""
        self._before += self._at
        self._text = self._text[self._at :] + text if self._at < len(self._text) else text
        self._at, self._stop_at = 0, -1

    def stop_before(self, markers: Markers) -> None:
        """Let the text end in front of the first of `markers`."""
        self._stops, self._stop_at = markers, -1

    def go_on(self) -> None:
        """Let the text end with the answer alone."""
        self._stops = None

    def forget(self) -> None:
        """Drop the recorded text: it has become an event."""
        self._recorded.clear()
        self._recorded_from = self.position

    def record(self, text: str) -> None:
        """Begin to record, with `text` as if it had just been consumed."""
        self._recorded = [text]
        self._recorded_from = self.position - len(text)
        self.recording = True

    def drop_rest(self) -> None:
        """Consume the rest of the text, and stop to record."""
        self._recorded, self.recording = [], False
        self.advance(len(self._text) - self._at)

    def take_recorded(self) -> str:
        """Stop to record and return the recorded text."""
        text = "".join(self._recorded)
        self._recorded, self.recording = [], False
        return text

    def fail(self, reason: str) -> NoReturn:
        """Raise EndOfAnswer at the end of the answer, or where it ends in the beginning of what was to be accepted;
        otherwise Mismatch."""
        if self.is_done or self._cut_at == self.position:
            raise EndOfAnswer(f"{reason}, but the answer ended")
        raise Mismatch(reason)

    def advance(self, length: int) -> str:
        """Consume `length` characters that were peeked."""
        taken = self._text[self._at : self._at + length]
        self._at += length
        if self.recording:
            self._recorded.append(taken)
        return taken

    def _end(self) -> int:
        """Return up to where the text may be consumed: not into a marker that stops it, or what may become one."""
        if self._stops is None:
            return len(self._text)
        if self._stop_at < self._at:
            found = self._stops.find(self._text, self._at)
            self._stop_at = len(self._text) + 1 if found is None else found.start()
        if self._stop_at <= len(self._text):
            return self._stop_at
        return len(self._text) if self.ended else self._stops.safe_end(self._text, self._at)

    def _is_stopped(self) -> bool:
        """Whether no text will come: the answer ended, or a marker that stops it comes next."""
        return self.ended or (self._stops is not None and self._stop_at == self._at)

    def peek(self) -> Steps[str]:
        """Return the next character without consuming it; "" at the end of the text."""
        while self._at == self._end():
            if self._is_stopped():
                return ""
            yield
        return self._text[self._at]

    def pass_run(self, pattern: re.Pattern[str], sink: Callable[[str], None]) -> Steps[None]:
        """Consume the characters that `pattern` (a character class, repeated) matches, and pass them to `sink`."""
        while True:
            end = self._end()
            match = pattern.match(self._text, self._at, end)
            if match is not None and match.end() > self._at:
                sink(self.advance(match.end() - self._at))
            if self._at < end or self._is_stopped():
                return
            yield

    def take_run(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Consume and return the characters that `pattern` (a character class, repeated) matches."""
        found: list[str] = []
        yield from self.pass_run(pattern, found.append)
        return "".join(found)

    def pass_space(self, sink: Callable[[str], None]) -> Steps[None]:
        """Consume white space and pass it to `sink`."""
        yield from self.pass_run(SPACE, sink)

    def skip_space(self) -> Steps[None]:
        """Consume white space."""
        yield from self.pass_run(SPACE, _drop)

    def accept(self, *texts: str) -> Steps[str | None]:
        """Consume and return the one of `texts` that comes next; None, and nothing is consumed, if none does. None of
        them may be a prefix of another."""
        longest = max(map(len, texts), default=0)
        while True:
            rest = self._text[self._at : self._at + longest]
            for text in texts:
                if rest.startswith(text):
                    return self.advance(len(text))
            begins = any(text.startswith(rest) for text in texts)
            if self.ended or not begins:
                if begins:
                    self._cut_at = self.position
                return None
            yield

    def expect(self, *texts: str) -> Steps[str]:
        """Consume and return the one of `texts` that comes next. Raises Mismatch if none does: EndOfAnswer, and it is
        consumed, where the answer ends in the beginning of one."""
        found = yield from self.accept(*texts)
        if found is None:
            self._skip_beginning(*texts)
            self.fail(f"expected {' or '.join(map(repr, texts))}")
        return found

    def skip_closing(self, text: str) -> Steps[bool]:
        """Consume white space and `text`, if it comes next, or its beginning at the end of the answer. Return whether
        one of them was there."""
        yield from self.skip_space()
        return (yield from self.accept(text)) is not None or self._skip_beginning(text)

    def _skip_beginning(self, *texts: str) -> bool:
        """Consume the beginning of one of `texts` at the end of the answer. Return whether there is one."""
        rest = self._text[self._at :]
        found = self.ended and bool(rest) and any(text.startswith(rest) for text in texts)
        if found:
            self.advance(len(rest))
        return found

    def pass_until(self, markers: Markers, sink: Callable[[str], None]) -> Steps[str | None]:
        """Pass text to `sink` up to a marker, and consume and return the marker; None at the end of the text."""
        while True:
            end = self._end()
            match = markers.find(self._text, self._at, end)
            if match is not None and match.start() <= end:
                self._pass(match.start(), sink)
                return self.advance(len(match.group()))
            self._pass(min(end, len(self._text) if self.ended else markers.safe_end(self._text, self._at)), sink)
            if self._is_stopped():
                return None
            yield

    def _pass(self, end: int, sink: Callable[[str], None]) -> None:
        if end > self._at:
            sink(self.advance(end - self._at))

    def take_until(self, markers: Markers) -> Steps[tuple[str, str]]:
        """Consume the text up to a marker, and the marker; return both. Raises Mismatch without a marker:
        EndOfAnswer at the end of the answer."""
        found: list[str] = []
        marker = yield from self.pass_until(markers, found.append)
        if marker is None:
            self.fail(f"expected {' or '.join(map(repr, markers.texts))}")
        return "".join(found), marker


def _drop(text: str) -> None:
    """Sink for text without a meaning."""
