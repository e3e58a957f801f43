"""Rotary positions with dynamic NTK scaling, which are plain ones as far as a model's context goes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.generate import generate_step

from tests.runner.drive import Drive
from tests.support.architectures import config_of, make_folder, new_module
from treadle.cli.device_probe import ProbeRequest
from treadle.cli.estimate import estimate
from treadle.core.compute_path import Backend
from treadle.core.messages import Submit
from treadle.runner.loading.expected import expected_path
from treadle.runner.loading.loader import load
from treadle.runner.mlxlm import connect, rotations_of, unscale_dynamic
from treadle.runner.model_runner import ModelRunner

CONTEXT = 96
DYNAMIC: dict[str, Any] = {"type": "dynamic", "rope_type": "dynamic", "factor": 2.0}
SCALED: dict[str, Any] = {"rope_scaling": DYNAMIC, "max_position_embeddings": CONTEXT}
READING = ("internlm2", "internlm3", "llama")


def kinds(module: Any) -> set[str]:
    return {type(one).__name__ for one in rotations_of(module)}


@pytest.mark.parametrize("architecture", READING)
def test_such_a_model_is_batched_without_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, architecture: str
) -> None:
    folder = make_folder(tmp_path, config_of(architecture, **SCALED))
    assert kinds(connect().load(folder)[0]) == {"DynamicNTKScalingRoPE"}
    model = load(folder)
    assert (model.choice.config.name, model.context) == ("contiguous", CONTEXT)
    assert kinds(model.module) == {"RoPE"}
    assert "positions" not in model.details
    assert not caplog.records


@pytest.mark.parametrize("architecture", READING)
def test_up_to_the_context_logits_are_those_of_mlx_lm(tmp_path: Path, architecture: str) -> None:
    """To the last bit: of a prompt, and of the tokens behind it up to the last position."""
    folder = make_folder(tmp_path, config_of(architecture, **SCALED))
    library = connect()
    tokens = mx.array([[3 + 7 * i % 250 for i in range(CONTEXT)]])
    found = []
    for context in (CONTEXT, CONTEXT + 1):  # one further, where they are left as they are
        module, _ = library.load(folder)
        unscale_dynamic(module, context)
        assert kinds(module) == ({"RoPE"} if context == CONTEXT else {"DynamicNTKScalingRoPE"})
        caches = library.new_caches(module)
        parts = [module(tokens[:, :-8], cache=caches)]
        parts += [module(tokens[:, i : i + 1], cache=caches) for i in range(CONTEXT - 8, CONTEXT)]
        found.append(mx.concatenate(parts, axis=1))
    assert mx.array_equal(found[0], found[1]).item()


@pytest.mark.parametrize("architecture", READING)
def test_tokens_are_those_of_mlx_lms_own_generation(tmp_path: Path, architecture: str) -> None:
    """With rows of several lengths at once, one of which ends with the context."""
    folder = make_folder(tmp_path, config_of(architecture, **SCALED))
    some = [
        Submit(id=f"r{length}", prompt=tuple(range(3, 3 + length)), max_tokens=tokens)
        for length, tokens in ((1, 12), (17, 30), (CONTEXT - 24, 24))
    ]
    together = Drive(ModelRunner(load(folder)), some).run()
    module, _ = connect().load(folder)
    for request in some:
        steps: Any = generate_step(mx.array(request.prompt), module, max_tokens=request.max_tokens)
        assert together[request.id] == [int(token) for token, _ in steps]


def test_base_and_layout_are_kept(tmp_path: Path) -> None:
    module = new_module(config_of("llama", **SCALED, rope_theta=5e5, rope_traditional=True))
    unscale_dynamic(module, CONTEXT)
    for one in rotations_of(module):
        assert type(one) is nn.RoPE
        assert (one.dims, one.base, one.traditional, one.scale) == (64, 5e5, True, 1.0)


def test_where_the_context_is_longer_what_is_expected_is_what_is_chosen(tmp_path: Path) -> None:
    """A context that was asked for may be longer than the class assumes. Several rows show that none are batched."""
    config = config_of("internlm2", rope_scaling=DYNAMIC)
    del config["max_position_embeddings"]
    folder = make_folder(tmp_path, config)
    model = load(folder, context=40_000)
    assert kinds(model.module) == {"DynamicNTKScalingRoPE"}
    found = expected_path(connect(), connect().load(folder)[0], "cpu", 40_000)
    assert model.choice.config.name == found.backend == Backend.SERIAL


def test_the_doctor_expects_the_same(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    found = estimate(ProbeRequest(folder=str(make_folder(tmp_path, config_of("llama", **SCALED)))), "cpu", 0)
    assert (found.backend, found.why) == ("contiguous", [])
