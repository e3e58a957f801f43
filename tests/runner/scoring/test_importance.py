"""Importance of tokens: the arithmetic of SpecPrefill, and which chunks are kept."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.core.sparse_prompt import HEAD_CHUNKS, KEPT_CHUNK, TAIL_CHUNKS, SparsePrompt, kept_tokens
from treadle.runner.scoring.importance import SMOOTHED, attended, kept_positions, smoothed


def test_weights_are_the_largest_of_all_heads() -> None:
    """Against a loop over heads: those side by side share a kv head."""
    dice = np.random.default_rng(1)
    queries, keys = dice.normal(size=(3, 6, 8)), dice.normal(size=(2, 40, 8))
    found = np.array(attended(mx.array(queries.astype(np.float32)), mx.array(keys.astype(np.float32)), 0.7))
    wanted = np.zeros((3, 40))
    for head in range(6):
        scores = 0.7 * queries[:, head] @ keys[head // 3].T
        weights = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
        wanted = np.maximum(wanted, weights)
    np.testing.assert_allclose(found, wanted, rtol=1e-4)


@given(st.integers(1, 60))
def test_a_token_counts_with_its_neighbours(count: int) -> None:
    weights = np.random.default_rng(count).random(count).astype(np.float32)
    side = SMOOTHED // 2
    wanted = [weights[max(0, i - side) : i + side + 1].mean() for i in range(count)]
    np.testing.assert_allclose(smoothed(weights), wanted, rtol=1e-5)


@given(st.integers(2, 2000), st.integers(0, 300), st.floats(0.01, 1.0))
def test_whole_chunks_are_kept_and_those_at_both_ends(scored: int, start: int, keep: float) -> None:
    length = start + scored
    kept = kept_tokens(scored, keep)
    found = kept_positions(np.random.default_rng(scored).random(length).astype(np.float32), start, kept)
    SparsePrompt.of(length, start, keep).choose(found)
    chunks = {(position - start) // KEPT_CHUNK for position in found}
    sizes = [min(KEPT_CHUNK, scored - chunk * KEPT_CHUNK) for chunk in chunks]
    assert sum(sizes) == len(found)
    last = (scored - 1) // KEPT_CHUNK
    assert {*range(min(HEAD_CHUNKS, last)), *range(max(0, last - TAIL_CHUNKS + 1), last + 1)} <= chunks


def test_chunks_with_the_largest_weights_are_kept() -> None:
    weights = np.zeros(64 * KEPT_CHUNK, np.float32)
    for chunk in (20, 33, 47):
        weights[chunk * KEPT_CHUNK + 16] = 1.0
    found = kept_positions(weights, 0, (HEAD_CHUNKS + TAIL_CHUNKS + 3) * KEPT_CHUNK)
    assert {20, 33, 47} <= {position // KEPT_CHUNK for position in found}
    assert kept_positions(weights * 0, 0, kept_tokens(len(weights), 0.3)) == tuple(
        i for i in range(len(weights)) if i // KEPT_CHUNK < 12 or i // KEPT_CHUNK >= 56
    ), "of equal ones those in front"


def test_weights_that_are_no_numbers_are_refused() -> None:
    weights = np.zeros(500, np.float32)
    weights[7] = np.nan
    with pytest.raises(ValueError, match="not finite"):
        kept_positions(weights, 0, 320)
