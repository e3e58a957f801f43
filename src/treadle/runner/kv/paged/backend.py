"""Rows in pages of a pool, which the attention kernels read in place: for MLX's CUDA build.

A page holds PAGE tokens of one row or of many that begin alike. Rows join, grow and leave without moving a byte, and a
prefix that is reused costs nothing but the last page, which is copied where it is not full. MLX's own batched caches
pay for the longest row, and copy all when one joins or leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ....core.messages import PrefixStatistics, Sharing
from ...forward.batch_buckets import decode_bucket, mixed_bucket, prompt_bucket
from ...forward.ragged import PlacedSegment, RowSegment
from ..prefix_view import PrefixView
from .kernels import Kernels
from .layer import PagedLayer, Pass
from .pages import Pages
from .tiling import COUNT, FIRST, PAGES, POSITION, is_few

PAGE = 32
NOWHERE = -1
"""The slot of what belongs to nobody."""


@dataclass(slots=True, eq=False)
class _Known:
    """The first `settled` of a row's `tokens` are computed; at `full` of them another page is."""

    tokens: Sequence[int]
    settled: int = 0
    full: int = PAGE


class PagedLayout:
    """`pages` pages for layers with `windows` (0: none) and heads as `kernels` has them; `keeps` says whether prefixes
    are kept for others. The pools take their memory at once. Passes come `in_sizes` where they are compiled for each:
    with prompts that is where the pools are plain."""

    block = PAGE
    lookahead = 1
    sharing = Sharing.HELD

    def __init__(
        self, windows: Sequence[int], kernels: Kernels, *, pages: int, keeps: bool, in_sizes: bool = False
    ) -> None:
        self.blocks = pages
        self.in_sizes = in_sizes
        self._kernels = kernels
        self._step = Pass(kernels)
        self._layers = [PagedLayer(kernels.new_pool(pages), window, self._step) for window in windows]
        self._page_bytes = len(windows) * kernels.page_bytes
        self._pages = Pages(pages, PAGE, self._copy, keeps=keeps)
        self._known: dict[str, _Known] = {}
        self._copies: dict[int, int] = {}

    def layers(self) -> list[Any]:
        return list(self._layers)

    def room(self) -> int:
        return self._pages.room

    def row_bytes(self) -> int:
        return self._pages.held * self._page_bytes

    def reuse(self, row: str, salt: str, tokens: Sequence[int]) -> int:
        self._known.pop(row, None)
        return self._pages.reuse(row, salt, tokens)

    def admit(self, row: str, salt: str, tokens: Sequence[int] = ()) -> None:
        self._known[row] = _Known(tokens)
        self._pages.admit(row, salt)

    def order(self, pieces: Sequence[RowSegment]) -> list[RowSegment]:
        """Those of few tokens first: they go to one kernel, the others to another. Both are filled up to a size."""
        rep = self._kernels.rep
        many = [piece for piece in pieces if not is_few(len(piece.tokens), rep)]
        few = [piece for piece in pieces if is_few(len(piece.tokens), rep)] if many else list(pieces)
        if not self.in_sizes or (many and self._kernels.small):
            return [*few, *many]
        return [*few, *_filler(few, mixed_bucket if many else decode_bucket), *many, *_filler(many, prompt_bucket)]

    def begin(self, placed: Sequence[PlacedSegment], positions: npt.NDArray[np.int32]) -> None:
        self._copy_now()
        some = [piece for piece in placed if not piece.filler]
        grow = self._pages.grow
        tables = [grow(piece.id, piece.start + piece.count) for piece in some]
        pages = np.concatenate(tables)
        segments = np.empty((len(some), 4), np.int32)
        segments[:, FIRST] = [piece.first for piece in some]
        segments[:, COUNT] = [piece.count for piece in some]
        segments[:, POSITION] = positions[segments[:, FIRST]]
        segments[:, PAGES] = np.cumsum([0, *map(len, tables[:-1])])
        row = np.repeat(segments[:, PAGES], segments[:, COUNT])
        own: Any = slice(None)
        if len(some) < len(placed):
            own = np.repeat([not piece.filler for piece in placed], [piece.count for piece in placed])
        at, slots = positions[own], np.full(len(positions), NOWHERE, np.int32)
        slots[own] = pages[row + at // PAGE] * PAGE + at % PAGE
        self._step.begin(segments, positions, slots, pages)

    def written(self) -> list[Any]:
        """The last layer's suffices: it was computed from all others'."""
        return [self._layers[-1].written]

    def settle(self, held: Mapping[str, int]) -> None:
        known = self._known
        for row, count in held.items():
            mine = known.get(row)
            if mine is not None:
                mine.settled = count
                if count >= mine.full:
                    mine.full = count // PAGE * PAGE + PAGE
                    self._pages.settle(row, PrefixView(mine.tokens, count))

    def release(self, row: str) -> None:
        mine = self._known.pop(row, None)
        self._pages.release(row, () if mine is None else PrefixView(mine.tokens, mine.settled))

    def lose(self, row: str) -> None:
        self._known.pop(row, None)
        self._pages.lose(row)

    def copies_wrongly(self) -> bool:
        """Whether the first page, copied over the last one, is another there. For one that is only tried."""
        self._copy(0, self.blocks - 1)
        self._copy_now()
        kept = [(layer.pool.data, layer.pool.factors) for layer in self._layers]
        arrays = [array for pair in kept for array in pair if array is not None]
        return not all(mx.array_equal(array[0], array[-1]).item() for array in arrays)

    def close(self) -> None:
        self._known.clear()
        self._copies.clear()
        self._step.close()
        self._kernels.close()
        for layer in self._layers:
            layer.pool.free()
            layer.written = None
        mx.clear_cache()  # of memory that stays on the host, too: it is nobody else's

    def reset(self) -> int:
        return self._pages.reset()

    def statistics(self) -> PrefixStatistics:
        pages, index = self._pages, self._pages.index
        if index is None:
            return PrefixStatistics()
        return PrefixStatistics(
            looked_up=pages.looked_up,
            reused=pages.reused,
            copied_bytes=pages.copied_pages * self._page_bytes,
            stored=index.stored_tokens,
            evicted=index.evicted_tokens,
            held=index.tokens,
            held_bytes=index.size * self._page_bytes,
        )

    def _copy(self, source: int, target: int) -> None:
        """Before the next pass, together with others, as long as none is of what another one writes over."""
        copies = self._copies
        if target in copies or source in copies or target in copies.values():
            self._copy_now()
        copies[target] = source

    def _copy_now(self) -> None:
        """On the device's way at once: what is computed later comes after it."""
        if not self._copies:
            return
        pairs = np.array([(source, target) for target, source in self._copies.items()], np.int32)
        pools = [layer.pool for layer in self._layers]
        mx.async_eval(self._kernels.copy_pages(pools, *self._step.put(pairs)))  # type: ignore[no-untyped-call]
        self._copies.clear()  # not where that failed: others' rows go on with theirs


def _filler(pieces: Sequence[RowSegment], size: Callable[[int], int]) -> list[RowSegment]:
    """What is missing to make `pieces`, if there are any, as long as `size` says."""
    count = sum(len(piece.tokens) for piece in pieces)
    missing = size(count) - count if count else 0
    return [RowSegment("", (0,) * missing, 0, filler=True)] if missing else []
