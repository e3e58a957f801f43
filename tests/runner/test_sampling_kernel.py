"""Rows whose tokens a kernel picks: its work on the host, and what stands around it."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.runner.test_sampler import row
from tests.support.cuda import ReferenceKernel, failing, is_left_out, works
from tests.support.distribution import expected
from tests.support.emulated import EmulatedKernel
from treadle.core.messages import Sampling
from treadle.runner.sampling.sampler import SamplingRow, draw, kernel_inputs
from treadle.runner.sampling.sampling_kernel import SamplingKernel, sampling_kernel

USUAL = Sampling(temperature=0.6, top_p=0.95, top_k=20)
SHAPES = [
    Sampling(temperature=1.0),
    Sampling(temperature=2.0, min_p=0.2),
    Sampling(temperature=1.0, top_k=5),
    Sampling(temperature=1.3, top_p=0.7),
    Sampling(temperature=1.0, top_p=0.0),
    Sampling(temperature=1.5, top_p=0.8, top_k=12, min_p=0.05),
    USUAL,
]


def pick(logits: Any, rows: list[SamplingRow], positions: list[int]) -> tuple[list[int], bool]:
    array = mx.array(logits)
    kernel = SamplingKernel(array.shape[1], array.dtype, ReferenceKernel)
    return draw(array, rows, positions, kernel).resolve()


@pytest.mark.parametrize("sampling", SHAPES, ids=str)
def test_frequencies_are_those_of_the_distribution(sampling: Sampling) -> None:
    vocabulary, count = 40, 4000
    logits = np.random.default_rng(1).normal(0, 3, vocabulary).astype(np.float32)
    tokens, _ = pick(np.tile(logits, (count, 1)), [row(sampling, vocabulary)] * count, list(range(count)))
    p = expected(logits, sampling)
    seen = np.bincount(tokens, minlength=vocabulary)
    assert seen[p == 0].sum() == 0
    assert np.abs(seen / count - p).max() < 4 * np.sqrt(0.25 / count)


def test_a_row_picks_the_same_beside_others_as_alone() -> None:
    """B1: whoever else is in the batch."""
    vocabulary, chance = 300, np.random.default_rng(2)
    logits = chance.normal(0, 2, (20, vocabulary)).astype(np.float32)
    rows = [row(sampling, vocabulary) for sampling in [*SHAPES, Sampling(), Sampling(temperature=1.0, seed=9)]]
    rows = (rows * 3)[:20]
    together, _ = pick(logits, rows, list(range(20)))
    assert together == [pick(logits[i : i + 1], [rows[i]], [i])[0][0] for i in range(20)]


def test_greedy_rows_beside_others_take_the_largest_and_edits_count() -> None:
    logits = np.random.default_rng(3).normal(0, 2, (3, 64)).astype(np.float32)
    banned = int(np.argmax(logits[0]))
    rows = [row(Sampling(logit_bias=((banned, -100.0),)), 64), row(USUAL, 64), row(Sampling(), 64)]
    tokens, redrawn = pick(logits, rows, [0, 0, 0])
    second = int(np.argsort(logits[0])[-2])
    assert (tokens[0], tokens[2], redrawn) == (second, int(np.argmax(logits[2])), False)


def test_a_batch_of_greedy_rows_does_without_the_kernel() -> None:
    def unused(*_: Any) -> Any:
        raise AssertionError("it was launched")

    logits = np.random.default_rng(4).normal(0, 2, (2, 64)).astype(np.float32)
    assert draw(mx.array(logits), [row(Sampling(), 64)] * 2, [0, 0], unused).resolve()[0] == logits.argmax(-1).tolist()


@pytest.mark.parametrize("sampling", [Sampling(temperature=1.0, top_k=3), Sampling(temperature=1.0, top_p=0.5)])
def test_a_row_of_too_many_equals_is_drawn_again_among_all(sampling: Sampling) -> None:
    vocabulary = 5000
    logits = np.zeros((2, vocabulary), np.float32)
    logits[1, 7] = 50
    rows = [row(sampling, vocabulary), row(USUAL, vocabulary)]
    tokens, redrawn = pick(logits, rows, [0, 0])
    assert redrawn
    assert tokens[1] == 7
    stock = draw(mx.array(logits), rows, [0, 0]).resolve()[0]
    assert tokens[0] == stock[0]
    assert expected(logits[0], sampling)[tokens[0]] > 0


def test_rows_of_nothing_take_the_first_token() -> None:
    """B7: a row whose logits are broken costs the others nothing."""
    logits = np.full((3, 16), -np.inf, np.float32)
    logits[1] = np.arange(16)
    logits[2, 5] = np.inf
    tokens, _ = pick(logits, [row(USUAL, 16)] * 3, [0, 0, 0])
    assert tokens[0] == 0
    assert tokens[1] in range(10, 16)
    assert tokens[2] == 5


def test_any_type_of_logits_will_do() -> None:
    logits = mx.array(np.random.default_rng(5).normal(0, 2, (1, 64)).astype(np.float32))
    kernel = SamplingKernel(64, mx.float16, ReferenceKernel)
    half, single = (
        draw(one, [row(USUAL, 64)], [0], kernel).resolve()[0] for one in (logits.astype(mx.float16), logits)
    )
    assert half == single


@pytest.mark.parametrize("vocabulary", [63, 64, 7919])
def test_a_kernel_that_works_is_used(vocabulary: int, caplog: pytest.LogCaptureFixture) -> None:
    assert works(sampling_kernel(vocabulary, mx.float32, ReferenceKernel))
    assert not caplog.records


class Wrong(ReferenceKernel):
    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        tokens, spilled = super().__call__(*args, **kwargs)
        return [tokens + 1, spilled]


class Shy(ReferenceKernel):
    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        tokens, spilled = super().__call__(*args, **kwargs)
        return [tokens, spilled + 1]


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (failing("draw").kernel, "nvrtc: no kernel draw today"),
        (Wrong, "it sampled token"),
        (Shy, "it flagged a row of four tokens"),
    ],
)
def test_one_that_does_not_is_left_out_with_one_warning(
    kernel: type[ReferenceKernel], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    is_left_out(lambda: sampling_kernel(64, mx.float32, kernel), reason, caplog)


@pytest.mark.parametrize(("vocabulary", "dtype"), [(3001, mx.float32), (20_000, mx.bfloat16)])
def test_the_kernels_own_text_picks_what_the_reference_picks(vocabulary: int, dtype: Any) -> None:
    """Rows of many spreads: some with equals, some of nothing but equals, some with most tokens masked."""
    chance = np.random.default_rng(vocabulary)
    logits = (chance.normal(0, 1, (24, vocabulary)) * chance.choice([0.5, 1, 3, 6], (24, 1))).astype(np.float32)
    logits[::5] = np.round(logits[::5])
    logits[1::7, : vocabulary // 2] = -np.inf
    logits[2] = 1.5
    logits[3] = -np.inf
    rows = [
        row(
            Sampling(
                temperature=float(chance.choice([0, 0.3, 1, 2, 50])),
                top_k=int(chance.choice([0, 0, 1, 20, 1000])),
                top_p=float(chance.choice([0, 0.1, 0.5, 0.95, 0.999, 1, 1])),
                min_p=float(chance.choice([0, 0, 0.05, 0.5, 1])),
                seed=i,
            ),
            vocabulary,
        )
        for i in range(len(logits))
    ]
    batch, asked = mx.array(logits).astype(dtype), mx.array(kernel_inputs(rows, range(len(rows))))
    emulated = SamplingKernel(vocabulary, dtype, EmulatedKernel)(batch, asked)
    reference = SamplingKernel(vocabulary, mx.float32, ReferenceKernel)(batch.astype(mx.float32), asked)
    assert emulated[1].tolist() == reference[1].tolist()
    assert 0 < sum(emulated[1].tolist()) < len(rows) // 2
    assert emulated[0].tolist() == reference[0].tolist()
