"""Ragged passes over models with recurrent layers give mlx-lm's own logits of each sequence alone."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.runner.recurrent.families import RECURRENT, new_model
from tests.runner.recurrent.harness import Harness
from tests.support.emulated import EmulatedKernel
from treadle.runner.mlxlm import connect
from treadle.runner.recurrent.kernels import RecurrentKernels
from treadle.runner.recurrent.layer import Recurrences
from treadle.runner.recurrent.operations import RecurrentOperations

TOLERANCE = 2e-4
SCHEDULE: tuple[dict[str, int], ...] = (
    {"a": 1, "b": 21, "c": 2},
    {"b": 1, "a": 5, "c": 1, "d": 1},
    {"d": 18, "c": 1, "a": 1, "b": 3},
    {"a": 1, "b": 1, "c": 1, "d": 1},
    {"a": 1, "b": 1, "c": 1, "d": 1},
    {"d": 1, "b": 1},
)
"""Tokens of each sequence in each pass."""


class EmulatedRecurrentKernels(RecurrentKernels):
    kernel = EmulatedKernel


WAYS: dict[str, type[Any]] = {"operations": RecurrentOperations, "kernels": EmulatedRecurrentKernels}


def prompts() -> dict[str, list[int]]:
    numbers = np.random.default_rng(0)
    return {name: numbers.integers(1, 250, 60).tolist() for name in "abcd"}


def alone(model: Any, tokens: list[int]) -> Any:
    """mlx-lm's logits (V,) behind the last token."""
    return model(mx.array([tokens]), cache=connect().new_caches(model))[0, -1]


def close(found: Any, wanted: Any, what: str) -> None:
    error = float(mx.abs(found - wanted).max() / mx.abs(wanted).max())
    assert error < TOLERANCE, f"{what}: {error}"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", RECURRENT)
def test_ragged_passes_give_the_logits_of_each_sequence_alone(family: str, way: str) -> None:
    model, own, tokens = new_model(family), new_model(family), prompts()
    recurrences: Recurrences = WAYS[way]()
    harness, seen = Harness(model, recurrences), dict.fromkeys(tokens, 0)
    for number, counts in enumerate(SCHEDULE):
        chunks = {name: tokens[name][seen[name] : seen[name] + count] for name, count in counts.items()}
        found = harness.run(chunks, padding=number % 3)
        for name, count in counts.items():
            seen[name] += count
            close(found[name], alone(own, tokens[name][: seen[name]]), f"pass {number}, sequence {name}")
