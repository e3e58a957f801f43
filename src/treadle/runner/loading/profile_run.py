"""What steps take beside weights, keys and values, found by running the largest ones."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from ...core.plan_builder import MOST_SCORED
from ..device.guard import mlx_runtime
from ..forward.ragged import RowSegment
from ..kv.backend import FlatRows
from ..kv.paged.backend import PAGE
from .own_backend import Own

_ROW = "measured"


def steps_bytes(own: Own, module: Any, tokens: int) -> int:
    """Bytes that MLX comes to hold for a pass over `tokens` tokens of prompts and the last one's end, and the next one,
    which is started before it is finished, and for the scores of as many tokens as a step may score. Rows are in pages
    of `own`.

    What a pass computes on its way is not freed before it has ended: MLX hands it to the device as a whole. What the
    first pass makes for all that come is counted once. Raises OutOfMemory where not even this fits.
    """
    assert own.pages is not None
    layout = own.pages(-(-(tokens + 1) // PAGE), False)
    try:
        with mlx_runtime("measuring a step"):
            rows = own.rows_in(layout, module)
            scored, before = min(tokens, MOST_SCORED), mx.get_active_memory()
            _peak(rows, tokens + 1, 1)
            kept = max(0, mx.get_active_memory() - before)
            return kept + (1 + layout.lookahead) * _peak(rows, tokens + 1, 1) + _peak(rows, scored, scored)
    finally:
        layout.close()


def _peak(rows: FlatRows, count: int, wants: int) -> int:
    rows.admit(_ROW, "")
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    done = rows.compute([RowSegment(_ROW, (0,) * count, 0, wants=wants)], None)
    mx.eval(done.logits, done.arrays)
    peak = mx.get_peak_memory() - before
    if wants > 1:  # log-probabilities are made of them in float32
        assert done.logits is not None
        peak += 2 * 4 * int(done.logits.size)
    rows.release(_ROW)
    return max(0, peak)
