"""The few sizes that passes come in where each size is a program that has to be compiled.

A pass of an odd number of tokens is filled up with tokens of nobody. Up to a quarter of a short pass may be such, which
the device hardly notices: the weights are read anyway, and a product's tiles are of 64 or 128 rows.
"""

from __future__ import annotations

LONGEST = 1 << 14
"""Chunks of no more tokens are cut to these sizes."""


def rows_size(count: int) -> int:
    """At least `count` rows of a token or a few: 1, 2, 3, 4, 6, 8, 12, 16, 24 and so on."""
    power = 1 << max(0, count - 1).bit_length()
    return power * 3 // 4 if power > 2 and count <= power * 3 // 4 else power


def beside_size(count: int) -> int:
    """At least `count` rows beside prompts, where they matter less: 4, 16, 64 and so on."""
    size = 4
    while size < count:
        size *= 4
    return size


def prompt_size(count: int) -> int:
    """At least `count` tokens of prompts: multiples of 32 up to 256, of 64 up to 512, and of 128."""
    step = 32 if count <= 256 else 64 if count <= 512 else 128
    return -(-count // step) * step


def prompt_sizes(most: int) -> tuple[int, ...]:
    """All of them up to `most`."""
    sizes, count = [], 1
    while (size := prompt_size(count)) <= min(most, LONGEST):
        sizes.append(size)
        count = size + 1
    return tuple(sizes)
