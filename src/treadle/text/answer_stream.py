"""Text stream of a sequence whose answer is read for reasoning and tool calls: events instead of plain text.

The reader sees special tokens, as some are markers. Stop strings are matched in visible text alone, so one never spans
a tool call. Log-probabilities are those of tokens with visible text, and come with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..core.messages import TokenLogprob
from .events import Event, Malformed, Text
from .formats.reader import AnswerReader, ReaderSetup, Segment
from .formats.spans import VisibleSpans
from .stops import StopSet
from .stream import TextDelta, TextStream, TokenEntry
from .text_view import TextView


@dataclass(frozen=True, slots=True)
class _Undecided:
    """A token whose text may be visible. `start` and `end`: its place in the reader's text, in characters."""

    token: int
    logprob: TokenLogprob
    start: int
    end: int


class AnswerStream(TextStream):
    """Text stream of one sequence with the events of its answer. `text` of its deltas is the visible text.

    With `logprobs` tokens come with their log-probabilities. `reasoning_tokens` counts tokens of reasoning, with its
    markers. `malformed` are the reasons why text that looked like calls was none.
    """

    def __init__(
        self,
        text_model: TextView,
        setup: ReaderSetup,
        stops: Sequence[str] | StopSet = (),
        *,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
        logprobs: bool = False,
    ) -> None:
        super().__init__(text_model, stops, skip_special_tokens=False, min_tokens=min_tokens)
        self._text_model = text_model
        self._special = text_model.special_ids
        self._skip_special_tokens = skip_special_tokens
        self._spans = VisibleSpans()
        self._reader = AnswerReader(setup, self._spans if logprobs else None)
        self._given = 0  # characters given to the reader; counted for log-probabilities
        self._new: list[Event] = []
        self._undecided: deque[_Undecided] = deque()
        self.malformed: list[str] = []

    def finish(self) -> TextDelta:
        if self._ended:
            return TextDelta()
        texts = [self._write(self._reader.push([(self._detokenizer.finish(), False)]))]
        texts.append(self._write(self._reader.finish()))
        if not self._ended:
            texts.append(self._flush_stops())
        self._decide()
        self._ended = True
        return self._delta(texts, self.tokens)

    def _take(self, token: int, logprob: TokenLogprob | None) -> str:
        segments = self._segments(token)
        was_reasoning = self._reader.in_reasoning
        text = self._write(self._reader.push(segments))
        self.reasoning_tokens += was_reasoning or self._reader.in_reasoning
        if logprob is not None:
            start, self._given = self._given, self._given + sum(len(text) for text, _ in segments)
            self._undecided.append(_Undecided(token, logprob, start, self._given + self._detokenizer.pending))
            self._decide()
        return text

    def _segments(self, token: int) -> list[Segment]:
        """Return the text that a token completes, a marker apart from what was held back before it."""
        if token not in self._special:
            return [(self._detokenizer.push((token,)), False)]
        marker = self._text_model.token_text(token)
        is_marker = any(marker in text for text in self._reader.markers)
        if self._skip_special_tokens and not is_marker:
            return []
        text = self._detokenizer.push((token,))
        if not is_marker or not text.endswith(marker):
            return [(text, False)]
        return [(text[: -len(marker)], False), (marker, True)]

    def _write(self, events: Iterable[Event]) -> str:
        """Add events up to a stop string, and return their visible text."""
        texts = []
        for event in events:
            if self._ended:
                break
            if isinstance(event, Text):
                texts.append(self._add_text(self._show(event.text)))
                continue
            texts.append(self._flush_stops())
            self._new.append(event)
            if isinstance(event, Malformed):
                self.malformed.append(event.reason)
        return "".join(texts)

    def _flush_stops(self) -> str:
        rest = self._stops.flush()
        self._visible_chars += len(rest)
        return self._add_text(rest)

    def _add_text(self, text: str) -> str:
        if text:
            last = self._new[-1] if self._new else None
            if isinstance(last, Text):
                self._new[-1] = Text(last.text + text)
            else:
                self._new.append(Text(text))
        return text

    def _decide(self) -> None:
        """Queue the entries of tokens whose visible part is known, and drop those of tokens without one."""
        while self._undecided and self._undecided[0].end <= self._reader.decided:
            token = self._undecided.popleft()
            if (place := self._spans.find(token.start, token.end)) is not None:
                entry = TokenEntry(token.token, token.logprob, place[0])
                self._unreleased.append((entry, place[1]))

    def _delta(self, texts: list[str], tokens_before: int) -> TextDelta:
        events, self._new = tuple(self._new), []
        entries = self._release_entries()
        return TextDelta("".join(texts), self.tokens - tokens_before, entries, self.stop, events)
