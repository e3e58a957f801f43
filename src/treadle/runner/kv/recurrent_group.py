"""The recurrent layers of a backend: their states in slots, and their part of each step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from ..forward.batch_buckets import mixed_bucket
from ..forward.ragged import RaggedBatch
from ..forward.segments import RowSegment
from ..mlxlm import RecurrentState
from ..recurrent.layer import Recurrences, RecurrentLayer
from ..recurrent.step import FRESH, PADDING, RecurrentPass, SlotSegment, tables
from .slot_allocator import SlotAllocator, SlotTable

ROW_SLOTS = 2
"""Slots of a live sequence: the state that a step reads, and the one that it writes."""
TEST_SLOTS = 16
"""Slots of a backend whose number of sequences is not known, as in self-tests."""


class RecurrentRow(NamedTuple):
    """One sequence's slots, its `committed` tokens, and the positions `marks` whose states are kept for others."""

    slots: SlotTable
    committed: int
    marks: Sequence[int]


@dataclass(frozen=True)
class RecurrentConfig:
    """The states of each of a model's recurrent layers, in their order."""

    states: Sequence[Sequence[RecurrentState]]

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot in all layers."""
        return sum(state.nbytes for layer in self.states for state in layer)

    @property
    def kernels(self) -> bool:
        """Whether there are CUDA kernels for all states."""
        return all(state.kernels for layer in self.states for state in layer)


class RecurrentGroup:
    """Layers of `config` with `slots` slots, whose states `recurrences` compute."""

    def __init__(self, config: RecurrentConfig, slots: int, recurrences: Recurrences) -> None:
        self.step = RecurrentPass()
        self.slots = SlotAllocator(slots, self._keep, self._clear)
        self.layers = [RecurrentLayer(states, slots, recurrences, self.step) for states in config.states]
        self.slot_bytes = config.slot_bytes

    def _keep(self, slot: int) -> None:
        """Keep a slot's states while its sequence goes on."""
        for layer in self.layers:
            layer.detach(slot)

    def _clear(self, slot: int) -> None:
        for layer in self.layers:
            layer.clear(slot)

    def waves(self, segments: Sequence[RowSegment], rows: Sequence[RecurrentRow]) -> list[list[RowSegment]]:
        """Let go of states that a step over `segments`, of sequences `rows`, needs no more. Return its passes: segments
        are split at marks, there is a pass for each part of the one that has most, and the last one has all last
        parts."""
        for segment, row in zip(segments, rows, strict=True):
            self.slots.leave_behind(row.slots, segment.start, row.committed, row.marks)
        split = [_parts(segment, row.marks) for segment, row in zip(segments, rows, strict=True)]
        if sum(map(len, split)) - len(split) > self.slots.available - ROW_SLOTS * len(split):
            return [list(segments)]  # snapshots are not worth a sequence's own slots
        count = max(map(len, split))
        return [[parts[i] for parts in split if (i := wave - count + len(parts)) >= 0] for wave in range(count)]

    def begin_operations(self, batch: RaggedBatch, rows: Sequence[SlotTable]) -> None:
        """Begin a pass by MLX's operations over `batch`, whose sequences have `rows`. Raises MemoryError where no slot
        is left."""
        self.step.begin(self._place(batch, rows))

    def begin(self, batch: RaggedBatch, rows: Sequence[SlotTable | None]) -> list[npt.NDArray[np.int32]]:
        """Begin a pass by kernels over `batch`, whose sequences have `rows` (None for padding). Return the arrays to
        copy to the device for `put`. Raises MemoryError where no slot is left."""
        self._segments = self._place(batch, rows)
        table, of_tokens = tables(self._segments)
        lines = mixed_bucket(len(table))
        return [np.pad(table, ((0, lines - len(table)), (0, 0))), of_tokens]

    def put(self, table: Any, rows: Any) -> None:
        """Take the arrays of `begin`, on the device."""
        self.step.begin(self._segments, table, rows)

    def _place(self, batch: RaggedBatch, rows: Sequence[SlotTable | None]) -> list[SlotSegment]:
        spare, placed = self.slots.available - len(batch.segments), []
        for segment, first, row in zip(batch.segments, batch.firsts.tolist(), rows, strict=True):
            placed.append(self._placed(segment, first, row, spare=spare > 0))
            spare -= segment.drafts > 0
        return placed

    def _placed(self, segment: RowSegment, first: int, row: SlotTable | None, *, spare: bool) -> SlotSegment:
        """Return the segment with its slots. The state before drafts is kept, and that behind them if a slot is to
        `spare`: it serves only where all are accepted."""
        count, start, end = len(segment.tokens), segment.start, segment.end
        if row is None:
            return SlotSegment(first, count, PADDING, FRESH)
        if not segment.drafts:
            return SlotSegment(first, count, *self.slots.advance(row, start, end))
        known = end - segment.drafts
        source, aside = self.slots.advance(row, start, known)
        target = self.slots.advance(row, known, end)[1] if spare else FRESH
        return SlotSegment(first, count, source, target, known - start, aside)

    def close(self) -> None:
        """Free the states."""
        for layer in self.layers:
            layer.free()

    def take_written(self) -> list[Any]:
        """Return arrays that are there once all states of the last pass are: where these are written in place, the last
        layer's, as they are computed from all others."""
        taken = [layer.take_written() for layer in self.layers]
        some = taken[-1:] if self.layers[-1].in_place else taken
        return [array for written in some for array in written]


def _parts(segment: RowSegment, marks: Sequence[int]) -> list[RowSegment]:
    """The segment, split at `marks`; whole where logits of several tokens are needed, or tokens see those behind
    them."""
    if len(segment.tokens) == 1:
        return [segment]
    inside = sorted({mark for mark in marks if segment.start < mark < segment.end})
    if not inside or segment.wants > 1 or segment.last_visible is not None:
        return [segment]
    first = segment.end - segment.hidden
    parts = [
        segment.part(start, end, hidden=max(0, end - max(start, first)))
        for start, end in pairwise([segment.start, *inside, segment.end])
    ]
    return [*(replace(part, wants=0, picks=False, previous=-1) for part in parts[:-1]), parts[-1]]
