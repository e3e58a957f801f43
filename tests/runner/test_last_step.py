"""A decode step over mlx-lm's caches that is taken back: as if it had never been."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.runner.conftest import Tiny
from treadle.runner import mlxlm
from treadle.runner.kv.padded.batch import PaddedState
from treadle.runner.kv.padded.cached_model import CachedModel
from treadle.runner.kv.padded.last_step import LastStep

FAMILIES = ["llama", "gemma3", "mamba", "qwen3_next", "falcon_h1", "deepseek_v3", "llama4"]
LENGTHS = (20, 31, 32, 255, 256)
"""Before and after a window is full, and caches grow."""


def prefilled(model: CachedModel, length: int, seed: int) -> Any:
    caches = model.new_caches()
    model.prefill([(7 * i + seed) % 250 for i in range(length)], caches)
    return caches


def decoded(model: CachedModel, caches: Any, *tokens: Any) -> Any:
    """Logits of the last of some tokens, one for each row, one after the other."""
    for token in tokens:
        logits = model.decode(mx.array(token), caches)
        mx.eval(logits, mlxlm.states(caches))
    return np.array(logits)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_that_was_taken_back_leaves_no_trace(tiny: Tiny, family: str, length: int, rows: int) -> None:
    loaded = tiny(family, padded=True)
    if rows > 1 and loaded.choice.config.name == "serial":
        rows = 1
    model = CachedModel(loaded.module, loaded.library)
    states = [PaddedState(None) for _ in range(rows)]
    first, wrong, right, behind = ([start + i for i in range(rows)] for start in (3, 50, 90, 130))

    def batch() -> Any:
        """Rows of different lengths, some steps into their decoding."""
        own = [prefilled(model, length - i, i) for i in range(rows)]
        caches = mlxlm.merge(own) if rows > 1 else own[0]
        decoded(model, caches, first, first)
        return caches

    caches, last = batch(), LastStep(loaded.library)
    wanted = decoded(model, batch(), right, behind)
    last.begin(states, caches)
    decoded(model, caches, wrong)
    for i, state in enumerate(states):
        alone = last.caches_before(state)
        assert np.allclose(decoded(model, alone, right[i : i + 1], behind[i : i + 1]), wanted[i : i + 1], atol=1e-4)
    last.take_back()
    assert np.allclose(decoded(model, caches, right, behind), wanted, atol=1e-4)
    assert last.caches_before(states[0]) is None


def test_what_all_have_left_is_forgotten(tiny: Tiny) -> None:
    loaded = tiny("llama", padded=True)
    model, last = CachedModel(loaded.module, loaded.library), LastStep(loaded.library)
    states = [PaddedState(None), PaddedState(None)]
    last.begin(states, mlxlm.merge([prefilled(model, 9, i) for i in range(2)]))
    last.forget(states[1])
    assert last.caches_before(states[1]) is None
    assert last.caches_before(states[0]) is not None
    last.forget(states[0])
    assert not last._batches
