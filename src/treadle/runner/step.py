"""A step of the runner between its start and its end: its rows, their segments, and what is sampled."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from ..core.messages import Submit, TokenLogprob
from ..core.plan import DecodeRow, PrefillChunk
from .device.staging import Put, direct
from .forward.segments import ForwardOutput, KvSequence, RowSegment
from .sampling.logprobs import Logprobs, PromptScores
from .sampling.sampler import Draw, SamplingRow

_LONG = 64


@dataclass(slots=True, eq=False)
class RunningRow(KvSequence):
    """A live sequence: the one object for it in the runner, from its admission to its release.

    Its caches hold `cached` tokens, with those of steps that are not finished yet.
    """

    tokens: list[int]
    request: Submit
    sampling: SamplingRow
    cached: int


@dataclass(slots=True, eq=False)
class SampledGroup:
    """Rows of a step that are sampled together; `places` are their indices among the step's `picks`."""

    places: Sequence[int]
    drawn: Draw
    logprobs: Logprobs


@dataclass(slots=True, eq=False)
class Step:
    """`rows` compute `pieces`, and those in `picks` pick a token; `failed` are those that can't, and why; those in
    `evicted` have lost their cached prefix.

    Rows are sampled in `groups`: those that wait for the tokens of the step before, at the places in `deferred`, after
    all others. One group has all rows of most steps.
    """

    began: float
    pieces: list[RowSegment]
    rows: dict[str, RunningRow]
    picks: list[DecodeRow]
    failed: dict[str, str]
    evicted: Collection[str] = ()
    computed: ForwardOutput = field(default_factory=ForwardOutput)
    groups: list[SampledGroup] = field(default_factory=list)
    deferred: list[int] = field(default_factory=list)
    scores: dict[str, PromptScores] = field(default_factory=dict)

    def drop(self, ids: Collection[str]) -> None:
        """Leave rows out of it."""
        if ids:
            self.pieces = [piece for piece in self.pieces if piece.id not in ids]
            self.picks = [pick for pick in self.picks if pick.id not in ids]
            self.rows = {id_: row for id_, row in self.rows.items() if id_ not in ids}

    @property
    def sampling(self) -> list[SamplingRow]:
        """How each of `picks` is picked."""
        return [self.rows[pick.id].sampling for pick in self.picks]

    def sampled(self, put: Put = direct) -> Any | None:
        """The sampled tokens of all rows (int32) on the device, in the order of `picks`, and maybe zeros behind them;
        None if there are none. No row may be deferred any more."""
        assert not self.deferred
        if len(self.groups) < 2:
            return self.groups[0].drawn.filled if self.groups else None
        order = np.argsort([place for group in self.groups for place in group.places]).astype(np.int32)
        return mx.concatenate([group.drawn.tokens for group in self.groups])[put(order)[0]]

    def picked_from(self, picks: Sequence[DecodeRow], put: Put = direct) -> Any:
        """Logits (P, V) of the last token of each of `picks`."""
        logits, rows = self.computed.logits, [self.computed.places[pick.id] for pick in picks]
        last = [first + count - 1 for first, count in rows]
        assert logits is not None
        return logits if last == list(range(logits.shape[0])) else logits[put(np.array(last, np.int32))[0]]

    def prompt_scores(self, put: Put = direct) -> dict[str, PromptScores]:
        """Log-probabilities of the prompts' tokens that come after what was computed, where they are asked for."""
        scores = {}
        for piece in self.pieces:
            request = self.rows[piece.id].request
            if request.prompt_logprobs is not None and piece.id in self.computed.places:
                first, count = self.computed.places[piece.id]
                targets = request.prompt[piece.start + 1 : piece.start + 1 + count]
                if targets:
                    logits = self.computed.logits[first : first + len(targets)]  # type: ignore[index]
                    scores[piece.id] = PromptScores(logits, targets, request.prompt_logprobs, put)
        return scores

    def without_numbers(self, tokens: Sequence[int]) -> list[str]:
        """Rows whose picked token, one of `tokens`, has NaN for its logit."""
        logits = mx.take_along_axis(self.picked_from(self.picks), mx.array(list(tokens), mx.int32)[:, None], axis=-1)
        wrong = np.array(mx.isnan(logits)[:, 0])
        return [pick.id for pick, is_wrong in zip(self.picks, wrong, strict=True) if is_wrong]

    def read(self) -> tuple[list[int], dict[int, TokenLogprob], bool]:
        """Wait for the sampled tokens. Return them, log-probabilities by index, and whether any token differs from what
        the device has, as it was drawn again."""
        tokens, any_redrawn = [0] * len(self.picks), False
        found: dict[int, TokenLogprob] = {}
        for group in self.groups:
            own, redrawn = group.drawn.settle()
            logprobs = group.logprobs
            if redrawn:
                any_redrawn = True
                picks = [self.picks[place] for place in group.places]
                rows = [self.rows[pick.id].sampling for pick in picks]
                logprobs = Logprobs(self.picked_from(picks), mx.array(own, mx.int32), rows)
            if len(self.groups) == 1:
                return own, logprobs.read(), redrawn
            for place, token in zip(group.places, own, strict=True):
                tokens[place] = token
            found |= {group.places[i]: logprob for i, logprob in logprobs.read().items()}
        return tokens, found, any_redrawn

    def correct(self, tokens: Sequence[int]) -> None:
        """Put `tokens`, some of which were drawn again, in the place of what the device has."""
        drawn = Draw(mx.array(list(tokens), mx.int32))
        self.groups = [SampledGroup(range(len(tokens)), drawn, Logprobs(None, None, ()))]


def segment_of(
    row: RunningRow, chunk: PrefillChunk | None, decode: DecodeRow | None, before: Mapping[str, int]
) -> RowSegment:
    """Return the tokens that `row` computes: a chunk, the token that a decode row feeds, or both in a row. `before` are
    the indices of the tokens that the step before samples: the token to feed may be one of them."""
    start, previous, wants = row.cached, -1, 0
    end = start
    if chunk is not None:
        assert chunk.start == start, f"a chunk at {chunk.start}, and {start} tokens are in the cache"
        end += chunk.count
    tokens = row.tokens
    if decode is not None:
        end, wants = end + 1, 1
        assert len(row.request.prompt) + decode.position == end, "the prompt must be in the cache"
        if end > len(tokens):
            previous = before[row.id]
            tokens = [*tokens[start:], 0]
        else:
            tokens = tokens[start:end]
    else:
        tokens = tokens[start:end]
    if row.request.prompt_logprobs is not None and start < len(row.request.prompt) - 1:
        wants = len(tokens)
    return RowSegment(row, tokens, start, wants, decode is not None, previous)


def check_tokens(tokens: Sequence[int], vocabulary: int) -> None:
    """Raise ValueError for no tokens, or ids outside of the vocabulary: some devices read those from beyond the
    embedding table."""
    if not tokens:
        raise ValueError("the prompt is empty")
    low, high = _ends(tokens)
    if low < 0 or high >= vocabulary:
        wrong = low if low < 0 else high
        raise ValueError(f"token id {wrong} is outside the model's vocabulary of {vocabulary}")


def _ends(tokens: Sequence[int]) -> tuple[int, int]:
    """Return the smallest and the largest of `tokens`; for a long prompt ten times as fast as Python."""
    if len(tokens) > _LONG:
        with suppress(OverflowError):
            numbers = np.frombuffer(array("q", tokens), np.int64)
            return int(numbers.min()), int(numbers.max())
    return min(tokens), max(tokens)
