"""Attention over rows with buffers of their own, against a float32 reference."""

from __future__ import annotations

import random
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from tests.runner.backends import Driven, Placed, placed, segment
from treadle.runner.kv.contiguous.backend import ContiguousConfig
from treadle.runner.kv.cost import KvCost

Array = npt.NDArray[np.float32]


def reference(
    queries: Array,
    keys: Array,
    values: Array,
    first: int,
    scale: float,
    window: int,
    sinks: Array | None,
    *,
    chunked: bool = False,
) -> Array:
    """Attention (n, heads, D) of `queries` (n, heads, D) at positions from `first` on over all of a row's `keys` and
    `values` (length, kv heads, D); within its own chunk where windows are `chunked`."""
    out = np.zeros((*queries.shape[:2], values.shape[2]))
    group = queries.shape[1] // keys.shape[1]
    for i, token in enumerate(queries.astype(np.float64)):
        low, high = max(0, first + i + 1 - window) if window else 0, first + i + 1
        low = (first + i) // window * window if chunked else low
        for head, query in enumerate(token):
            scores = keys[low:high, head // group].astype(np.float64) @ query * scale
            weights = np.exp(scores - scores.max())
            total = weights.sum() + (np.exp(sinks[head] - scores.max()) if sinks is not None else 0)
            out[i, head] = weights / total @ values[low:high, head // group]
    return out


class Rows:
    """Rows of one layer, and what the reference knows of them."""

    def __init__(self, dice: random.Random, window: int, device: str, *, chunked: bool = False) -> None:
        self.heads = dice.choice([1, 2, 3])
        self.group = dice.choice([1, 2, 4])
        self.dim, self.value_dim = dice.choice([(8, 8), (16, 8), (32, 32)])
        self.scale = self.dim**-0.5
        self.window = window
        self.chunked = chunked
        config = ContiguousConfig([window], None, device, KvCost(0, 0), keep_prefixes=False, chunked=[chunked])
        self.rows = Driven(config)
        self.known: dict[str, tuple[Array, Array]] = {}
        self.chance = np.random.default_rng(dice.randrange(1 << 30))

    def fresh(self, count: int, heads: int, dim: int) -> Array:
        return self.chance.standard_normal((count, heads, dim)).astype(np.float32)

    def step(self, counts: dict[str, int], sinks: Array | None) -> None:
        """Give each row that many tokens more, and compare what they attend to."""
        pieces = []
        for id_, count in counts.items():
            if id_ not in self.known:
                self.rows.admit(id_)
                self.known[id_] = (self.fresh(0, self.heads, self.dim), self.fresh(0, self.heads, self.value_dim))
            pieces.append(segment(id_, (0,) * count, len(self.known[id_][0])))
        batch = self.rows.begin(self.rows.order(pieces))
        parts = placed(batch)
        found, wanted = self._found(parts, batch.count, sinks), []
        for piece in parts:
            queries = self.queries[piece.first : piece.first + piece.count]
            of_row = (*self.known[piece.id], piece.start, self.scale, self.window, sinks)
            wanted.append(reference(queries, *of_row, chunked=self.chunked))
        np.testing.assert_allclose(found[:, :, 0], np.concatenate(wanted), atol=1e-4)

    def _found(self, parts: list[Placed], count: int, sinks: Array | None) -> Any:
        self.queries = self.fresh(count, self.heads * self.group, self.dim)
        keys, values = self.fresh(count, self.heads, self.dim), self.fresh(count, self.heads, self.value_dim)
        for piece in parts:
            part = slice(piece.first, piece.first + piece.count)
            mine = self.known[piece.id]
            self.known[piece.id] = (np.concatenate([mine[0], keys[part]]), np.concatenate([mine[1], values[part]]))
        positions = np.concatenate([np.arange(p.start, p.end, dtype=np.int32) for p in parts])
        (layer,) = self.rows.backend.layers
        assert layer.offset.tolist() == positions.tolist()
        layer.update_and_fetch(mx.array(keys[:, :, None]), mx.array(values[:, :, None]))
        out = layer.attend(
            mx.array(self.queries[:, :, None]), None, None, self.scale, 0, None if sinks is None else mx.array(sinks)
        )
        mx.eval(out)
        return np.array(out)


@pytest.mark.parametrize("device", ["cpu", "metal"])
@pytest.mark.parametrize("with_sinks", [True, False], ids=["sinks", "none"])
@pytest.mark.parametrize("window", [0, 5, 32, 300])
@pytest.mark.parametrize("seed", range(3))
def test_each_token_attends_to_its_own_row_up_to_itself(seed: int, window: int, with_sinks: bool, device: str) -> None:
    """Any mixture of prompts and single tokens, over buffers that grow and windows that are passed."""
    dice = random.Random(seed)
    rows = Rows(dice, window, device)
    sinks = rows.fresh(1, 1, rows.heads * rows.group)[0, 0] if with_sinks else None
    for _ in range(12):
        ids = dice.sample("abcdef", dice.randint(1, 5))
        rows.step({id_: dice.choice([1, 1, 1, 2, 7, 40, 270]) for id_ in ids}, sinks)
        if dice.random() < 0.2:
            rows.rows.release(ids[0])
            rows.known.pop(ids[0])


@pytest.mark.parametrize("device", ["cpu", "metal"])
@pytest.mark.parametrize("chunk", [1, 32, 300])
def test_each_token_attends_within_its_chunk(chunk: int, device: str) -> None:
    """Segments may hold parts of several chunks, and chunks be longer than what a buffer grows by."""
    dice = random.Random(chunk)
    rows = Rows(dice, chunk, device, chunked=True)
    for _ in range(8):
        rows.step({id_: dice.choice([1, 1, 2, 31, 40, 270]) for id_ in dice.sample("abcd", 2)}, None)


def test_a_window_that_only_the_model_knows_of_is_kept_to() -> None:
    """A mask that a model asks for with a window says how far back its layer sees."""
    rows = Rows(random.Random(1), 0, "cpu")
    rows.step({"a": 30}, None)
    (layer,) = rows.rows.backend.layers
    assert layer.make_mask(1) is None
    window = layer.make_mask(1, window_size=4)
    rows.rows.begin([segment("a", (0,), 30)])
    key, value = rows.fresh(1, rows.heads, rows.dim), rows.fresh(1, rows.heads, rows.value_dim)
    query = rows.fresh(1, rows.heads * rows.group, rows.dim)
    layer.update_and_fetch(mx.array(key[:, :, None]), mx.array(value[:, :, None]))
    found = layer.attend(mx.array(query[:, :, None]), None, None, rows.scale, window.size, None)
    keys, values = (np.concatenate([old, new]) for old, new in zip(rows.known["a"], (key, value), strict=True))
    np.testing.assert_allclose(
        np.array(found)[:, :, 0], reference(query, keys, values, 30, rows.scale, 4, None), atol=1e-4
    )
