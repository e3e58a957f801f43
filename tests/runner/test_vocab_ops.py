from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from treadle.runner.sampling.vocab_ops import exp, log_sum_exp, top_indices


@pytest.mark.parametrize(("length", "count"), [(10, 3), (1000, 1), (1000, 20), (1000, 249), (1000, 1000), (70_001, 50)])
def test_the_largest_come_first(length: int, count: int) -> None:
    values = np.random.default_rng(length).normal(size=(3, length)).astype(np.float32)
    got = np.array(top_indices(mx.array(values), count))
    assert np.array_equal(got, np.argsort(-values, axis=-1)[:, :count])


def test_ties_come_by_index() -> None:
    values = np.zeros((1, 5000), np.float32)
    values[0, [7, 4000, 90]] = 1.0
    assert top_indices(mx.array(values), 3).tolist() == [[7, 90, 4000]]


@pytest.mark.parametrize("count", [1, 20, 300, 1024])
def test_of_equal_ones_the_first_are_taken_whatever_else_is_asked_for(count: int) -> None:
    """B1: a row's candidates don't depend on how many another row has."""
    values = np.random.default_rng(count).normal(size=(3, 20_000)).astype(np.float32).round(1)
    values[1] = -np.inf
    values[1, 77::1000] = 1
    values[2] = 0
    got = np.array(top_indices(mx.array(values), count))
    best = np.argsort(-values, axis=-1, kind="stable")[:, :count]
    assert np.array_equal(got[[0, 2]], best[[0, 2]])
    assert np.array_equal(got[1, :20], best[1, :20])


def test_clustered_entries_are_all_found() -> None:
    values = np.full((1, 8192), -50.0, np.float32)
    values[0, 1000:1064] = np.arange(64)
    assert sorted(top_indices(mx.array(values), 64).tolist()[0]) == list(range(1000, 1064))


def test_exponentials_agree_with_numpy() -> None:
    values = np.random.default_rng(0).normal(0, 20, (2, 999)).astype(np.float32)
    values[0, 5] = -np.inf
    assert np.allclose(np.array(exp(mx.array(values[:, :50]))), np.exp(values[:, :50]), rtol=1e-5)
    reference = np.log(np.exp(values.astype(np.float64)).sum(-1, keepdims=True))
    assert np.allclose(np.array(log_sum_exp(mx.array(values))), reference, rtol=1e-6)
