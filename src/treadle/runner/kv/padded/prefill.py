"""Padded prefill: several short prompts in one pass over the model.

A pass for a dozen tokens costs nearly as much as one for three dozen, as the weights are read either way. So chunks of
similar length share a pass, right-padded to the longest, as in mlx-lm's own batched prefill. Long sequences go alone: a
shared pass copies each one's cache in and out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from ... import mlxlm
from ...forward.segments import RowSegment
from ...mlxlm import Caches

MAX_SHARED_TOKENS = 512  # of a sequence's cache, afterwards
MAX_PADDED = 2  # the longest chunk of a pass over its shortest


def passes(chunks: Sequence[RowSegment]) -> list[list[RowSegment]]:
    """Group chunks into passes, each chunk into exactly one."""
    alone = [[chunk] for chunk in chunks if chunk.start + len(chunk.tokens) > MAX_SHARED_TOKENS]
    short = [chunk for chunk in chunks if chunk.start + len(chunk.tokens) <= MAX_SHARED_TOKENS]
    shared: list[list[RowSegment]] = []
    for chunk in sorted(short, key=lambda chunk: -len(chunk.tokens)):
        if shared and len(shared[-1][0].tokens) <= MAX_PADDED * len(chunk.tokens):
            shared[-1].append(chunk)
        else:
            shared.append([chunk])
    return shared + alone


def together(
    model: Any,
    tokens: Sequence[Sequence[int]],
    caches: Sequence[Caches],
    *,
    pad_to: int = 1,
    evaluate: Callable[..., None] = mx.eval,
) -> list[Caches]:
    """Append `tokens` of several sequences to their caches in one pass; their new caches, of which `evaluate` evaluates
    the arrays. The pass is as long as the longest of them, rounded up to a multiple of `pad_to`. The given caches are
    not changed.
    """
    lengths = [len(row) for row in tokens]
    longest = -(-max(lengths) // pad_to) * pad_to
    padding = [longest - length for length in lengths]
    batch = mlxlm.merge(caches)
    mlxlm.begin_padded(batch, lengths, padding)
    padded = [[*row, *[0] * extra] for row, extra in zip(tokens, padding, strict=True)]
    model(mx.array(padded, mx.int32), cache=batch)
    mlxlm.end_padded(batch, padding)
    rows = [mlxlm.extract(batch, place) for place in range(len(tokens))]
    evaluate([mlxlm.states(row) for row in rows])
    return rows
