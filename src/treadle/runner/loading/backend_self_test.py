"""Self-test of a KV backend: a few sequences of a model through it, compared with each alone in mlx-lm's caches."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np

from ..device.owner_thread import mlx_runtime
from ..device.self_test import FAULTS
from ..forward.segments import KvSequence, RowSegment
from ..kv.backend import KvBackend, KvConfig, Unsupported
from ..kv.paged.backend import PagedBackend, PagedConfig
from ..kv.paged.paged_pass import PAGE
from .reference import Filling, Found, Reference, Trial


class SelfTestFailed(Unsupported):
    """A KV backend that should serve the model gave wrong results, or a fault, on this machine."""


def self_test(reference: Reference, config: KvConfig, trials: Sequence[Trial], *, bounded: bool = False) -> None:
    """Compute all trials, in chunks and together, in the backend of `config`. Raises SelfTestFailed where that failed,
    or gave other logits than the reference. Where it is `bounded` tokens say what they see, which other kernels
    compute, and see what they do without."""
    live: dict[str, KvSequence] = {}
    backend: KvBackend | None = None
    try:
        with mlx_runtime("testing the KV backend"):
            tested = _Fillable(getattr(config, "decoder", None) or reference.module)
            if isinstance(config, PagedConfig) and config.decoder is not None:
                config = dataclasses.replace(config, decoder=tested)
            backend = config.build(tested, live, time.monotonic)
            reason = reference.judge(trials, partial(_together, backend, live, tested, reference, bounded))
            copies_pages = not isinstance(backend, PagedBackend) or backend.copies_pages()
    except FAULTS as error:
        raise SelfTestFailed(f"sequences in one pass failed ({type(error).__name__}: {error})") from error
    finally:
        if backend is not None:
            backend.close()
    if not copies_pages:
        raise SelfTestFailed("a page's copy is another one")
    if reason:
        raise SelfTestFailed(reason)


def pages_for(trials: Sequence[Trial]) -> int:
    """Pages that hold all trials at their ends."""
    return sum(-(-trial.length // PAGE) for trial in trials)


class _Fillable:
    """Stands for a module in a backend. While there is a `filling` it computes nothing, and gives the backend's layers
    these made-up keys and values."""

    def __init__(self, module: Any) -> None:
        self.filling: Filling | None = None
        self._module = module

    def __call__(self, tokens: Any, cache: Sequence[Any]) -> Any:
        if self.filling is None:
            return self._module(tokens, cache=cache)
        count = tokens.shape[0]
        leaves = [leaf for one in cache for leaf in (one if isinstance(one, list) else [one])]
        filled = [
            (leaf, pair)  # without recurrent states, which begin behind the filling
            for leaf, pair in zip(leaves, self.filling.keys_and_values, strict=True)
            if pair is not None
        ]
        for layer, pair in filled:
            layer.update_and_fetch(*(_as_batch(array, count) for array in pair))
        mx.eval([getattr(layer, "written", None) for layer, _ in filled])  # no layer's are computed from another's
        return mx.zeros((count, 1, 1))


def _as_batch(array: Any, count: int) -> Any:
    """Keys or values (1, heads, n, D) as those of a ragged batch of `count` tokens (count, heads, 1, D)."""
    batch = array[0].transpose(1, 0, 2)
    padding = mx.zeros((count - batch.shape[0], *batch.shape[1:]), batch.dtype)
    return mx.contiguous(mx.concatenate([batch, padding])[:, :, None])


def _together(
    backend: KvBackend,
    live: dict[str, KvSequence],
    tested: _Fillable,
    reference: Reference,
    bounded: bool,
    trials: Sequence[Trial],
) -> list[Found]:
    """Logits at the places of all trials: each prompt in two chunks beside the others', then the continuations."""
    rows = [KvSequence(str(i), "", (*[0] * trial.filled, *trial.tokens)) for i, trial in enumerate(trials)]
    live |= {row.id: row for row in rows}
    for row, trial in zip(rows, trials, strict=True):
        backend.admit(row)
        if trial.filled:
            tested.filling = reference.filling(trial)
            mx.eval(backend.compute([RowSegment(row, row.tokens[: trial.filled], 0)], None).arrays)
            tested.filling = None
    parts: dict[str, list[Any]] = {row.id: [] for row in rows}
    for ends in zip(*(_ends(trial) for trial in trials), strict=True):
        segments = [
            RowSegment(
                row, row.tokens[start:end], start, wants=1, last_visible=np.arange(start, end) if bounded else None
            )
            for row, (start, end) in zip(rows, ends, strict=True)
        ]
        done = backend.compute(segments, None)
        assert done.logits is not None
        mx.eval(done.logits, done.arrays)
        for id_, (first, _) in done.places.items():
            parts[id_].append(done.logits[first : first + 1])
    for row in rows:
        backend.release(row)
    live.clear()
    return [Found(trial, mx.concatenate(parts[row.id])) for row, trial in zip(rows, trials, strict=True)]


def _ends(trial: Trial) -> list[tuple[int, int]]:
    """Return start and end of each chunk of the trial, made-up tokens included."""
    ends = [trial.filled, *(trial.filled + place + 1 for place in trial.places)]
    return list(pairwise(ends))
