"""Picking tokens for a batch of rows, each by its own parameters and as if it were alone.

The order for a row: biases and held-back stop tokens, penalties (`edits.py`), temperature, min_p, top_k, top_p, then
one draw. Greedy rows take the largest edited logit. A stage runs only for the rows that ask for it.

A draw inverts the cumulative distribution at a number that depends on the row's seed and position alone. Rows without
top_k and top_p draw in two levels, a block of the vocabulary and then a token of it, which needs no sorting. The others
look at their CANDIDATES most probable tokens; a row whose nucleus is wider says so in `Draw.spilled` and is drawn again
among more of them, in the end all: the same number picks the same token. Where a kernel draws (`draw_kernel.py`), it
looks at all tokens, and at a row in `spilled` not at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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
from .logits_processors import LogitsProcessors, process_logits
from .rng import uniforms, whole_uniforms
from .vocab_ops import exp, top_indices

CANDIDATES = 1024
COLDEST = 1e-5  # a lower temperature picks the largest logit anyway, and would divide by nothing
_WIDER = 16
_BLOCK = 512

Kernel = Callable[[Any, Any], tuple[Any, Any]]
"""Draws for rows of logits, by what `asked_of` makes of them. See `DrawKernel`."""


class SamplingRow:
    """How one row picks its tokens, and what it has picked so far where that matters. `inverse` is one over the
    temperature, 0 where the row is greedy; `top_k` is 0 where off, `top_p` infinite.

    Raises ValueError when a parameter is out of range: that is the row's own fault.
    """

    def __init__(self, request: Submit, history: Sequence[int], vocabulary: int) -> None:
        check(request.sampling)
        self.sampling = request.sampling
        self.edits = LogitsProcessors(request, history, vocabulary)
        self.logprobs = request.logprobs
        self.greedy = self.sampling.temperature == 0
        self.inverse = 0.0 if self.greedy else 1 / max(self.sampling.temperature, COLDEST)
        self.min_p = min(self.sampling.min_p, 1.0)
        self.top_k = self.sampling.top_k if self.sampling.top_k < vocabulary else 0
        self.top_p = self.sampling.top_p if self.sampling.top_p < 1 else math.inf
        self.narrow = not self.greedy and (self.top_k > 0 or self.top_p < 1)

    @cached_property
    def numbers(self) -> tuple[int, int, int, int]:
        """`inverse`, `min_p`, `top_k` and `top_p` as a kernel reads them: whole, or the bits of a float32."""
        return bits_of(self.inverse), bits_of(self.min_p), self.top_k, bits_of(self.top_p)

    @property
    def remembers(self) -> bool:
        """Whether the next pick depends on the last one."""
        return self.edits.seen is not None

    def picked(self, token: int) -> None:
        """`token` was generated: count it where that matters."""
        if self.edits.seen is not None:
            self.edits.seen.add(token)


def check(sampling: Sampling) -> None:
    """Raise ValueError naming the first parameter that has no meaning."""
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
    """Tokens picked, not yet evaluated: evaluate `arrays`, then call `settle`. `again` makes a group of rows by their
    places in `spilled`. Once `land` was called they are on their way to the host."""

    tokens: Any  # (B,) int32
    spilled: Any | None = None  # (R,): the nucleus was wider than what was looked at
    again: Callable[[list[int]], _Narrow] | None = None
    landed: PendingReadback | None = None

    @property
    def arrays(self) -> list[Any]:
        filled = None if self.landed is None else self.landed.filled
        return [array for array in (self.tokens, self.spilled, filled) if array is not None]

    @property
    def filled(self) -> Any:
        """The tokens, and maybe zeros behind them."""
        return self.tokens if self.landed is None else self.landed.filled

    def land(self, landing: Readback) -> None:
        """Send the tokens to the host, and which rows spilled where a kernel says it of all of them."""
        if self.spilled is None or self.spilled.dtype == mx.int32:
            self.landed = landing.send(self.tokens, self.spilled)

    def _read(self) -> tuple[list[int], list[int]]:
        if self.landed is None:
            return self.tokens.tolist(), [] if self.spilled is None else self.spilled.tolist()
        tokens, spilled = self.landed.read()
        return tokens, [] if self.spilled is None else spilled

    def settle(self) -> tuple[list[int], bool]:
        """The tokens, and whether any differs from what `tokens` holds as it was drawn again."""
        tokens, flags = self._read()
        again, width = self.again, CANDIDATES
        redrawn = False
        while again is not None and any(flags):
            width *= _WIDER
            group = again([i for i, wide in enumerate(flags) if wide])
            again = group.only
            picked, spilled = group.pick(width)
            for place, token in zip(group.base.places, picked.tolist(), strict=True):
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
) -> Draw:
    """Pick a token for each row of `logits` (B, V) at its position, by `kernel` where there is one; `put` makes the
    arrays of what is edited. Nothing is evaluated yet."""
    logits = process_logits(logits, [row.edits for row in rows], positions, put)
    if kernel is None or all(row.greedy for row in rows):
        return _draw(logits, rows, positions)
    tokens, spilled = kernel(logits, put(asked_of(rows, positions))[0])
    return Draw(tokens, spilled, lambda places: _Narrow.of(logits, rows, positions, places))


def asked_of(rows: Sequence[SamplingRow], positions: Sequence[int]) -> npt.NDArray[np.int32]:
    """What a kernel reads (B, 6): each row's `numbers`, and the two at which it draws at its position."""
    numbers = np.array([row.numbers for row in rows], np.int32)
    return np.concatenate([numbers, whole_uniforms([row.sampling.seed for row in rows], positions)], axis=1)


def _draw(logits: Any, rows: Sequence[SamplingRow], positions: Sequence[int]) -> Draw:
    wide = [i for i, row in enumerate(rows) if not row.greedy and not row.narrow]
    narrow = [i for i, row in enumerate(rows) if row.narrow]
    tokens = None
    if len(wide) + len(narrow) < len(rows):
        tokens = mx.argmax(logits, axis=-1).view(mx.int32)
    if wide:
        picked = _pick_wide(_Scaled.of(logits, rows, positions, wide))
        tokens = _placed(tokens, wide, picked, len(rows))
    if not narrow:
        return Draw(tokens)
    group = _Narrow.of(logits, rows, positions, narrow)
    picked, spilled = group.pick(CANDIDATES)
    return Draw(_placed(tokens, narrow, picked, len(rows)), spilled, group.only)


def _placed(tokens: Any | None, places: list[int], picked: Any, count: int) -> Any:
    if len(places) == count:
        return picked
    if tokens is None:
        tokens = mx.zeros(count, mx.int32)
    tokens[mx.array(places)] = picked
    return tokens


@dataclass
class _Scaled:
    """Rows that draw: `scaled` (R, V) are logits over temperature, 0 at the largest; `chance` (R, 2) is uniform."""

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
        """These rows of the group alone."""
        index = mx.array(some)
        return _Scaled(
            places=[self.places[i] for i in some],
            scaled=self.scaled[index],
            min_p=self.min_p[index],
            has_min_p=self.has_min_p,
            chance=self.chance[index],
        )

    def weights(self, scaled: Any) -> Any:
        """Probabilities over the largest one, and 0 below min_p."""
        weights = exp(scaled)
        return weights * (weights >= self.min_p) if self.has_min_p else weights


def _pick_wide(group: _Scaled) -> Any:
    """A token (R,) for each row of `group`, by its block's weight and then its own."""
    weights = group.weights(group.scaled)
    count, vocabulary = weights.shape
    weights = mx.pad(weights, [(0, 0), (0, -vocabulary % _BLOCK)]).reshape(count, -1, _BLOCK)
    block = _first_over(mx.sum(weights, axis=-1), group.chance[:, :1])
    inside = mx.take_along_axis(weights, block[:, :, None], axis=1)[:, 0]
    token = block * _BLOCK + _first_over(inside, group.chance[:, 1:])
    return mx.minimum(token[:, 0], vocabulary - 1).astype(mx.int32)


def _first_over(weights: Any, chance: Any) -> Any:
    """The index (R, 1) at which the running sum of `weights` (R, N) goes over `chance` (R, 1) of the whole.

    An index of weight 0 is never picked; rounding at the end, or no weight at all, gives the heaviest.
    """
    sums = mx.cumsum(weights, axis=-1)
    over = sums > chance * sums[:, -1:]
    first = mx.argmax(over, axis=-1, keepdims=True)
    heaviest = mx.argmax(weights, axis=-1, keepdims=True)
    return mx.where(mx.any(over, axis=-1, keepdims=True), first, heaviest).astype(mx.int32)


@dataclass
class _Narrow:
    """Rows with top_k or top_p. `top_k` (R, 1) is the vocabulary where off, `top_p` (R, 1) infinite where off."""

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
        """These rows of the group alone."""
        index = mx.array(some)
        whole = [self.whole[i] for i in some]
        return _Narrow(self.base.only(some), self.top_k[index], self.top_p[index], whole, self.widest)

    def pick(self, candidates: int) -> tuple[Any, Any | None]:
        """A token (R,) a row out of its most probable ones, and which rows would have needed more than those."""
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
        """The weight (R, 1) that top_p takes its share of: of the top_k, or of everything."""
        if not any(self.whole):
            return of_candidates
        everything = mx.sum(self.base.weights(self.base.scaled), axis=-1, keepdims=True)
        return mx.where(mx.array(self.whole)[:, None], everything, of_candidates)
