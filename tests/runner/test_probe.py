"""Models whose rows can't share a forward pass are found out when they are loaded, and said."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from tests.runner.conftest import Tiny
from treadle.runner.loading.probe import probe
from treadle.runner.mlxlm import connect


class Changed:
    """A model whose logits for a batch go through `change`."""

    def __init__(self, module: Any, change: Callable[[Any], Any], keep: int = 0) -> None:
        self._module = module
        self._change = change
        self._keep = keep

    def __call__(self, tokens: Any, **kwargs: Any) -> Any:
        out = self._module(tokens, **kwargs)
        return self._change(out) if tokens.shape[0] > 1 else out

    def make_cache(self) -> list[Any]:
        from mlx_lm.models.cache import RotatingKVCache

        return [RotatingKVCache(64, keep=self._keep) for _ in self._module.layers]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def refuse(out: Any) -> Any:
    raise TypeError("offset must be an int")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda out: out, ""),
        (lambda out: out + 0.01 * mx.random.normal(out.shape), ""),
        (refuse, "a batch of two rows failed (TypeError: offset must be an int)"),
        (lambda out: out[::-1], "other logits in a batch than alone"),
        (lambda out: out * float("nan"), "other logits in a batch than alone"),
    ],
    ids=["same", "rounded", "refuses", "mixed up", "nan"],
)
def test_a_batch_is_tried_before_it_is_trusted(tiny: Tiny, change: Callable[[Any], Any], why: str) -> None:
    found = probe(connect(), Changed(tiny().module, change), 2048, Path("model"))
    assert why in found.not_batched
    assert bool(found.not_batched) is bool(why)


def test_rotating_caches_that_keep_their_first_tokens_are_not_merged(tiny: Tiny) -> None:
    found = probe(connect(), Changed(tiny().module, lambda out: out, keep=4), 2048, Path("model"))
    assert "caches can't be merged (RotatingKVCache)" in found.not_batched
    assert found.vocabulary == 261
