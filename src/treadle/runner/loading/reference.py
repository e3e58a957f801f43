"""Reference logits for self-tests of KV backends: mlx-lm's for each sequence alone, with their rounding noise.

A backend passes if it differs from the reference no more than the model's own arithmetic does. The noise is measured on
the loaded model by random rounding (Monte Carlo arithmetic), so one rule serves float32, bfloat16 and 4-bit weights,
and experts that rounding swaps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, count
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from .. import mlxlm
from ..layers.replace import ReplacedLayers
from ..mlxlm import Caches, MlxLm, Selection
from ..mlxlm.hooks import selected
from ..mlxlm.random_rounding import random_rounding

Deviations = npt.NDArray[np.float32]
"""Mean differences of logits over their spread, one for each place."""

_TIMES, _EXACT_TIMES = 2.5, 1000.0
"""How many times the model's own noise a backend may deviate. Correct backends are below 1.5, as the noise is measured
on the same model; in float32 at up to 20, as long sums have larger errors there, and faults at ten thousand."""
_SWAPPED = 5.0
"""How many times the usual noise a place has where rounding chose another expert; few places of other models do."""
_ROUNDS = 3
"""Evaluations with random rounding that the noise is taken from."""
_LEAST_SPREAD = 1e-9
_LARGE = 100.0
_INT8 = 127
_TOKENS = 38
"""Trials are made of the tokens below this one."""
BEYOND = 8
"""Tokens on either side of a window's border in a trial."""


@dataclass(frozen=True)
class Trial:
    """A sequence for self-tests: a prompt, computed in chunks of `split` tokens and the rest, and a continuation, which
    is decoded. Keys and values of `filled` made-up tokens come before it."""

    prompt: tuple[int, ...]
    split: int
    continuation: tuple[int, ...]
    filled: int = 0

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.prompt + self.continuation

    @property
    def places(self) -> list[int]:
        """The tokens whose logits are compared: the last of both chunks, and the continuation."""
        return [self.split - 1, *range(len(self.prompt) - 1, len(self.tokens))]

    @property
    def length(self) -> int:
        """Tokens of the sequence at its end, made-up ones included."""
        return self.filled + len(self.tokens)

    def other(self) -> Trial:
        """A trial of the same lengths with other tokens."""
        prompt, continuation = (
            tuple(1 + (5 * token + 11) % (_TOKENS - 1) for token in tokens)
            for tokens in (self.prompt, self.continuation)
        )
        return replace(self, prompt=prompt, continuation=continuation)


TRIALS = (
    Trial(tuple(range(1, 38)), 19, (14, 3, 27, 9)),
    Trial((8, 9), 1, (15, 31, 2, 6)),
    Trial((10, 11, 12, 13), 2, (16, 5, 22, 33)),
)
"""One that crosses a page, and two short ones beside it."""


def beyond_window(window: int) -> Trial:
    """A sequence that passes a window's border: its first made-up tokens drop out one by one."""
    return Trial(tuple(range(20, 20 + 2 * BEYOND)), BEYOND, (17, 4, 25, 12), filled=max(0, window - BEYOND))


@dataclass(frozen=True)
class Filling:
    """Made-up keys and values of a sequence's first tokens, one pair of (1, kv heads, n, D) a cache; None for a cache
    that holds something else.

    The model's own are repeated, so that filling a window costs no computation. Those that drop out of it first are
    attended to more, and their values are as large as all others together, so that one more or one less is seen in the
    logits. Recurrent states are zeros: the sequence goes on, and the code of some models treats its beginning in
    another way (RG-LRU, De et al., 2024).
    """

    keys_and_values: tuple[tuple[Any, Any] | None, ...]
    states: tuple[Sequence[Any] | None, ...] = ()

    @classmethod
    def of(cls, library: MlxLm, caches: Caches, count: int) -> Filling:
        """`count` tokens out of what one sequence's `caches` hold."""
        leaves = library.leaves(caches)
        filled = (_filling(library.keys_and_values(leaf), count) for leaf in leaves)
        return cls(tuple(filled), tuple(library.zero_states(leaf) for leaf in leaves))

    def put(self, library: MlxLm, caches: Caches) -> None:
        """Put them into one sequence's empty caches."""
        for leaf, pair, states in zip(library.leaves(caches), self.keys_and_values, self.states, strict=True):
            if pair is not None:
                leaf.update_and_fetch(*pair)
            for index, state in enumerate(states or ()):
                leaf[index] = state


def _filling(pair: tuple[Any, Any] | None, count: int) -> tuple[Any, Any] | None:
    if pair is None:
        return None
    keys, values = (mx.concatenate([array] * -(-count // array.shape[2]), axis=2)[..., :count, :] for array in pair)
    first = np.arange(count)[:, None] < 2 * BEYOND
    sharper, louder = mx.array(np.where(first, 2.0, 1.0)), mx.array(np.where(first, float(count), 1.0))
    return keys * sharper.astype(keys.dtype), values * louder.astype(values.dtype)


class Reference:
    """Logits of `module` for each trial alone, in mlx-lm's caches.

    Trials are no longer than `context` tokens. With `selection` the head computes only the compared tokens. With `int8`
    the tested backend stores keys and values in 8 bits, and the errors of that count as noise. The reference is
    computed without the faster `layers` of the module, which backends are tested with.
    """

    def __init__(
        self, library: MlxLm, module: Any, context: int, *, selection: Selection | None = None, int8: bool = False
    ) -> None:
        self.library = library
        self.module = module
        self.context = context
        self._selection = selection
        self._int8 = int8
        self.layers = ReplacedLayers(module, {})
        self._seeds = count(1)
        self._logits: dict[Trial, Any] = {}
        self._noise: dict[Trial, Deviations] = {}
        self._judged: list[float] = []

    def for_int8(self) -> Reference:
        """Return the reference for a backend that stores keys and values in 8 bits."""
        other = Reference(self.library, self.module, self.context, selection=self._selection, int8=True)
        other._logits, other._judged, other.layers = self._logits, self._judged, self.layers
        return other

    def trials(self, tokens: int = 0) -> list[Trial]:
        """All trials, those beyond a window where `tokens` tokens hold them (0: no limit). At least the short ones."""
        most = min(self.context, tokens or self.context)
        beyond = [beyond_window(window) for window in self.library.windows_of_caches(self.module)]
        return [*TRIALS, *(trial for trial in beyond if trial.length <= most)]

    @property
    def tested_tokens(self) -> int:
        """The length of the longest sequence that was compared."""
        return max((trial.length for trial in self._logits), default=0)

    @property
    def deviation(self) -> float:
        """Deviation of the last compared logits from the reference, in units of rounding noise."""
        return self._judged[-1] if self._judged else 0.0

    @cached_property
    def dtype(self) -> Any:
        """The type of the model's logits."""
        return self.module(mx.array([[1]], mx.int32), cache=self.library.new_caches(self.module)).dtype

    def logits(self, trial: Trial) -> Any:
        """Logits (n, V), float32, at the trial's places."""
        if trial not in self._logits:
            self._logits[trial] = self._run(trial)
        return self._logits[trial]

    def filling(self, trial: Trial) -> Filling:
        """The trial's made-up keys and values."""
        return Filling.of(self.library, self._example, trial.filled)

    def caches(self, trial: Trial, *, int8: bool = False) -> Caches:
        """Caches of one sequence that hold the trial's made-up tokens; with `int8` they round to 8 bits."""
        caches = self.library.new_caches(self.module)
        for leaf in self.library.leaves(caches) if int8 else ():
            _round_to_int8(leaf)
        if trial.filled:
            self.filling(trial).put(self.library, caches)
        return caches

    def judge(self, trials: Sequence[Trial], compute: Callable[[Sequence[Trial]], Sequence[Found]]) -> str:
        """Return the reason why the logits that `compute` finds for `trials` disagree with the reference; empty if they
        agree.

        Where rounding swaps experts, a first disagreement is judged again, together with trials of other tokens: swaps
        in half of a few sequences look like a fault, but half of so many have none.
        """
        rounds = [compute(trials)]
        reason = self.reason_against(*rounds)
        if reason and self._swaps:
            rounds.append(compute([trial.other() for trial in trials]))
            reason = self.reason_against(*rounds)
        return reason

    def reason_against(self, *rounds: Sequence[Found]) -> str:
        """Return the reason why logits disagree with the reference; empty if they agree. Each round has trials of the
        same lengths in the same order."""
        measured: list[list[Measured]] = []
        for found in rounds:
            measured.append([])
            for trial, logits, first in found:
                last = first + logits.shape[0]
                expected = self.logits(trial)[first:last]
                if logits.shape != expected.shape:
                    return f"its logits have shape {logits.shape} and not {expected.shape}"
                noise = self.noise(trial)[:, first:last]
                measured[-1].append(Measured(deviations(expected, logits), noise, first))
        self._judged.append(deviation(*measured))
        return verdict(measured, _EXACT_TIMES if self.exact else _TIMES)

    def noise(self, trial: Trial) -> Deviations:
        """Deviations (rounds, n) of correct evaluations of the trial, with the errors of random rounding. In float32
        those of a short trial do for all."""
        if trial not in self._noise:
            short = TRIALS[1]
            if self.exact and trial != short:
                self._noise[trial] = self.noise(short)
            else:
                self._noise[trial] = np.stack([self._deviations(trial) for _ in range(1 if self.exact else _ROUNDS)])
        return self._noise[trial]

    @property
    def _swaps(self) -> bool:
        """Whether the model makes choices that rounding changes: single noises are far beyond the others."""
        noise = np.concatenate([one.reshape(-1) for one in self._noise.values()])
        return bool(noise.max() > _SWAPPED * np.median(noise))

    @property
    def exact(self) -> bool:
        """Whether backends compute in float32 throughout."""
        return bool(self.dtype == mx.float32) and not self._int8

    def _deviations(self, trial: Trial) -> Deviations:
        expected = self.logits(trial)
        with self.layers.originals(), random_rounding(self.module, next(self._seeds)):
            return deviations(expected, self._run(trial, int8=self._int8))

    @cached_property
    def _example(self) -> Caches:
        caches = self.library.new_caches(self.module)
        self.module(mx.array([TRIALS[0].tokens], mx.int32), cache=caches)
        mx.eval(mlxlm.states(caches))
        return caches

    def _run(self, trial: Trial, *, int8: bool = False) -> Any:
        """The prompt in one pass and the continuation token by token, as mlx-lm decodes: some models compute a pass of
        one token in another way."""
        with self.layers.originals():
            return self._run_originals(trial, int8=int8)

    def _run_originals(self, trial: Trial, *, int8: bool) -> Any:
        caches, count = self.caches(trial, int8=int8), len(trial.prompt)
        logits = [self._pass(trial.prompt, caches, [place for place in trial.places if place < count])]
        logits += [self._pass((token,), caches, [0]) for token in trial.continuation]
        return mx.concatenate(logits)

    def _pass(self, tokens: Sequence[int], caches: Caches, places: Sequence[int]) -> Any:
        """Return the logits (n, V) of n places of `tokens`, float32."""
        with selected(self._selection, mx.array(list(places))):
            logits = self.module(mx.array([list(tokens)], mx.int32), cache=caches)[0]
        logits = (logits if self._selection is not None else logits[mx.array(list(places))]).astype(mx.float32)
        mx.eval(logits)
        return logits


def _round_to_int8(leaf: Any) -> None:
    """Let a cache of one sequence round keys and values to 8 bits, with a factor for each token and head."""
    store = leaf.update_and_fetch
    leaf.update_and_fetch = lambda keys, values: store(_int8(keys), _int8(values))


def _int8(array: Any) -> Any:
    factor = mx.maximum(mx.max(mx.abs(array.astype(mx.float32)), axis=-1, keepdims=True) / _INT8, _LEAST_SPREAD)
    return (mx.round(array.astype(mx.float32) / factor) * factor).astype(array.dtype)


class Found(NamedTuple):
    """A backend's logits (n, V) of a trial, at n of its places from number `first` on."""

    trial: Trial
    logits: Any
    first: int = 0


class Measured(NamedTuple):
    """Deviations (n,) of a sequence, from place number `first` on, and of correct evaluations (rounds, n)."""

    found: Deviations
    noise: Deviations
    first: int = 0

    @property
    def last(self) -> int:
        return self.first + len(self.found)

    def at(self, place: int) -> tuple[Deviations, Deviations]:
        """The deviation at one place, and those of correct evaluations."""
        return self.found[place - self.first], self.noise[:, place - self.first]


def deviations(expected: Any, found: Any) -> Deviations:
    """For each place, the mean difference of logits (n, V) over the spread of the expected ones; NaN where a logit is.
    Tokens that the model rules out, with minus infinity, do not count."""
    finite = mx.isfinite(expected)
    difference = mx.where(finite, mx.abs(found.astype(mx.float32) - expected), 0)
    spread = mx.std(mx.where(finite, expected, 0), axis=-1)
    return np.array(mx.mean(difference, axis=-1) / mx.maximum(spread, _LEAST_SPREAD), np.float32)


def verdict(rounds: Sequence[Sequence[Measured]], times: float) -> str:
    """Return the fault of deviations beyond `times` times those of correct evaluations; empty if there is none."""
    worst = deviation(*rounds)
    if worst <= times:
        return ""
    return f"its logits are not the model's own: the difference is {_shown(worst)} times what rounding explains"


def deviation(*rounds: Sequence[Measured]) -> float:
    """Return the largest ratio of deviations to those of correct evaluations; NaN if a logit is NaN.

    Medians are compared, of each sequence, together with its like in other rounds, and of all sequences at one place:
    rounding may swap an expert and so change single logits, but not half of them.
    """
    rows = [_row(alike) for alike in zip(*rounds, strict=True)]
    every = list(chain(*rounds))
    places = range(min((one.first for one in every), default=0), max((one.last for one in every), default=0))
    columns = [_column([one.at(place) for one in every if one.first <= place < one.last]) for place in places]
    return max([*rows, *columns], key=lambda ratio: math.inf if math.isnan(ratio) else ratio, default=0.0)


def _row(alike: Sequence[Measured]) -> float:
    return _ratio(np.concatenate([one.found for one in alike]), np.concatenate([one.noise for one in alike], axis=1))


def _column(parts: Sequence[tuple[Deviations, Deviations]]) -> float:
    found, noise = zip(*parts, strict=True)
    return _ratio(np.stack(found), np.concatenate(noise))


def _ratio(found: Deviations, noise: Deviations) -> float:
    return float(np.median(found) / max(float(np.median(noise)), _LEAST_SPREAD))


def _shown(ratio: float) -> str:
    return "not a number of" if math.isnan(ratio) else f"{ratio:.1f}" if ratio < _LARGE else f"{ratio:.0e}"
