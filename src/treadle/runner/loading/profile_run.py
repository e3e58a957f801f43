"""Profile run: the largest steps, once, to measure the memory they take beside weights, keys and values."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import mlx.core as mx

from ...core.plan import MAX_SCORED_TOKENS
from ..device.owner_thread import mlx_runtime
from ..forward.segments import KvSequence, RowSegment
from ..kv.backend import KvBackend
from ..kv.paged.backend import PagedConfig
from ..kv.paged.paged_pass import PAGE


def step_bytes(config: PagedConfig, module: Any, tokens: int) -> int:
    """Bytes that MLX holds at most for a pass over `tokens` tokens of prompts and one decoded token, for the next one,
    which is started before it is finished, and for log-probabilities of as many tokens as a step may score.

    What a pass computes on its way is not freed before it has ended: MLX hands it to the device as a whole. Memory that
    the first pass leaves to all others is counted once. Raises OutOfMemory where not even this fits.
    """
    with _measured(config, module, tokens + 1) as backend:
        scored, before = min(tokens, MAX_SCORED_TOKENS), mx.get_active_memory()
        _peak(backend, tokens + 1, 1)
        left = max(0, mx.get_active_memory() - before)
        return left + (1 + backend.lookahead) * _peak(backend, tokens + 1, 1) + _peak(backend, scored, scored)


def pass_bytes(config: PagedConfig, module: Any, tokens: int) -> int:
    """Bytes that MLX holds at most for one pass over `tokens` tokens of prompts. Raises OutOfMemory."""
    with _measured(config, module, tokens) as backend:
        _peak(backend, tokens, 1)  # which leaves memory to the next
        return _peak(backend, tokens, 1)


@contextmanager
def _measured(config: PagedConfig, module: Any, tokens: int) -> Iterator[KvBackend]:
    """A backend of pages for `tokens` tokens of one sequence, closed in the end."""
    small = replace(config, pages=-(-tokens // PAGE), max_running=0, keep_prefixes=False)
    with mlx_runtime("measuring a step"):
        backend = small.build(module, {}, time.monotonic)
    try:
        with mlx_runtime("measuring a step"):
            yield backend
    finally:
        backend.close()


def _peak(backend: KvBackend, count: int, wants: int) -> int:
    sequence = KvSequence("measured", "", ())
    backend.admit(sequence)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    done = backend.compute([RowSegment(sequence, (0,) * count, 0, wants=wants)], None)
    mx.eval(done.logits, done.arrays)
    peak = mx.get_peak_memory() - before
    if wants > 1:  # log-probabilities are made of them in float32
        assert done.logits is not None
        peak += 2 * 4 * int(done.logits.size)
    backend.release(sequence)
    return max(0, peak)
