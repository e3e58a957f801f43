"""A step of the text runner between its start and its end: who takes part, and what is to be read."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
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
class Step:
    """`rows` compute `pieces`, and those in `picks` pick a token; `failed` are those that can't, and why; those in
    `evicted` have lost their cached prefix."""

    began: float
    pieces: list[RowSegment]
    rows: dict[str, RunningRow]
    picks: list[DecodeRow]
    failed: dict[str, str]
    evicted: Collection[str] = ()
    computed: ForwardOutput = field(default_factory=ForwardOutput)
    drawn: Draw | None = None
    logprobs: Logprobs | None = None
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

    @property
    def picked(self) -> Any | None:
        """The picks, on the device, and maybe zeros behind them."""
        return None if self.drawn is None else self.drawn.filled

    def picked_from(self, put: Put = direct) -> Any:
        """Logits (P, V) of the last token of each row that picks."""
        logits, places = self.computed.logits, [self.computed.places[pick.id] for pick in self.picks]
        last = [first + count - 1 for first, count in places]
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
        logits = mx.take_along_axis(self.picked_from(), mx.array(list(tokens), mx.int32)[:, None], axis=-1)
        wrong = np.array(mx.isnan(logits)[:, 0])
        return [pick.id for pick, is_wrong in zip(self.picks, wrong, strict=True) if is_wrong]

    def read_logprobs(self, tokens: Sequence[int], redrawn: bool) -> dict[int, TokenLogprob]:
        """Log-probabilities of `tokens`, which were picked, by their place in `picks`."""
        if self.logprobs is None:
            return {}
        if not redrawn:
            return self.logprobs.read()
        return Logprobs(self.picked_from(), mx.array(list(tokens), mx.int32), self.sampling).read()


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
