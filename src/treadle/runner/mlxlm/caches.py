"""Operations on mlx-lm's caches, of one sequence or a batch: merge, extract, pad, trim and copy."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

Caches = list[Any]
"""One cache per layer: of one sequence, or of a batch along each array's first axis."""


def merge(rows: Sequence[Caches]) -> Caches:
    """Merge caches of single sequences into a batch, in their order. Copies."""
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
    """Prepare the caches for right-padded tokens; `end_padded` removes the padding."""
    if any(padding):
        for cache in batch:
            cache.prepare(lengths=list(lengths), right_padding=list(padding))


def end_padded(batch: Caches, padding: Sequence[int]) -> None:
    """Remove the right padding from the caches."""
    if any(padding):
        for cache in batch:
            cache.finalize()


def can_trim(caches: Caches) -> bool:
    """Whether the last tokens can be removed from each cache. Not from windows: tokens that were pushed out do not come
    back."""
    return all(not window_of(cache) and cache.is_trimmable() for cache in caches)


def window_of(cache: Any) -> int:
    """The most tokens that a cache keeps, of a sliding window or a chunk; 0 where it keeps all, or a state."""
    return int(getattr(cache, "max_size", None) or getattr(cache, "chunk_size", None) or 0)


def trim(caches: Caches, tokens: int) -> None:
    """Remove the last `tokens` tokens."""
    for cache in caches:
        cache.trim(tokens)


def shallow_copies(caches: Caches) -> Caches:
    """Caches that share the same evaluated arrays; whichever is written to first copies them."""
    return copy.deepcopy(caches)


def states(caches: Caches) -> list[Any]:
    """All arrays of the caches, to be evaluated."""
    return [cache.state for cache in caches]


def kv_bytes(caches: Caches) -> int:
    """Bytes of the caches."""
    return sum(int(cache.nbytes) for cache in caches)
