"""Scaled rotary positions of a configuration, also where mlx-lm's class of the model reads none."""

from __future__ import annotations

import json
import logging
from itertools import product
from pathlib import Path
from typing import Any

import mlx.nn as nn
import numpy as np
import numpy.typing as npt
import pytest

from tests.support.architectures import config_of, make_folder
from tests.support.mtp_models import make_headed
from treadle.errors import ConfigError, ModelError
from treadle.runner.fused.rotary import Rotary
from treadle.runner.loading.loader import load
from treadle.runner.mlxlm import connect, rotations_of

TRAINED = 64
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED}
LLAMA3 = {**YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = {"rope_type": "longrope", "short_factor": 1.0, "long_factor": 4.0}
PLAIN: dict[str, Any] = {"rope_type": "default"}
LINEAR: dict[str, Any] = {"type": "linear", "factor": 4.0}
REFUSING = ("qwen2_moe", "nemotron", "internlm2", "internlm3", "phi3")
IGNORING = ("qwen3_moe", "mixtral", "glm4_moe", "cohere2", "gemma2", "ernie4_5", "phi")
Numbers = npt.NDArray[np.float64]


def changed(folder: Path, **fields: Any) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))
    return folder


def frequencies(kind: str, dims: int, base: float) -> tuple[Numbers, float]:
    """Radians a position of each pair, and the factor of rotated dimensions, as transformers computes them."""
    plain = base ** (-np.arange(0, dims, 2) / dims)
    if kind == "linear":
        return plain / 4, 1.0
    if kind == "longrope":
        return plain / 4, float(np.sqrt(1 + np.log(2048 / TRAINED) / np.log(TRAINED)))
    if kind == "llama3":
        turns = TRAINED * plain / (2 * np.pi)
        smooth = np.clip((turns - 1) / 3, 0, 1)
        return (1 - smooth) * plain / 4 + smooth * plain, 1.0
    first, last = (dims * np.log(TRAINED / (2 * np.pi * turns)) / (2 * np.log(base)) for turns in (32, 1))
    low, high = max(np.floor(first), 0), min(np.ceil(last), dims - 1)
    ramp = np.clip((np.arange(dims // 2) - low) / max(high - low, 1e-3), 0, 1)
    return plain / 4 * ramp + plain * (1 - ramp), 0.1 * np.log(4) + 1


def lengths(scaling: dict[str, Any]) -> dict[str, int]:
    """Where LongRoPE's configurations have the length before it."""
    return {"original_max_position_embeddings": TRAINED} if scaling is LONG else {}


def rotations(module: Any) -> list[Rotary]:
    found = [Rotary.of(one) for one in rotations_of(module)]
    assert found
    return [one for one in found if one is not None]


@pytest.mark.parametrize(
    ("architecture", "scaling"),
    [
        *product([*IGNORING, *REFUSING, "llama"], [YARN, LLAMA3, LINEAR]),
        *product(["qwen3_moe", "gemma2"], [LONG]),  # whose pairs are half of the dimensions apart
    ],
)
def test_positions_are_those_of_the_configuration(tmp_path: Path, architecture: str, scaling: dict[str, Any]) -> None:
    """Classes that read the field, as llama's, are left as they are. Those that refuse it do not see it."""
    config = config_of(architecture)
    folder = make_folder(tmp_path, config)
    plain = rotations_of(connect().load(changed(folder, rope_scaling=PLAIN))[0])
    dims, base = plain[0].dims, plain[0].base
    module, _ = connect().load(changed(folder, rope_scaling=scaling, **lengths(scaling)))
    expected, factor = frequencies(str(scaling.get("rope_type", scaling.get("type"))), dims, base)
    for one, own in zip(rotations(module), plain, strict=True):
        assert np.allclose(np.array(one.inv_freq), expected, rtol=1e-4)
        assert one.scale == pytest.approx(factor)
        assert one.interleaved == own.traditional


@pytest.mark.parametrize("scaling", [YARN, LLAMA3, LINEAR, LONG])
def test_hunyuans_own_rotations_are_plain_where_another_kind_is_asked_for(
    tmp_path: Path, scaling: dict[str, Any]
) -> None:
    """mlx-lm's class knows those with an alpha alone, which stay its own."""
    folder = make_folder(tmp_path, config_of("hunyuan_v1_dense"))
    module, _ = connect().load(changed(folder, rope_scaling=scaling, **lengths(scaling)))
    expected, factor = frequencies(str(scaling.get("rope_type", scaling.get("type"))), 64, 10000.0)
    assert [np.allclose(np.array(one.inv_freq), expected, rtol=1e-4) for one in rotations(module)] == [True] * 2
    assert [one.scale for one in rotations(module)] == [pytest.approx(factor)] * 2
    module, _ = connect().load(changed(folder, rope_scaling={"type": "dynamic", "factor": 1.0, "alpha": 100.0}))
    assert {type(layer.self_attn.rope).__name__ for layer in module.layers} == {"DynamicNTKAlphaRoPE"}


@pytest.mark.parametrize("scaling", [{**LINEAR, "factor": 1.0}, {"rope_type": "default"}, {"type": None}])
def test_what_scales_nothing_is_nothing_to_apply(tmp_path: Path, scaling: dict[str, Any]) -> None:
    library = connect()
    module, config = library.load(changed(make_folder(tmp_path, config_of("qwen3_moe")), rope_scaling=scaling))
    assert library.ignored_scaling(module, config) == ""


@pytest.mark.parametrize("architecture", ["qwen2_moe", "hunyuan_v1_dense"])
def test_scaled_rotations_of_no_kind_are_left_to_the_class(tmp_path: Path, architecture: str) -> None:
    """Which refuses them."""
    folder = make_folder(tmp_path, config_of(architecture))
    with pytest.raises(ModelError, match="rope_scaling must contain keys"):
        load(changed(folder, rope_scaling={"factor": 4.0, "alpha": 100.0}))


def test_later_names_are_read_too(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, config_of("qwen3_moe"))
    one, other = tmp_path / "older", tmp_path / "later"
    for made, fields in ((one, {"rope_scaling": YARN}), (other, {"rope_parameters": {**YARN, "rope_theta": 1e4}})):
        made.mkdir()
        for file in folder.glob("*.*"):
            (made / file.name).write_bytes(file.read_bytes())
        changed(made, **fields)
    (first, *_), (second, *_) = (rotations(connect().load(made)[0]) for made in (one, other))
    assert first.equals(second)
    assert first.scale > 1


def test_the_length_before_is_the_models_where_none_is_given(tmp_path: Path) -> None:
    """As in transformers."""
    without = {name: value for name, value in YARN.items() if "original" not in name}
    folder = make_folder(tmp_path, config_of("qwen3_moe"))
    (said, *_) = rotations(connect().load(changed(folder, rope_scaling=YARN, max_position_embeddings=TRAINED))[0])
    (left_out, *_) = rotations(connect().load(changed(folder, rope_scaling=without))[0])
    assert said.equals(left_out)


def test_a_model_is_served_with_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The self-test holds the backend against the module's own logits. YaRN extends the context, as in vLLM."""
    folder = make_folder(tmp_path, config_of("qwen3_moe"))
    model = load(changed(folder, rope_scaling=YARN, max_position_embeddings=TRAINED))
    assert model.choice.config.name == "contiguous"
    assert model.context == 4 * TRAINED
    assert "positions" not in model.details
    assert not caplog.records
    with pytest.raises(ConfigError, match="made for 256 tokens"):
        load(folder, context=4 * TRAINED + 1)


@pytest.mark.parametrize(
    ("architecture", "kind", "fields"),
    [
        ("mimo_v2_flash", "yarn", {"swa_rope_theta": 500.0}),
        ("qwen3_moe", "dynamic", {}),
        ("nemotron", "dynamic", {}),
        ("hunyuan_v1_dense", "proportional", {}),
        ("gemma2", "proportional", {}),
        ("cohere2", "longrope", {"original_max_position_embeddings": TRAINED}),
    ],
)
def test_what_is_not_applied_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, architecture: str, kind: str, fields: dict[str, Any]
) -> None:
    """Where windows have a rotation of their own, or for a kind that is not known."""
    folder = changed(make_folder(tmp_path, config_of(architecture)), rope_scaling={**YARN, "rope_type": kind}, **fields)
    with caplog.at_level(logging.WARNING):
        model = load(folder)
    assert all(isinstance(one, nn.RoPE) and one.scale == 1.0 for one in rotations_of(model.module))
    assert f"config.json asks for '{kind}'" in model.details["positions"]
    assert "long contexts may be misread" in caplog.text


def test_a_head_for_drafts_has_the_models(tmp_path: Path) -> None:
    folder = make_headed(tmp_path, "glm4_moe")
    library = connect()
    module, config = library.load(changed(folder, rope_scaling=YARN))
    head = library.load_head(folder, module, config)
    assert rotations(head)[0].equals(rotations(module)[0])
    assert rotations(head)[0].scale > 1


@pytest.mark.parametrize(
    ("architecture", "scaling"),
    [
        *product(["llama", "qwen3_moe", "deepseek_v2", "deepseek_v3"], [YARN]),
        *product(["qwen3_moe", "phi3"], [LONG]),
    ],
)
def test_the_factor_of_rotated_dimensions_is_the_given_one(
    tmp_path: Path, architecture: str, scaling: dict[str, Any]
) -> None:
    """As in transformers. It changes no frequency."""
    folder = changed(make_folder(tmp_path, config_of(architecture)), **lengths(scaling))
    modules = []
    for more in ({}, {"attention_factor": 1.5}, {"attention_factor": None}):
        module, _ = connect().load(changed(folder, rope_scaling={**scaling, **more}))
        modules.append([rotation_of(layer.self_attn.rope) for layer in module.layers])
    for own, given, none in zip(*modules, strict=True):
        assert [own[0], given[0], none[0]] == [pytest.approx(own[0]), 1.5, own[0]]
        assert np.allclose(own[1], given[1])


def rotation_of(module: Any) -> tuple[float, Numbers]:
    factor = getattr(module, "mscale", None) or module._scale
    return factor, np.array(module._freqs)


def test_phimoes_own_field_counts_before_the_factor(tmp_path: Path) -> None:
    """As in transformers."""
    own = {**LONG, "short_mscale": 1.25, "long_mscale": 1.25, "attention_factor": 1.5}
    folder = changed(make_folder(tmp_path, config_of("phimoe")), rope_scaling=own, **lengths(LONG))
    assert factors(folder) == [1.25, 1.25]


def factors(folder: Path) -> list[float]:
    found = [Rotary.of(layer.self_attn.rope) for layer in connect().load(folder)[0].layers]
    return [one.scale for one in found if one is not None]


def test_each_kind_of_layers_has_the_factor_of_its_own_rotations(tmp_path: Path) -> None:
    """Also where mlx-lm's class reads them by kind. A factor is nothing to plain ones."""
    kinds = {
        "full_attention": {**YARN, "attention_factor": 1.5},
        "sliding_attention": {**YARN, "attention_factor": 0.75},
    }
    config = config_of("laguna")
    folder = changed(make_folder(tmp_path, config), rope_parameters=kinds)
    assert factors(folder) == [kinds[kind]["attention_factor"] for kind in config["layer_types"]]
    kinds["sliding_attention"] = {**PLAIN, "attention_factor": 0.75}
    assert factors(changed(folder, rope_parameters=kinds)) == [
        1.5 if kind == "full_attention" else 1.0 for kind in config["layer_types"]
    ]


def test_other_models_have_their_own_factor_afterwards(tmp_path: Path) -> None:
    folder = changed(make_folder(tmp_path, config_of("llama")), rope_scaling={**YARN, "attention_factor": 1.5})
    given, _ = connect().load(folder)
    own, _ = connect().load(changed(folder, rope_scaling=YARN))
    assert [rotations(given)[0].scale, rotations(own)[0].scale] == [1.5, pytest.approx(0.1 * np.log(4) + 1)]
