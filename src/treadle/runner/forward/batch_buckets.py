"""The few sizes that passes come in where each size is a program that has to be compiled.

A pass of an odd number of tokens is filled up with tokens of nobody, which a device hardly notices: the weights are
read anyway, and a product's tiles are of 64 or 128 rows.
"""

from __future__ import annotations

LONGEST = 4096
"""Longer chunks of prompts may have any length: what fills them up is a thirtieth of them at most."""


def decode_bucket(count: int) -> int:
    """At least `count` rows that decode, with no prompt beside them: 1, 2, 3, 4, 6, 8, 12, 16, 24 and so on."""
    power = 1 << max(0, count - 1).bit_length()
    return power * 3 // 4 if power > 2 and count <= power * 3 // 4 else power


def mixed_bucket(count: int) -> int:
    """At least `count` rows beside prompts, where they matter less: 4, 16, 32, and multiples of 64."""
    return next((size for size in (4, 16, 32) if count <= size), -(-count // 64) * 64)


def head_size(rows: int, pieces: int, wanted: int) -> int:
    """How many tokens of a pass with prompts the head should see, of which it is to see `wanted`: `rows` that decode,
    and the last of some prompts, whether or not they end there. `pieces` are all of both."""
    usual = mixed_bucket(rows) + 12
    return usual if max(pieces, wanted) <= usual else prompt_bucket(max(pieces, wanted))


def prompt_bucket(count: int) -> int:
    """At least `count` tokens of prompts: multiples of 32 up to 256, of 64 up to 512, and of 128."""
    step = 32 if count <= 256 else 64 if count <= 512 else 128
    return -(-count // step) * step


PROMPT_SIZES = tuple(dict.fromkeys(prompt_bucket(count) for count in range(1, LONGEST + 1)))
