"""Configurations as transformers saves them, read for the same model: later names, fields left out or said twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from tests.support.architectures import config_of, make_folder
from tests.support.mtp_models import make_headed
from treadle.errors import ModelError
from treadle.runner.loading.loader import load
from treadle.runner.mlxlm import connect

HEAD, EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"
PROMPT = tuple(range(3, 43))


def logits(folder: Path) -> Any:
    module, _ = connect().load(folder)
    found = module(mx.array([PROMPT]))
    mx.eval(found)  # the files may be written anew
    return found


def write_config(folder: Path, config: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config))


def same(one: Any, other: Any) -> bool:
    return bool(mx.allclose(one, other, atol=1e-4).item())


def later(config: dict[str, Any], **moved: str) -> dict[str, Any]:
    """A configuration whose rotations stand in `rope_parameters`, and nowhere else."""
    rotations = {name: config[older] for name, older in moved.items()}
    kept = {name: value for name, value in config.items() if name not in {*moved.values(), "rope_scaling"}}
    return {**kept, "rope_parameters": {"rope_type": "default", **rotations}}


@pytest.mark.parametrize(
    ("architecture", "moved"),
    [
        ("glm4_moe", {"rope_theta": "rope_theta", "partial_rotary_factor": "partial_rotary_factor"}),
        ("gpt_neox", {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}),
        ("exaone4", {"rope_theta": "rope_theta"}),
        ("llama4_text", {"rope_theta": "rope_theta"}),
    ],
)
def test_a_class_that_asks_for_an_older_field_gets_it(architecture: str, moved: dict[str, str], tmp_path: Path) -> None:
    config = config_of(architecture)
    folder = make_folder(tmp_path, config)
    before = logits(folder)
    write_config(folder, later(config, **moved))
    assert same(logits(folder), before)


@pytest.mark.parametrize("name", ["type", "rope_type"])
@pytest.mark.parametrize("architecture", ["llama", "internlm2", "internlm3", "deepseek"])
def test_the_kind_of_scaled_rotations_is_read_by_either_name(architecture: str, name: str, tmp_path: Path) -> None:
    config = config_of(architecture)
    folder = make_folder(tmp_path, config)
    found = []
    for names in (("type", "rope_type"), (name,)):
        write_config(folder, {**config, "rope_scaling": {"factor": 4.0, **dict.fromkeys(names, "linear")}})
        found.append(logits(folder))
    assert same(*found)


def test_experts_by_their_later_name_are_read_by_a_class_that_reads_rotations(tmp_path: Path) -> None:
    config = config_of("mellum")
    folder = make_folder(tmp_path, config)
    before = logits(folder)
    write_config(folder, {**config, "num_local_experts": config["num_experts"], "num_experts": None})
    assert same(logits(folder), before)


@pytest.mark.parametrize(
    "architecture",
    [
        *("llama", "qwen2", "ministral3", "glm", "granite", "granitemoehybrid", "jamba", "seed_oss", "smollm3"),
        *("qwen3", "olmo2", "starcoder2", "gemma4_text", "qwen3_moe", "qwen2_vl", "gemma4"),
    ],
)
def test_a_stored_head_counts_where_the_config_says_nothing_about_it(architecture: str, tmp_path: Path) -> None:
    """mlx-lm drops the head of the first nine, and gives other logits without a word."""
    config = config_of(architecture)
    folder = make_folder(tmp_path, config)
    before = logits(folder)
    write_config(folder, untold(config))
    assert same(logits(folder), before)


def untold(config: dict[str, Any]) -> dict[str, Any]:
    found = {name: untold(value) if isinstance(value, dict) else value for name, value in config.items()}
    found.pop("tie_word_embeddings", None)
    return found


@pytest.mark.parametrize("architecture", ["llama", "olmo2", "granitemoe", "starcoder2", "gemma4_text", "exaone"])
def test_a_copy_of_the_embeddings_as_a_head_is_not_read(architecture: str, tmp_path: Path) -> None:
    """Training frameworks save one; some of mlx-lm's classes refuse it."""
    folder = make_folder(tmp_path, config_of(architecture, tie_word_embeddings=True))
    before = logits(folder)
    path = str(folder / "model.safetensors")
    weights: dict[str, Any] = dict(mx.load(path))  # type: ignore[arg-type]
    mx.eval(weights)
    table = next(array for name, array in weights.items() if name.endswith(("embed_tokens.weight", "wte.weight")))
    mx.save_safetensors(path, {**weights, HEAD: mx.array(table)})
    assert same(logits(folder), before)


def test_a_config_that_says_nothing_and_weights_without_a_head_are_left_to_mlx_lm(tmp_path: Path) -> None:
    config = config_of("llama", tie_word_embeddings=True)
    folder = make_folder(tmp_path, config)
    before = logits(folder)
    write_config(folder, untold(config))
    assert same(logits(folder), before)


def test_a_missing_head_is_still_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, config_of("llama", tie_word_embeddings=True))
    write_config(folder, config_of("llama"))
    with pytest.raises(ModelError, match=r"lack, such as lm_head\.weight"):
        load(folder, memory=1 << 25)


def test_an_mtp_head_rotates_by_later_fields(tmp_path: Path) -> None:
    folder = make_headed(tmp_path, "glm4_moe")
    config = json.loads((folder / "config.json").read_text())
    config["rope_theta"] = 500.0
    library = connect()
    heads = []
    for one in (config, later(config, rope_theta="rope_theta", partial_rotary_factor="partial_rotary_factor")):
        write_config(folder, one)
        module, _ = library.load(folder)
        heads.append(library.load_head(folder, module, one))
    assert [head.model.layers[0].self_attn.rope.base for head in heads] == [500.0, 500.0]
