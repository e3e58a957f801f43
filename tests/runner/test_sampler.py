"""The sampler against plain numpy, row by row and in mixed batches."""

from __future__ import annotations

import math
import random
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.support.distribution import expected
from treadle.core.messages import Sampling, Submit
from treadle.runner.sampling.sampler import SamplingRow, check, draw


def row(
    sampling: Sampling,
    vocabulary: int,
    *,
    prompt: tuple[int, ...] = (0,),
    history: tuple[int, ...] = (),
    stops: tuple[int, ...] = (),
    min_tokens: int = 0,
) -> SamplingRow:
    request = Submit(
        id="r", prompt=prompt, max_tokens=9, sampling=sampling, stop_token_ids=stops, min_tokens=min_tokens
    )
    return SamplingRow(request, history, vocabulary)


def pick(logits: Any, rows: list[SamplingRow], positions: list[int]) -> list[int]:
    drawn = draw(mx.array(logits), rows, positions)
    mx.eval(drawn.arrays)
    return drawn.resolve()[0]


SHAPES = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.5),
    Sampling(temperature=2.0, min_p=0.2),
    Sampling(temperature=1.0, top_k=5),
    Sampling(temperature=1.0, top_k=1),
    Sampling(temperature=1.3, top_p=0.7),
    Sampling(temperature=1.0, top_p=0.01),
    Sampling(temperature=1.5, top_p=0.8, top_k=12, min_p=0.05),
]


@pytest.mark.parametrize("sampling", SHAPES, ids=str)
@pytest.mark.parametrize("vocabulary", [40, 1500])
def test_frequencies_are_those_of_the_distribution(sampling: Sampling, vocabulary: int) -> None:
    logits = np.random.default_rng(1).normal(0, 3, vocabulary).astype(np.float32)
    count = 4000
    kind = row(sampling, vocabulary)
    tokens = pick(np.tile(logits, (count, 1)), [kind] * count, list(range(count)))
    p = expected(logits, sampling)
    seen = np.bincount(tokens, minlength=vocabulary)
    assert seen[p == 0].sum() == 0
    likely = p * count >= 5
    rest = p[~likely].sum() * count
    chi = ((seen[likely] - p[likely] * count) ** 2 / (p[likely] * count)).sum()
    chi += (seen[~likely].sum() - rest) ** 2 / max(rest, 1)
    freedom = max(int(likely.sum()), 1)
    assert chi < freedom + 5 * math.sqrt(2 * freedom) + 5


def test_a_nucleus_wider_than_the_candidates_is_drawn_from_in_full() -> None:
    vocabulary = 40_000
    logits = np.random.default_rng(2).normal(0, 0.1, vocabulary).astype(np.float32)
    kind = row(Sampling(temperature=1.0, top_p=0.95), vocabulary)
    tokens = pick(np.tile(logits, (64, 1)), [kind] * 64, list(range(64)))
    assert len(set(tokens)) > 60
    p = expected(logits, kind.sampling)
    assert all(p[token] > 0 for token in tokens)
    ranks = np.argsort(np.argsort(-logits))[tokens]
    assert ranks.max() > 20_000


def _mixed(vocabulary: int, seed: int) -> list[SamplingRow]:
    dice = random.Random(seed)
    kinds = []
    for i in range(24):
        sampling = Sampling(
            temperature=dice.choice([0.0, 0.0, 0.7, 1.3]),
            top_p=dice.choice([1.0, 0.5, 0.9]),
            top_k=dice.choice([0, 0, 3, 50, vocabulary + 5]),
            min_p=dice.choice([0.0, 0.0, 0.1]),
            repetition_penalty=dice.choice([1.0, 1.3]),
            presence_penalty=dice.choice([0.0, 0.5]),
            frequency_penalty=dice.choice([0.0, 0.2]),
            logit_bias=dice.choice([(), ((3, 5.0), (7, -5.0))]),
            seed=i,
        )
        kinds.append(row(sampling, vocabulary, prompt=(1, 2, 3), history=(4, 4, 5), stops=(9,), min_tokens=i % 8))
    return kinds


@pytest.mark.parametrize("vocabulary", [30, 9_000])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_a_row_picks_the_same_alone_and_in_any_mix(vocabulary: int, dtype: mx.Dtype) -> None:
    kinds = _mixed(vocabulary, seed=vocabulary)
    logits = mx.array(np.random.default_rng(3).normal(0, 2, (len(kinds), vocabulary)), dtype)
    positions = [3 + i for i in range(len(kinds))]
    together = pick(logits, kinds, positions)
    alone = [pick(logits[i : i + 1], [kinds[i]], [positions[i]])[0] for i in range(len(kinds))]
    backwards = pick(logits[::-1], kinds[::-1], positions[::-1])
    assert together == alone == backwards[::-1]


def test_a_batch_without_greedy_rows_places_both_ways_of_drawing() -> None:
    logits = np.random.default_rng(8).normal(0, 2, (4, 700)).astype(np.float32)
    kinds = [row(Sampling(temperature=1.0, top_k=3 * (i % 2), seed=i), 700) for i in range(4)]
    assert pick(logits, kinds, [5] * 4) == [pick(logits[i : i + 1], [kinds[i]], [5])[0] for i in range(4)]


def test_greedy_rows_take_the_largest_logit_whatever_their_neighbours_do() -> None:
    logits = np.random.default_rng(4).normal(0, 2, (8, 500)).astype(np.float32)
    loud = Sampling(temperature=2.0, top_p=0.9, top_k=9, repetition_penalty=1.5, logit_bias=((1, 50.0),))
    kinds = [row(Sampling() if i % 2 else loud, 500) for i in range(8)]
    tokens = pick(logits, kinds, [0] * 8)
    assert [t for i, t in enumerate(tokens) if i % 2] == [int(logits[i].argmax()) for i in range(1, 8, 2)]


def test_the_same_seed_and_position_pick_the_same_and_others_differ() -> None:
    logits = np.zeros((1, 5000), np.float32)

    def one(seed: int, position: int) -> int:
        return pick(logits, [row(Sampling(temperature=1.0, seed=seed), 5000)], [position])[0]

    assert one(5, 3) == one(5, 3)
    assert len({one(seed, 0) for seed in range(50)}) > 45
    assert len({one(5, position) for position in range(50)}) > 45


EXTREMES = [
    Sampling(temperature=1e-45),
    Sampling(temperature=1e-12, top_p=0.5),
    Sampling(temperature=1e30),
    Sampling(temperature=1.0, top_k=10**9),
    Sampling(temperature=1.0, top_p=0.0),
    Sampling(temperature=1.0, top_p=1e-30, min_p=1.0),
    Sampling(temperature=1.0, min_p=50.0),
    Sampling(repetition_penalty=1e-9, frequency_penalty=2.0),
    Sampling(repetition_penalty=1e30, temperature=1.0),
]


@pytest.mark.parametrize("sampling", EXTREMES, ids=str)
@pytest.mark.parametrize("vocabulary", [3, 700, 5000])
@pytest.mark.parametrize("fill", ["random", "minus infinity", "huge", "one left", "nan"])
def test_no_parameters_and_no_logits_give_an_id_outside_the_vocabulary(
    sampling: Sampling, vocabulary: int, fill: str
) -> None:
    logits = np.random.default_rng(5).normal(0, 2, (2, vocabulary)).astype(np.float32)
    if fill == "minus infinity":
        logits[:] = -np.inf
    elif fill == "huge":
        logits *= 1e37
    elif fill == "one left":
        logits[:] = -np.inf
        logits[:, 2] = 1.0
    elif fill == "nan":
        logits[:, 1] = np.nan
    kinds = [row(sampling, vocabulary, prompt=(1,), history=(0, 1, 1))] * 2
    tokens = pick(logits, kinds, [3, 4])
    assert all(0 <= token < vocabulary for token in tokens)
    if fill == "one left":
        assert tokens == [2, 2]


def test_a_tiny_temperature_picks_the_largest_logit() -> None:
    logits = np.random.default_rng(6).normal(0, 2, (1, 900)).astype(np.float32)
    for sampling in (Sampling(temperature=1e-30), Sampling(temperature=1e-30, top_p=0.9)):
        assert pick(logits, [row(sampling, 900)], [0]) == [int(logits.argmax())]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=math.nan),
        Sampling(temperature=-1.0),
        Sampling(top_p=math.inf),
        Sampling(top_k=-1),
        Sampling(repetition_penalty=0.0),
        Sampling(presence_penalty=math.inf),
        Sampling(logit_bias=((1, math.nan),)),
    ],
    ids=str,
)
def test_a_parameter_without_meaning_is_named(sampling: Sampling) -> None:
    with pytest.raises(ValueError, match=r"temperature|top_p|top_k|penalty|logit_bias"):
        check(sampling)


def test_the_raw_logits_stay_as_they_were() -> None:
    """The log-probabilities are of the raw ones."""
    logits = mx.array(np.random.default_rng(7).normal(0, 2, (2, 60)).astype(np.float32))
    before = np.array(logits)
    kinds = _mixed(60, seed=1)[:2]
    sampling = Sampling(repetition_penalty=2.0, logit_bias=((4, 3.0),), presence_penalty=1.0)
    kinds[0] = row(sampling, 60, prompt=(1, 2), history=(5,))
    drawn = draw(logits, kinds, [1, 1])
    mx.eval(drawn.arrays)
    assert np.array_equal(before, np.array(logits))
