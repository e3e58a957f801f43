"""mlx-lm's caches of rows, alone and in batches: put together, taken apart, padded, cut and copied."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

Caches = list[Any]
"""One cache per layer: of one row, or of a batch of rows along each array's first axis."""


def merge(rows: Sequence[Caches]) -> Caches:
    """One batch out of the caches of single rows, in their order. Copies."""
    return [layer[0].merge(list(layer)) for layer in zip(*rows, strict=True)]


def extend(batch: Caches, other: Caches) -> None:
    """Append the rows of batch `other` to `batch`. Copies both."""
    for mine, theirs in zip(batch, other, strict=True):
        mine.extend(theirs)


def keep_rows(batch: Caches, rows: Sequence[int]) -> None:
    """Keep only these rows of `batch`, in this order."""
    for cache in batch:
        cache.filter(list(rows))


def extract(batch: Caches, row: int) -> Caches:
    """The caches of one row of `batch`, lazily: they hold on to the batch until they are evaluated."""
    return [cache.extract(row) for cache in batch]


def begin_padded(batch: Caches, lengths: Sequence[int], padding: Sequence[int]) -> None:
    """Tell the caches that the next tokens are right-padded; `end_padded` takes the padding out again."""
    if any(padding):
        for cache in batch:
            cache.prepare(lengths=list(lengths), right_padding=list(padding))


def end_padded(batch: Caches, padding: Sequence[int]) -> None:
    """Take the right padding out of the caches."""
    if any(padding):
        for cache in batch:
            cache.finalize()


def can_trim(caches: Caches) -> bool:
    """Whether the last tokens can be taken out of each cache again. Sliding windows are left alone: what a token pushed
    out of them does not come back."""
    return all(not getattr(cache, "max_size", 0) and cache.is_trimmable() for cache in caches)


def trim(caches: Caches, tokens: int) -> None:
    """Forget the last `tokens` tokens."""
    for cache in caches:
        cache.trim(tokens)


def shallow_copies(caches: Caches) -> Caches:
    """Caches that hold the same, evaluated, arrays: which of both is written to first copies what it writes to."""
    return copy.deepcopy(caches)


def states(caches: Caches) -> list[Any]:
    """Everything in the caches that may wait to be evaluated."""
    return [cache.state for cache in caches]


def kv_bytes(caches: Caches) -> int:
    """Bytes that the caches hold."""
    return sum(int(cache.nbytes) for cache in caches)
