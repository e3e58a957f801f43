from __future__ import annotations

import numpy as np

from treadle.runner.draws import uniforms

KNOWN = [[0.701212, 0.625094], [0.644501, 0.131707]]


def test_numbers_are_known_and_stay_what_they_are() -> None:
    """A seed must give the same text in the next version too."""
    assert uniforms(0, 0) == uniforms(0, 0)
    assert [round(u, 6) for u in uniforms(0, 0)] == KNOWN[0]
    assert [round(u, 6) for u in uniforms(2**64 + 7, 12)] == KNOWN[1]


def test_any_integer_is_a_seed_and_numbers_are_exact_in_float32() -> None:
    for seed in (-1, 0, 2**63, 2**200, -(2**70)):
        for u in uniforms(seed, 3):
            assert 0 <= u < 1
            assert float(np.float32(u)) == u


def test_neighbouring_seeds_and_positions_are_independent() -> None:
    grid = np.array([[uniforms(seed, position) for position in range(60)] for seed in range(60)])
    flat = grid.reshape(-1, 2)
    assert abs(flat.mean(0) - 0.5).max() < 0.02
    assert abs(np.corrcoef(flat.T)[0, 1]) < 0.05
    assert abs(np.corrcoef(grid[:-1, :, 0].ravel(), grid[1:, :, 0].ravel())[0, 1]) < 0.05
    assert abs(np.corrcoef(grid[:, :-1, 0].ravel(), grid[:, 1:, 0].ravel())[0, 1]) < 0.05
    assert len({u for pair in flat.tolist() for u in pair}) > 7100
