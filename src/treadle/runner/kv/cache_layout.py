"""The arrangement of a model's caches: what each one is for, and which are in lists."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import repeat
from typing import Any

from ..mlxlm import Window


class CacheKind(Enum):
    """What a cache is for. An unused one belongs to a layer without attention."""

    ATTENTION = auto()
    RECURRENT = auto()
    UNUSED = auto()


class UnusedCache:
    """The cache of a layer without attention, which a model may ask for its mask."""

    def make_mask(self, count: int = 1, return_array: bool = False, window_size: int | None = None) -> Window | None:
        """The mask that caches of attention give."""
        return None if window_size is None else Window(window_size)


@dataclass(frozen=True)
class CacheLayout:
    """The `kinds` of a model's caches, in their order, and the number of caches in each of its `lists` of caches, 0 for
    a cache that is in none."""

    kinds: Sequence[CacheKind]
    lists: Sequence[int]

    def caches(self, attention: Sequence[Any], recurrent: Sequence[Any] = ()) -> list[Any]:
        """Arrange the caches of layers with `attention` and of `recurrent` ones as the model has them."""
        of: dict[CacheKind, Iterator[Any]] = {
            CacheKind.ATTENTION: iter(attention),
            CacheKind.RECURRENT: iter(recurrent),
            CacheKind.UNUSED: repeat(UnusedCache()),
        }
        leaves = iter([next(of[kind]) for kind in self.kinds])
        return [[next(leaves) for _ in range(count)] if count else next(leaves) for count in self.lists]
