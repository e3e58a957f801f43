"""A layer's attention over pages, every token's own row up to itself, against plain attention of each row."""

from __future__ import annotations

import random

import mlx.core as mx
import numpy as np
import pytest

from tests.runner.backends import Driven, Placed, placed, segment
from tests.runner.paged.models import PAGE
from tests.support.cuda import ReferenceKernels
from treadle.runner.kv.paged.backend import PagedConfig
from treadle.runner.kv.paged.memory import uniform
from treadle.runner.mlxlm import Window

DIM = 64


class Rows:
    """Rows of random keys and values in a layout of one layer, and again as plain arrays. The `window` is known to the
    layer, or only to the `model`. In 8 `bits` the plain arrays hold what is left of keys and values."""

    def __init__(self, dice: random.Random, window: int, *, model: bool, bits: int = 16) -> None:
        self.bits = bits
        self.heads, self.rep = dice.choice([(1, 1), (2, 2), (2, 5), (1, 16), (4, 3)])
        kernels = ReferenceKernels(self.heads, DIM, PAGE, mx.float32, bits, rep=self.rep)
        self.rows = Driven(
            PagedConfig(uniform([0 if model else window], kernels), None, pages=400, keep_prefixes=False)
        )
        self.window = window
        self.asks = window if model else 0
        self.keys: dict[str, mx.array] = {}
        self.values: dict[str, mx.array] = {}

    def step(self, counts: dict[str, int]) -> None:
        """Each row gains so many tokens, in one pass; check what they see."""
        pieces = []
        for id_, count in counts.items():
            if id_ not in self.keys:
                self.rows.admit(id_)
                self.keys[id_] = self.values[id_] = mx.zeros((self.heads, 0, DIM))
            pieces.append(segment(id_, (0,) * count, self.keys[id_].shape[1]))
        batch = self.rows.begin(self.rows.order(pieces))
        parts, total = placed(batch), batch.count
        positions = np.concatenate([np.arange(p.start, p.end) for p in parts]).astype(np.int32)
        keys, values = (mx.random.normal((total, self.heads, 1, DIM)) for _ in range(2))
        queries = mx.random.normal((total, self.heads * self.rep, 1, DIM))
        (layer,) = self.rows.backend.layers
        assert layer.offset.tolist() == positions.tolist()
        layer.update_and_fetch(keys, values)
        found = layer.attend(queries, keys, values, DIM**-0.5, self.asks, None)
        if self.bits == 8:
            keys, values = rounded(keys), rounded(values)
        for piece in parts:
            own = slice(piece.first, piece.first + piece.count)
            self.keys[piece.id] = mx.concatenate([self.keys[piece.id], keys[own, :, 0].transpose(1, 0, 2)], axis=1)
            self.values[piece.id] = mx.concatenate(
                [self.values[piece.id], values[own, :, 0].transpose(1, 0, 2)], axis=1
            )
            wanted = self.plain(queries[own, :, 0].transpose(1, 0, 2)[None], piece)
            assert mx.allclose(found[own, :, 0], wanted[0].transpose(1, 0, 2), atol=1e-5).item()

    def plain(self, queries: mx.array, piece: Placed) -> mx.array:
        seen, here = mx.arange(piece.end), mx.arange(piece.start, piece.end)[:, None]
        mask = seen <= here
        if self.window:
            mask = mask & (seen > here - self.window)
        keys, values = self.keys[piece.id][None], self.values[piece.id][None]
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=DIM**-0.5, mask=mask)


def rounded(some: mx.array) -> mx.array:
    """What is left of vectors that are kept as whole numbers of 8 bits."""
    factors = mx.abs(some).max(axis=-1, keepdims=True) / 127
    return mx.round(some / factors) * factors


@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize(("seed", "window"), [*enumerate([0, 1, 20, 48, 300])])
def test_each_token_sees_its_own_row_up_to_itself(seed: int, window: int, bits: int) -> None:
    """Prompts in pieces beside rows that decode, long rows beside short ones, in pages that were others' before."""
    dice = random.Random(seed)
    mx.random.seed(seed)
    rows = Rows(dice, window, model=seed == 1, bits=bits)
    ids = [f"r{i}" for i in range(5)]
    for _ in range(5):
        some = dice.sample(ids, dice.randint(1, len(ids)))
        rows.step({id_: dice.choice([1, 1, 1, 2, 5, 16, 17, 130, 400]) for id_ in some})
        if dice.random() < 0.3:
            gone = dice.choice(list(rows.keys))
            rows.rows.release(gone)
            del rows.keys[gone], rows.values[gone]


def test_a_window_that_only_the_model_knows_of_is_kept_to() -> None:
    kernels = ReferenceKernels(1, DIM, PAGE, mx.float32)
    (layer,) = Driven(PagedConfig(uniform([0], kernels), None, pages=4, keep_prefixes=False)).backend.layers
    assert layer.make_mask(1) is None
    assert layer.make_mask(1, window_size=5) == Window(5)
