"""Uniform random numbers that depend on a request's seed and the position of the token, and on nothing else."""

from __future__ import annotations

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def uniforms(seed: int, position: int) -> tuple[float, float]:
    """Two independent numbers in [0, 1), exact in float32. Any integer will do as a seed."""
    first = _mix(_mix(seed & _MASK) + (2 * position + 1) * _GOLDEN)
    second = _mix(first + _GOLDEN)
    return (first >> 40) / (1 << 24), (second >> 40) / (1 << 24)


def _mix(value: int) -> int:
    """The finaliser of SplitMix64: each input bit changes about half of the output's."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
