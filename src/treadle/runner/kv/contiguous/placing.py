"""Places of a batch's segments in the buffers of their sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from ...forward.positions import Columns, Numbers
from ...forward.ragged import RaggedBatch
from .buffer import Buffer


@dataclass(slots=True, eq=False)
class PlacedSegment:
    """Tokens `first` to `first + count` of a batch, up to index `end` of a sequence with `buffers`, one a layer. Some
    have `columns`."""

    first: int
    count: int
    end: int
    buffers: Sequence[Buffer]
    columns: Columns | None = None

    def visible(self, window: int, chunk: int) -> Numbers | None:
        """The first and the last cached token (n, 2) that the tokens see; None where they are those of plain text."""
        return None if self.columns is None else self.columns.visible(window, chunk)


def place(batch: RaggedBatch) -> list[PlacedSegment]:
    """The segments of a batch in their order."""
    placed = [
        PlacedSegment(first, len(segment.tokens), segment.end, segment.sequence.kv.buffers)
        for segment, first in zip(batch.segments, batch.firsts.tolist(), strict=True)
    ]
    if batch.columns is not None:
        for one, segment in zip(placed, batch.segments, strict=True):
            one.columns = Columns.of(segment)
    return placed


def place_last(batch: RaggedBatch) -> tuple[list[PlacedSegment], Any]:
    """The last tokens of those segments whose logits are wanted, as a batch of their own, and their positions, on the
    device."""
    wanted = [segment for segment in batch.segments if segment.wants]
    placed = [PlacedSegment(i, 1, segment.end, segment.sequence.kv.buffers) for i, segment in enumerate(wanted)]
    if batch.columns is not None:
        for one, segment in zip(placed, wanted, strict=True):
            one.columns = Columns.of(segment.part(segment.end - 1, segment.end))
    wants = np.array([segment.wants for segment in batch.segments]) > 0
    return placed, mx.array(batch.positions[batch.ends[wants] - 1])
