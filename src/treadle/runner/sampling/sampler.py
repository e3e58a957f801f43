"""Sampler: one token for each row of a batch, by the row's own parameters and independent of the other rows.

Order: logits processors, bitmasks of constraints, temperature, min_p, top_k, top_p, one draw. Greedy rows take the
largest processed logit. A stage runs only for the rows that need it.

A draw inverts the cumulative distribution at a number that depends on the row's seed and position alone. Rows without
top_k and top_p draw a block of the vocabulary and then a token of the block, which needs no sorting. Other rows draw
among their CANDIDATES most probable tokens. A row whose nucleus is wider is flagged in `Draw.spilled` and drawn again
among more candidates, at last among all; the same number selects the same token. The sampling kernel
(`sampling_kernel.py`) looks at all tokens and draws nothing for the rows that it flags.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ...core.messages import Sampling, Submit
from ..device.cuda import bits_of
from ..device.readback import PendingReadback, Readback
from ..device.staging import Put, direct
from .constraints import RowConstraint
from .logits_processors import LogitsProcessors, process_logits
from .rng import integer_uniforms, uniforms
from .vocab_ops import exp, top_indices

CANDIDATES = 1024
MIN_TEMPERATURE = 1e-5  # below it the largest logit always wins, and 1 / temperature overflows
_WIDER = 16
_BLOCK = 512

Kernel = Callable[[Any, Any], tuple[Any, Any]]
"""Draws tokens for rows of logits, given `kernel_inputs`. See `SamplingKernel`."""


class SamplingRow:
    """Sampling state of one row: its parameters, its logits processors, and what these need to know of its tokens.

    `constraint` is None for a row without one, and once it is over. `ended` is true where the last token ended the
    sequence by its constraint. `inverse` is one over the temperature, 0 for a greedy row. `top_k` is 0 when off,
    `top_p` infinite. Raises ValueError for a parameter out of range.
    """

    def __init__(
        self, request: Submit, history: Sequence[int], vocabulary: int, constraint: RowConstraint | None = None
    ) -> None:
        check(request.sampling)
        self.sampling = request.sampling
        self.constraint = constraint
        self.ended = False
        self.processors = LogitsProcessors(request, history, vocabulary, constraint)
        self.logprobs = request.logprobs
        self.greedy = self.sampling.temperature == 0
        self.inverse = 0.0 if self.greedy else 1 / max(self.sampling.temperature, MIN_TEMPERATURE)
        self.min_p = min(self.sampling.min_p, 1.0)
        self.top_k = self.sampling.top_k if self.sampling.top_k < vocabulary else 0
        self.top_p = self.sampling.top_p if self.sampling.top_p < 1 else math.inf
        self.narrow = not self.greedy and (self.top_k > 0 or self.top_p < 1)

    @cached_property
    def parameters(self) -> tuple[int, int, int, int]:
        """`inverse`, `min_p`, `top_k` and `top_p` as int32 for a kernel: floats by their bits."""
        return bits_of(self.inverse), bits_of(self.min_p), self.top_k, bits_of(self.top_p)

    @property
    def depends_on_last_token(self) -> bool:
        """Whether the next token's distribution depends on the last one sampled, other than through the model."""
        return self.processors.seen is not None or self.limited

    @property
    def limited(self) -> bool:
        """Whether its constraint limits the next token."""
        return self.constraint is not None and self.constraint.limit is not None

    @property
    def remembers(self) -> bool:
        """Whether the distribution of later tokens depends on those before them, other than through the model."""
        return self.processors.seen is not None or self.constraint is not None

    def fork(self) -> SamplingRow:
        """Return a state that goes on from here by itself, along tokens that may not be taken."""
        made = copy(self)
        made.constraint = None if self.constraint is None else self.constraint.fork()
        made.processors = self.processors.fork(made.constraint)
        return made

    def accept(self, token: int) -> str:
        """Take over a settled token: count it, if a penalty needs the count, and advance the constraint. Return why the
        row can't go on; empty if it can."""
        if self.processors.seen is not None:
            self.processors.seen.add(token)
        if self.constraint is None:
            return ""
        self.constraint.accept(token)
        failure, self.ended = self.constraint.failure, self.constraint.ended
        if self.constraint.over:
            self.constraint = self.processors.constraint = None
        return failure

    def force(self, least: int) -> tuple[list[int], str]:
        """Take over the tokens that its constraint forces next, if they are `least` or more. Return them, and why the
        row can't go on, which is empty if it can. None are forced where log-probabilities are wanted: those need the
        logits of every token."""
        constraint = self.constraint
        if constraint is None or self.logprobs is not None:
            return [], ""
        tokens = constraint.forced()
        if len(tokens) < least:
            return [], ""
        for count, token in enumerate(tokens, 1):
            if constraint.settle(token) != token:
                constraint.unsettle()
                return tokens[: count - 1], ""
            if (failure := self.accept(token)) or self.ended or constraint.searching:
                return tokens[:count], failure
        return tokens, ""


def check(sampling: Sampling) -> None:
    """Raise ValueError that names the first parameter out of range."""
    numbers = {
        "temperature": (sampling.temperature, 0.0),
        "top_p": (sampling.top_p, 0.0),
        "top_k": (sampling.top_k, 0.0),
        "min_p": (sampling.min_p, 0.0),
        "repetition_penalty": (sampling.repetition_penalty, 1e-9),
        "presence_penalty": (sampling.presence_penalty, -math.inf),
        "frequency_penalty": (sampling.frequency_penalty, -math.inf),
    }
    for name, (value, least) in numbers.items():
        if not (math.isfinite(value) and value >= least):
            raise ValueError(f"{name} is out of range: {value}")
    if any(not math.isfinite(bias) for _, bias in sampling.logit_bias):
        raise ValueError("logit_bias holds a number that is not finite")


@dataclass
class Draw:
    """Sampled tokens, not evaluated yet: evaluate `arrays`, then call `resolve`. `again` makes a group of rows by their
    places in `spilled`. `send` starts the copy to the host."""

    tokens: Any  # (B,) int32
    spilled: Any | None = None  # (R,): the nucleus was wider than the candidates
    again: Callable[[list[int]], _Narrow] | None = None
    readback: PendingReadback | None = None

    @property
    def arrays(self) -> list[Any]:
        filled = None if self.readback is None else self.readback.filled
        return [array for array in (self.tokens, self.spilled, filled) if array is not None]

    @property
    def filled(self) -> Any:
        """The tokens, possibly followed by zeros."""
        return self.tokens if self.readback is None else self.readback.filled

    def send(self, readback: Readback) -> None:
        """Start the copy of the tokens to the host, with a kernel's flags of spilled rows."""
        if self.spilled is None or self.spilled.dtype == mx.int32:
            self.readback = readback.send(self.tokens, self.spilled)

    def _read(self) -> tuple[list[int], list[int]]:
        if self.readback is None:
            return self.tokens.tolist(), [] if self.spilled is None else self.spilled.tolist()
        tokens, spilled = self.readback.read()
        return tokens, [] if self.spilled is None else spilled

    def resolve(self) -> tuple[list[int], bool]:
        """Return the tokens, and whether any was drawn again and may differ from the one in `tokens`."""
        tokens, flags = self._read()
        again, width = self.again, CANDIDATES
        redrawn = False
        while again is not None and any(flags):
            width *= _WIDER
            group = again([i for i, wide in enumerate(flags) if wide])
            again = group.only
            sampled, spilled = group.sample(width)
            for place, token in zip(group.base.places, sampled.tolist(), strict=True):
                tokens[place] = token
            flags = [] if spilled is None else spilled.tolist()
            redrawn = True
        return tokens, redrawn


def draw(
    logits: Any,
    rows: Sequence[SamplingRow],
    positions: Sequence[int],
    kernel: Kernel | None = None,
    put: Put = direct,
    masked: Callable[[Any], Any] | None = None,
) -> Draw:
    """Sample a token for each row of `logits` (B, V) at its position, with `kernel` if given. `put` uploads arrays of
    logits processors. `masked` returns processed logits with the constraints' bitmasks applied. Nothing is evaluated
    yet."""
    logits = process_logits(logits, [row.processors for row in rows], positions, put)
    if masked is not None:
        logits = masked(logits)
    if kernel is None or all(row.greedy for row in rows):
        return _draw(logits, rows, positions)
    tokens, spilled = kernel(logits, put(kernel_inputs(rows, positions))[0])
    return Draw(tokens, spilled, lambda places: _Narrow.of(logits, rows, positions, places))


def kernel_inputs(rows: Sequence[SamplingRow], positions: Sequence[int]) -> npt.NDArray[np.int32]:
    """Return a kernel's inputs (B, 6): each row's `parameters`, and its two random numbers at its position."""
    parameters = np.array([row.parameters for row in rows], np.int32)
    return np.concatenate([parameters, integer_uniforms([row.sampling.seed for row in rows], positions)], axis=1)


def _draw(logits: Any, rows: Sequence[SamplingRow], positions: Sequence[int]) -> Draw:
    wide = [i for i, row in enumerate(rows) if not row.greedy and not row.narrow]
    narrow = [i for i, row in enumerate(rows) if row.narrow]
    tokens = None
    if len(wide) + len(narrow) < len(rows):
        tokens = mx.argmax(logits, axis=-1).view(mx.int32)
    if wide:
        sampled = _sample_all(_Scaled.of(logits, rows, positions, wide))
        tokens = _placed(tokens, wide, sampled, len(rows))
    if not narrow:
        return Draw(tokens)
    group = _Narrow.of(logits, rows, positions, narrow)
    sampled, spilled = group.sample(CANDIDATES)
    return Draw(_placed(tokens, narrow, sampled, len(rows)), spilled, group.only)


def _placed(tokens: Any | None, places: list[int], sampled: Any, count: int) -> Any:
    if len(places) == count:
        return sampled
    if tokens is None:
        tokens = mx.zeros(count, mx.int32)
    tokens[mx.array(places)] = sampled
    return tokens


@dataclass
class _Scaled:
    """Rows that are not greedy: logits over temperature (R, V), with the largest at 0, and uniform numbers (R, 2)."""

    places: list[int]
    scaled: Any
    min_p: Any  # (R, 1)
    has_min_p: bool
    chance: Any

    @classmethod
    def of(cls, logits: Any, rows: Sequence[SamplingRow], positions: Sequence[int], places: list[int]) -> _Scaled:
        if len(places) < len(rows):
            logits = logits[mx.array(places)]
        some = [rows[i] for i in places]
        logits = logits.astype(mx.float32)
        # The largest finite number stands in for a row of nothing but -inf, whose weights are then all 0.
        largest = mx.maximum(mx.max(logits, axis=-1, keepdims=True), -3e38)
        per_row = mx.array([row.inverse for row in some], mx.float32)[:, None]
        return cls(
            places=places,
            scaled=(logits - largest) * per_row,
            min_p=mx.array([row.min_p for row in some], mx.float32)[:, None],
            has_min_p=any(row.min_p > 0 for row in some),
            chance=mx.array(uniforms([row.sampling.seed for row in some], [positions[i] for i in places])),
        )

    @property
    def vocabulary(self) -> int:
        return int(self.scaled.shape[-1])

    def only(self, some: list[int]) -> _Scaled:
        """Return a group of these rows alone."""
        index = mx.array(some)
        return _Scaled(
            places=[self.places[i] for i in some],
            scaled=self.scaled[index],
            min_p=self.min_p[index],
            has_min_p=self.has_min_p,
            chance=self.chance[index],
        )

    def weights(self, scaled: Any) -> Any:
        """Probabilities relative to the largest one; 0 below min_p."""
        weights = exp(scaled)
        return weights * (weights >= self.min_p) if self.has_min_p else weights


def _sample_all(group: _Scaled) -> Any:
    """Return a token (R,) for each row: first a block by its weight, then a token of the block."""
    weights = group.weights(group.scaled)
    count, vocabulary = weights.shape
    weights = mx.pad(weights, [(0, 0), (0, -vocabulary % _BLOCK)]).reshape(count, -1, _BLOCK)
    block = _first_over(mx.sum(weights, axis=-1), group.chance[:, :1])
    inside = mx.take_along_axis(weights, block[:, :, None], axis=1)[:, 0]
    token = block * _BLOCK + _first_over(inside, group.chance[:, 1:])
    return mx.minimum(token[:, 0], vocabulary - 1).astype(mx.int32)


def _first_over(weights: Any, chance: Any) -> Any:
    """Return the index (R, 1) at which the running sum of `weights` (R, N) exceeds `chance` (R, 1) of the total.

    An index of weight 0 is never selected. If rounding leaves none, or all weights are 0, it is the heaviest.
    """
    sums = mx.cumsum(weights, axis=-1)
    over = sums > chance * sums[:, -1:]
    first = mx.argmax(over, axis=-1, keepdims=True)
    heaviest = mx.argmax(weights, axis=-1, keepdims=True)
    return mx.where(mx.any(over, axis=-1, keepdims=True), first, heaviest).astype(mx.int32)


@dataclass
class _Narrow:
    """Rows with top_k or top_p: `top_k` (R, 1) is the vocabulary when off, `top_p` (R, 1) infinite when off."""

    base: _Scaled
    top_k: Any
    top_p: Any
    whole: list[bool]  # the row has no top_k: its nucleus is of the whole vocabulary
    widest: int  # the largest top_k

    @classmethod
    def of(cls, logits: Any, rows: Sequence[SamplingRow], positions: Sequence[int], places: list[int]) -> _Narrow:
        base = _Scaled.of(logits, rows, positions, places)
        rows = [rows[i] for i in places]
        return cls(
            base=base,
            top_k=mx.array([row.top_k or base.vocabulary for row in rows], mx.int32)[:, None],
            top_p=mx.array([row.top_p for row in rows], mx.float32)[:, None],
            whole=[row.top_k == 0 for row in rows],
            widest=max(row.top_k for row in rows),
        )

    def only(self, some: list[int]) -> _Narrow:
        """Return a group of these rows alone."""
        index = mx.array(some)
        whole = [self.whole[i] for i in some]
        return _Narrow(self.base.only(some), self.top_k[index], self.top_p[index], whole, self.widest)

    def sample(self, candidates: int) -> tuple[Any, Any | None]:
        """Return a token (R,) of the most probable `candidates` of each row, and flags (R,) of rows that need more."""
        base, vocabulary = self.base, self.base.vocabulary
        width = min(vocabulary, max(candidates, self.widest) if any(self.whole) else self.widest)
        best = top_indices(base.scaled, width)
        weights = base.weights(mx.take_along_axis(base.scaled, mx.minimum(best, vocabulary - 1), axis=-1))
        weights = weights * (mx.arange(width) < self.top_k)
        sums = mx.cumsum(weights, axis=-1)
        enough = self.top_p * self._total(sums[:, -1:])
        kept = weights * (sums - weights < enough)
        kept = mx.concatenate([weights[:, :1], kept[:, 1:]], axis=-1)
        token = mx.take_along_axis(best, _first_over(kept, base.chance[:, :1]), axis=-1)
        token = mx.minimum(token[:, 0], vocabulary - 1).astype(mx.int32)
        if width == vocabulary or not any(self.whole):
            return token, None
        return token, mx.array(self.whole) & (sums[:, -1] < enough[:, 0])

    def _total(self, of_candidates: Any) -> Any:
        """Total weight (R, 1) for top_p: of the top_k tokens, or of the whole vocabulary."""
        if not any(self.whole):
            return of_candidates
        everything = mx.sum(self.base.weights(self.base.scaled), axis=-1, keepdims=True)
        return mx.where(mx.array(self.whole)[:, None], everything, of_candidates)
