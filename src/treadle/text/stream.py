"""One sequence's tokens to shown text: detokenize, find stop strings, count tokens, place log-probabilities.

A token's log-probabilities are released together with its text. Text that is held back (half a code point, the start of
a stop string) holds them back too, and text that is never shown (a stop string, a stop token) takes them along.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..core.messages import TokenLogprob
from .detokenizer import Detokenizer
from .stops import StopSet, StopStrings

if TYPE_CHECKING:
    from .view import TextView


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """One token with its log-probabilities. `text_offset` is where its text starts, in characters of the shown text."""

    token: int
    logprob: TokenLogprob
    text_offset: int


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What new tokens add: text to show, tokens to count, entries to show, and the stop string that ended it all."""

    text: str = ""
    tokens: int = 0
    entries: tuple[TokenEntry, ...] = ()
    stop: str | None = None


class TextStream:
    """Text of one sequence.

    `stops` end it where the first of them is complete; it is not shown unless `include_stop`. Stop strings are not
    looked for in the first `min_tokens` tokens.
    """

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
        self._waiting: deque[tuple[TokenEntry, int]] = deque()
        self._read = 0
        self._shown = 0
        self.tokens = 0
        self.stop: str | None = None
        self._ended = False

    @property
    def ended(self) -> bool:
        """Whether a stop string or `finish` ended the text; later tokens are dropped."""
        return self._ended

    def push(
        self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob] = (), *, stop_token: bool = False
    ) -> TextDelta:
        """Take new tokens; `logprobs` has one for each, or is empty. `stop_token`: the last of them is a stop token,
        which counts and shows no text."""
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
        """The sequence is over: what was held back comes out. A second call gives nothing."""
        if self._ended:
            return TextDelta()
        texts = [self._show(self._detokenizer.finish())]
        if not self._ended:
            rest = self._stops.flush()
            self._shown += len(rest)
            texts.append(rest)
        self._ended = True
        return self._delta(texts, self.tokens)

    def _take(self, token: int, logprob: TokenLogprob | None) -> str:
        offset = self._read
        text = self._detokenizer.push((token,))
        if logprob is not None:
            # An unfinished code point will add one character at least.
            needs = offset + len(text) + self._detokenizer.pending
            self._waiting.append((TokenEntry(token, logprob, offset), needs))
        return self._show(text)

    def _show(self, text: str) -> str:
        self._read += len(text)
        if self.tokens <= self._min_tokens:
            visible, stop = text, None
        else:
            visible, stop = self._stops.push(text)
        if stop is not None:
            self._ended, self.stop = True, stop
            visible += stop if self._include_stop else ""
        self._shown += len(visible)
        return visible

    def _delta(self, texts: list[str], tokens_before: int) -> TextDelta:
        entries = self._released()
        return TextDelta("".join(texts), self.tokens - tokens_before, entries, self.stop)

    def _released(self) -> tuple[TokenEntry, ...]:
        """Entries whose text is out; at the end also one whose text is out in part."""
        found = []
        while self._waiting:
            entry, needs = self._waiting[0]
            in_part = entry.text_offset < self._shown or self.stop is None
            if needs > self._shown and not (self._ended and in_part):
                break
            found.append(self._waiting.popleft()[0])
        return tuple(found)
