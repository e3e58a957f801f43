from __future__ import annotations

import numpy as np

from treadle.runner.sampling.rng import BITS, integer_uniforms, uniforms

KNOWN = [[0.701212, 0.625094], [0.644501, 0.131707]]


def test_numbers_are_known_and_stay_what_they_are() -> None:
    """A seed must give the same text in the next version too."""
    assert uniforms([0, 2**64 + 7], [0, 12]).round(6).tolist() == np.array(KNOWN, np.float32).tolist()


def test_a_row_has_the_same_numbers_beside_others_as_alone() -> None:
    """B1: whoever is in the batch."""
    seeds, positions = [3, -8, 2**63, 3], [0, 5, 7, 1]
    alone = [uniforms([seed], [position])[0].tolist() for seed, position in zip(seeds, positions, strict=True)]
    assert uniforms(seeds, positions).tolist() == alone


def test_any_integer_is_a_seed_and_numbers_are_exact_in_float32() -> None:
    seeds = [-1, 0, 2**63, 2**200, -(2**70)]
    numbers, whole = uniforms(seeds, [3] * 5), integer_uniforms(seeds, [3] * 5)
    assert ((numbers >= 0) & (numbers < 1)).all()
    assert (whole == numbers.astype(np.float64) * 2**BITS).all()


def test_neighbouring_seeds_and_positions_are_independent() -> None:
    grid = np.array([uniforms([seed] * 60, range(60)) for seed in range(60)], np.float64)
    flat = grid.reshape(-1, 2)
    assert abs(flat.mean(0) - 0.5).max() < 0.02
    assert abs(np.array(np.corrcoef(flat.T))[0, 1]) < 0.05
    assert abs(np.corrcoef(grid[:-1, :, 0].ravel(), grid[1:, :, 0].ravel())[0, 1]) < 0.05
    assert abs(np.corrcoef(grid[:, :-1, 0].ravel(), grid[:, 1:, 0].ravel())[0, 1]) < 0.05
    assert len({u for pair in flat.tolist() for u in pair}) > 7100
