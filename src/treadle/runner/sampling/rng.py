"""Counter-based random numbers: a function of a request's seed and the token's position alone (SplitMix64)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

BITS = 24

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def integer_uniforms(seeds: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.int32]:
    """Return two independent integers (n, 2) below 2 ** BITS for each of `seeds`, which may be any integers."""
    mixed = _mix(np.array([seed & _MASK for seed in seeds], np.uint64))
    places = 2 * np.array(positions, np.uint64) + np.uint64(1)
    first = _mix(mixed + places * np.uint64(_GOLDEN))
    second = _mix(first + np.uint64(_GOLDEN))
    return (np.stack([first, second], axis=-1) >> np.uint64(64 - BITS)).astype(np.int32)


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.float32]:
    """Return the same numbers divided by 2 ** BITS: uniform in [0, 1), exact in float32."""
    return integer_uniforms(seeds, positions).astype(np.float32) / np.float32(1 << BITS)


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of SplitMix64: each input bit changes about half of the output's."""
    values = values + np.uint64(_GOLDEN)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(_FIRST)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(_SECOND)
    return values ^ (values >> np.uint64(31))
