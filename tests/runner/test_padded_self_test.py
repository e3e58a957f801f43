"""Prompts share a padded pass only where that gives each the logits it has alone."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from tests.runner.self_tests import make
from treadle.runner.kv.padded import prefill
from treadle.runner.loading import padded_self_test
from treadle.runner.loading.padded_self_test import reason_not_batched, shares_prefill
from treadle.runner.loading.reference import Reference
from treadle.runner.mlxlm import connect


def reference(architecture: str, precision: str = "float32", **changed: Any) -> Reference:
    return Reference(connect(), make(architecture, precision, **changed), 2048)


@pytest.mark.parametrize(
    ("architecture", "precision"),
    [
        ("llama", "float32"),
        ("llama", "bfloat16"),
        ("gemma3_text", "float32"),
        ("gemma3_text", "bfloat16"),
        ("falcon_h1", "float32"),
        ("falcon_h1", "4 bits"),
    ],
)
def test_models_that_leave_padding_out_share_a_pass(architecture: str, precision: str) -> None:
    judge = reference(architecture, precision)
    assert reason_not_batched(judge) == ""
    assert shares_prefill(judge)


@pytest.mark.parametrize("decay", [None, -4.0])
def test_a_model_whose_state_takes_padding_in_reads_prompts_one_by_one(decay: float | None) -> None:
    """Its sequences can still decode together. Five tokens of padding did not show it."""
    module = make("nemotron_h", "float32")
    module.update(_usual_size(module.parameters()))
    for layer in module.layers:
        if decay is not None and hasattr(layer.mixer, "A_log"):
            layer.mixer.A_log = mx.full(layer.mixer.A_log.shape, decay)
    judge = Reference(connect(), module, 2048)
    assert reason_not_batched(judge) == ""
    assert not shares_prefill(judge)


def _usual_size(parameters: Any) -> Any:
    from mlx.utils import tree_map

    return tree_map(lambda w: w / 3 if w.ndim == 2 else w, parameters)


@pytest.mark.parametrize("window", [32, 100])
def test_padding_goes_beyond_a_short_window(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    together = prefill.together

    def spy(model: Any, tokens: Any, caches: Any, **options: Any) -> Any:
        seen.append([len(row) for row in tokens])
        return together(model, tokens, caches, **options)

    monkeypatch.setattr(padded_self_test, "together", spy)
    assert shares_prefill(reference("gemma3_text", sliding_window=window))
    assert [max(lengths) - min(lengths) > window for lengths in seen] == [True, True]
    assert all(max(lengths) <= prefill.MAX_PADDED * min(lengths) for lengths in seen)


def test_a_shared_pass_that_raises_means_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> Any:
        raise AssertionError("lengths")

    monkeypatch.setattr(padded_self_test, "together", refuse)
    assert not shares_prefill(reference("llama"))
