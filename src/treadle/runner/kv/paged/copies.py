"""Copies of pages: queued, and launched together before the next pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from ...device.staging import Put
from .layer import PagedLayer
from .pool import Pool, PoolKernels

_Copies = dict[int, int]


class PageCopies:
    """Queued copies of pages in the pools of `layers`, in all layers of one of `count` tables at once."""

    def __init__(self, layers: Sequence[PagedLayer], count: int, put: Put) -> None:
        self._put = put
        tables = range(count)
        self._groups = [_by_kernels([layer for layer in layers if layer.kind.table == table]) for table in tables]
        self._queued: list[_Copies] = [{} for _ in tables]

    def add(self, table: int, source: int, target: int) -> None:
        """Queue the copy of a page of `table`. Those queued before are launched if they write one of the pages."""
        queued = self._queued[table]
        if target in queued or source in queued or target in queued.values():
            self.launch()
        queued[target] = source

    def launch(self) -> None:
        """Launch the copies at once: whatever is computed later comes after them."""
        if not any(self._queued):
            return
        copied: list[Any] = []
        for group, queued in zip(self._groups, self._queued, strict=True):
            copied += self._launch(group, queued)
        mx.async_eval(copied)  # type: ignore[no-untyped-call]
        self.clear()  # not where that failed: other sequences go on with their copies

    def _launch(self, group: Sequence[tuple[PoolKernels, list[Pool]]], queued: _Copies) -> list[Any]:
        if not queued:
            return []
        (pairs,) = self._put(np.array([(source, target) for target, source in queued.items()], np.int32))
        return [kernels.copy_pages(pools, pairs) for kernels, pools in group]

    def clear(self) -> None:
        """Drop what is queued."""
        for queued in self._queued:
            queued.clear()

    def work(self) -> bool:
        """Whether a copy of each pool's first page over the last one equals it; destroys what they hold."""
        pools = [pool for group in self._groups for _, pools in group for pool in pools]
        for table, group in enumerate(self._groups):
            if group:
                self.add(table, 0, group[0][1][0].data.shape[0] - 1)
        self.launch()
        arrays = [array for pool in pools for array in (pool.data, pool.scales) if array is not None]
        return all(mx.array_equal(array[0], array[-1]).item() for array in arrays)


def _by_kernels(layers: Sequence[PagedLayer]) -> list[tuple[PoolKernels, list[Pool]]]:
    """The pools of layers, by the kernels that copy them."""
    groups: dict[int, tuple[PoolKernels, list[Pool]]] = {}
    for layer in layers:
        groups.setdefault(id(layer.kernels), (layer.kernels, []))[1].append(layer.pool)
    return list(groups.values())
