"""The probe of a model that was just loaded, and the tests of its batches in mlx-lm's caches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from tests.runner.conftest import Tiny
from treadle.errors import ModelError
from treadle.runner.loading.padded_self_test import reason_not_batched
from treadle.runner.loading.probe import probe
from treadle.runner.mlxlm import connect

Change = Callable[[Any], Any]


class Changed:
    """A model whose logits for a batch go through `change`, and those of one sequence through `always`."""

    def __init__(self, module: Any, change: Change, keep: int = 0, always: Change = lambda out: out) -> None:
        self._module = module
        self._change = change
        self._always = always
        self._keep = keep

    def __call__(self, tokens: Any, **kwargs: Any) -> Any:
        out = self._always(self._module(tokens, **kwargs))
        return self._change(out) if tokens.shape[0] > 1 else out

    def make_cache(self) -> list[Any]:
        from mlx_lm.models.cache import RotatingKVCache

        return [RotatingKVCache(64, keep=self._keep) for _ in self._module.layers]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def refuse(out: Any) -> Any:
    raise TypeError("offset must be an int")


def refuse_to_be_empty(out: Any) -> Any:
    raise AssertionError


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda out: out, ""),
        (lambda out: out + 1e-5 * mx.random.normal(out.shape), ""),
        (lambda out: out + 0.01 * mx.random.normal(out.shape), "not the model's own"),
        (refuse, "a batch of sequences failed (TypeError: offset must be an int)"),
        (refuse_to_be_empty, "a batch of sequences failed (AssertionError: )"),
        (lambda out: out[::-1], "not the model's own"),
        (lambda out: out * float("nan"), "not a number of times"),
    ],
    ids=["same", "rounded", "more than rounded", "refuses", "asserts", "mixed up", "nan"],
)
def test_a_batch_is_tried_before_it_is_trusted(tiny: Tiny, change: Change, why: str) -> None:
    reference = probe(connect(), Changed(tiny().module, change), 2048, Path("model")).reference
    found = reason_not_batched(reference)
    assert why in found
    assert bool(found) is bool(why)


def test_rotating_caches_that_keep_their_first_tokens_are_not_merged(tiny: Tiny) -> None:
    found = probe(connect(), Changed(tiny().module, lambda out: out, keep=4), 2048, Path("model"))
    assert "caches can't be merged (RotatingKVCache)" in reason_not_batched(found.reference)
    assert found.vocabulary == 261


def test_logits_that_are_no_numbers_are_the_models_fault(tiny: Tiny) -> None:
    module = Changed(tiny().module, lambda out: out, always=lambda out: out * float("nan"))
    with pytest.raises(ModelError, match="logits are not finite"):
        probe(connect(), module, 2048, Path("model"))
