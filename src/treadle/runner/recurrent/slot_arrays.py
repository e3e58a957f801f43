"""Slots of one layer's states as MLX arrays, for devices on which no kernel writes in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from .step import FRESH


class SlotArrays:
    """States of `shape` in `slots` slots.

    A slot names a row of the array that a step wrote, so a step that fails leaves the slots that it read as they were,
    and rows that go on together are read without a copy. An array is freed with the last slot that names a row of it.
    """

    def __init__(self, slots: int, shape: Sequence[int], dtype: Any) -> None:
        self.shape = (slots, *shape)
        self.dtype = dtype
        self._zeros: dict[int, Any] = {}
        self._places: list[tuple[Any, int] | None] = [None] * slots
        self._written: list[Any] = []

    def read(self, sources: Sequence[int]) -> Any:
        """States (n, *shape) of slots, zeros where a sequence begins."""
        parts = [self._part(*run) for run in self._runs(sources)]
        return parts[0] if len(parts) == 1 else mx.concatenate(parts)

    def write(self, targets: Sequence[int], states: Any) -> None:
        """Put the rows of `states` (n, *shape) into slots."""
        self._written.append(states)
        for row, target in enumerate(targets):
            if target != FRESH:
                self._places[target] = states, row

    def take_written(self) -> list[Any]:
        """Return the arrays that were written since the last call, for their evaluation."""
        written, self._written = self._written, []
        return written

    def detach(self, slot: int) -> None:
        """Give a slot an array of its own: one that is kept while its row goes on would keep those of others."""
        place = self._places[slot]
        if place is not None and place[0].shape[0] > 1:
            array, row = place
            self._places[slot] = array[row : row + 1] * 1, 0

    def clear(self, slot: int) -> None:
        self._places[slot] = None

    def arrays(self) -> list[Any]:
        """The arrays behind the slots, for their evaluation."""
        return list({id(place[0]): place[0] for place in self._places if place is not None}.values())

    def _runs(self, sources: Sequence[int]) -> list[tuple[Any, int, int]]:
        """Arrays with their first row and the number of rows that follow each other; None for zeros."""
        runs: list[tuple[Any, int, int]] = []
        for source in sources:
            place = self._places[source] if source >= 0 else None
            array, row = place or (None, 0)
            if runs and runs[-1][0] is array and (array is None or sum(runs[-1][1:]) == row):
                runs[-1] = array, runs[-1][1], runs[-1][2] + 1
            else:
                runs.append((array, row, 1))
        return runs

    def _part(self, array: Any | None, first: int, count: int) -> Any:
        if array is None:
            return mx.zeros((count, *self.shape[1:]), self.dtype)
        return array if count == array.shape[0] else array[first : first + count]
