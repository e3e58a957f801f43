"""Text stream of one sequence: detokenization, stop strings, token counts, aligned log-probabilities.

A token's log-probabilities are released together with its text. They are held back with text that is held back (an
incomplete code point, the start of a stop string) and dropped with text that is dropped (a stop string, a stop token).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..core.messages import TokenLogprob
from .detokenizer import Detokenizer
from .events import Event
from .stops import StopSet, StopStrings

if TYPE_CHECKING:
    from .text_view import TextView


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """One token with its log-probabilities. `text_offset`: start of its text in the visible text, in characters."""

    token: int
    logprob: TokenLogprob
    text_offset: int


@dataclass(frozen=True, slots=True)
class TextDelta:
    """The increment from new tokens: text, number of tokens, log-probability entries, the matched stop string, and the
    text as events, where the answer is read for reasoning and tool calls."""

    text: str = ""
    tokens: int = 0
    entries: tuple[TokenEntry, ...] = ()
    stop: str | None = None
    events: tuple[Event, ...] = ()


class TextStream:
    """Text stream of one sequence.

    The first complete string of `stops` ends the text and is cut off unless `include_stop`. Stop strings are not
    matched in the first `min_tokens` tokens. `reasoning_tokens` is 0: the text is not read for reasoning.
    """

    reasoning_tokens: int = 0
    malformed: Sequence[str] = ()

    def __init__(
        self,
        text_model: TextView,
        stops: Sequence[str] | StopSet = (),
        *,
        skip_special_tokens: bool = True,
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer = Detokenizer(text_model, skip_special_tokens=skip_special_tokens)
        self._stops = StopStrings(stops)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._unreleased: deque[tuple[TokenEntry, int]] = deque()
        self._read_chars = 0
        self._visible_chars = 0
        self.tokens = 0
        self.stop: str | None = None
        self._ended = False

    @property
    def ended(self) -> bool:
        """Whether a stop string or `finish` has ended the text. Later tokens are dropped."""
        return self._ended

    def push(
        self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob] = (), *, stop_token: bool = False
    ) -> TextDelta:
        """Add new tokens. `logprobs` has one entry a token, or is empty. `stop_token`: the last token is a stop token,
        which is counted and has no visible text."""
        texts: list[str] = []
        before = self.tokens
        hidden = len(tokens) - 1 if stop_token and not self._include_stop else len(tokens)
        for index, token in enumerate(tokens):
            if self._ended:
                break
            self.tokens += 1
            if index < hidden:
                texts.append(self._take(token, logprobs[index] if logprobs else None))
        return self._delta(texts, before)

    def finish(self) -> TextDelta:
        """End the text and return everything held back. A second call returns an empty delta."""
        if self._ended:
            return TextDelta()
        texts = [self._show(self._detokenizer.finish())]
        if not self._ended:
            rest = self._stops.flush()
            self._visible_chars += len(rest)
            texts.append(rest)
        self._ended = True
        return self._delta(texts, self.tokens)

    def _take(self, token: int, logprob: TokenLogprob | None) -> str:
        offset = self._read_chars
        text = self._detokenizer.push((token,))
        if logprob is not None:
            # An incomplete code point will add at least one character.
            needs = offset + len(text) + self._detokenizer.pending
            self._unreleased.append((TokenEntry(token, logprob, offset), needs))
        return self._show(text)

    def _show(self, text: str) -> str:
        self._read_chars += len(text)
        if self.tokens <= self._min_tokens:
            visible, stop = text, None
        else:
            visible, stop = self._stops.push(text)
        if stop is not None:
            self._ended, self.stop = True, stop
            visible += stop if self._include_stop else ""
        self._visible_chars += len(visible)
        return visible

    def _delta(self, texts: list[str], tokens_before: int) -> TextDelta:
        entries = self._release_entries()
        return TextDelta("".join(texts), self.tokens - tokens_before, entries, self.stop)

    def _release_entries(self) -> tuple[TokenEntry, ...]:
        """Return entries whose text is visible; at the end also one whose text is partly visible."""
        found = []
        while self._unreleased:
            entry, needs = self._unreleased[0]
            in_part = entry.text_offset < self._visible_chars or self.stop is None
            if needs > self._visible_chars and not (self._ended and in_part):
                break
            found.append(self._unreleased.popleft()[0])
        return tuple(found)
