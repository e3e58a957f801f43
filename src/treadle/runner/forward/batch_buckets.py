"""Buckets: the few batch sizes that passes are padded to where each size is a compiled program.

Padding costs a device next to nothing: the weights are read anyway, and a product's tiles have 64 or 128 rows.
"""

from __future__ import annotations

LONGEST = 4096
"""Longer chunks of prompts may have any length: their padding is a thirtieth of them at most."""


def decode_bucket(count: int) -> int:
    """Bucket of `count` sequences that decode, with no prompt beside them: 1, 2, 3, 4, 6, 8, 12, 16, 24 and so on."""
    power = 1 << max(0, count - 1).bit_length()
    return power * 3 // 4 if power > 2 and count <= power * 3 // 4 else power


def mixed_bucket(count: int) -> int:
    """Bucket of `count` tokens of sequences that decode beside prompts: 4, 16, 32, and multiples of 64."""
    return next((size for size in (4, 16, 32) if count <= size), -(-count // 64) * 64)


def head_bucket(rows: int, pieces: int, wanted: int) -> int:
    """Tokens of a pass with prompts that the head computes logits for, of which `wanted` are needed: those of `rows`
    that decode, and the last one of some prompts. `pieces` is the number of both."""
    usual = mixed_bucket(rows) + 12
    return usual if max(pieces, wanted) <= usual else prompt_bucket(max(pieces, wanted))


def prompt_bucket(count: int) -> int:
    """Bucket of `count` tokens of prompts: multiples of 32 up to 256, of 64 up to 512, and of 128."""
    step = 32 if count <= 256 else 64 if count <= 512 else 128
    return -(-count // step) * step


PROMPT_SIZES = tuple(dict.fromkeys(prompt_bucket(count) for count in range(1, LONGEST + 1)))
