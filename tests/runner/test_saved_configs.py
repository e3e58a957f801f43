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


OWN_TABLE = ("gemma", "gemma2", "gemma3n", "cohere", "cohere2", "lfm2", "lfm2_moe", "gpt2")
"""Architectures whose classes in mlx-lm have no head but the embeddings."""


def with_head(folder: Path, change: float) -> Path:
    """Store a head that is the embeddings but for a number in the last row."""
    path = str(folder / "model.safetensors")
    weights: dict[str, Any] = dict(mx.load(path))  # type: ignore[arg-type]
    mx.eval(weights)
    head = mx.array(
        next(table for name, table in weights.items() if name.endswith((".embed_tokens.weight", "wte.weight")))
    )
    head[-1, 0] += change
    mx.save_safetensors(path, {**weights, HEAD: head})
    return folder


@pytest.mark.parametrize("architecture", OWN_TABLE)
def test_a_head_of_its_own_is_refused_where_there_is_no_place_for_it(architecture: str, tmp_path: Path) -> None:
    """Where the config says that it counts: without it answers would be those of another model."""
    folder = with_head(make_folder(tmp_path, config_of(architecture)), 1.0)
    with pytest.raises(ModelError, match=r"can't be loaded: it has an output head of its own .*; use another model"):
        load(folder, memory=1 << 25)


@pytest.mark.parametrize("architecture", OWN_TABLE)
@pytest.mark.parametrize(("told", "change"), [(False, 0.0), (True, 1.0), (None, 1.0)])
def test_a_head_is_dropped_where_it_is_a_copy_or_does_not_count(
    architecture: str, told: bool | None, change: float, tmp_path: Path
) -> None:
    folder = make_folder(tmp_path, untold(config_of(architecture)) | {"tie_word_embeddings": told})
    before = logits(folder)
    assert same(logits(with_head(folder, change)), before)


def test_the_older_field_of_lfm2_counts_before_the_later_one(tmp_path: Path) -> None:
    """As in transformers."""
    folder = make_folder(tmp_path, config_of("lfm2", tie_embedding=True))
    before = logits(folder)
    assert same(logits(with_head(folder, 1.0)), before)


def test_a_quantized_copy_is_one_too(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, config_of("gemma2"))
    path = str(folder / "model.safetensors")
    weights: dict[str, Any] = dict(mx.load(path))  # type: ignore[arg-type]
    parts = dict(zip(("weight", "scales", "biases"), mx.quantize(weights.pop(EMBEDDINGS), 64, 8), strict=True))
    named = {f"{place}.{part}": array for place in (EMBEDDINGS[:-7], HEAD[:-7]) for part, array in parts.items()}
    mx.eval(weights, named)
    mx.save_safetensors(path, weights | named)
    write_config(folder, config_of("gemma2", quantization={"group_size": 64, "bits": 8}))
    logits(folder)
    mx.save_safetensors(path, weights | named | {"lm_head.scales": parts["scales"] * 2})
    with pytest.raises(ModelError, match="output head of its own"):
        logits(folder)


def test_a_language_model_of_null_is_none(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, config_of("llama"))
    before = logits(folder)
    write_config(folder, config_of("llama", text_config=None))
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


def saved(
    config: dict[str, Any], renamed: dict[str, str], left_out: tuple[str, ...] = (), **later: Any
) -> dict[str, Any]:
    """A published configuration as transformers 5 saves it again."""
    kept = {renamed.get(name, name): value for name, value in config.items() if name not in left_out}
    return kept | later


def test_granites_layers_have_their_later_names(tmp_path: Path) -> None:
    config = config_of("granitemoehybrid", time_step_limit=(0.0, float("inf")))
    folder = make_folder(tmp_path, config)
    before = logits(folder)
    kinds = {"mamba": "linear_attention", "attention": "full_attention"}
    layers = [kinds[kind] for kind in config["layer_types"]]
    write_config(folder, saved(config, {}, layer_types=layers, time_step_limit=[0.0, {"__float__": "Infinity"}]))
    assert same(logits(folder), before)


def test_step_has_its_layers_by_their_later_fields(tmp_path: Path) -> None:
    scaled = {"rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 64}
    scaled |= {"low_freq_factor": 1.0, "high_freq_factor": 32.0}
    config = config_of(
        "step3p5",
        rope_theta=[10000.0, 500.0] * 2,
        partial_rotary_factors=[1.0, 0.5] * 2,
        rope_scaling=scaled,
        yarn_only_types=["full_attention"],
        moe_layers_enum="2,3",
    )
    folder = make_folder(tmp_path, config)
    before = logits(folder)
    renamed = {"num_attention_groups": "num_key_value_heads", "moe_num_experts": "n_routed_experts"}
    left_out = ("rope_theta", "partial_rotary_factors", "rope_scaling", "yarn_only_types", "moe_layers_enum")
    rotations = {
        "full_attention": {**scaled, "rope_theta": 500.0, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
    }
    later = saved(
        config,
        {**renamed, "moe_top_k": "num_experts_per_tok"},
        (*left_out, "attention_other_setting"),
        rope_parameters=rotations,
        mlp_layer_types=["dense", "dense", "sparse", "sparse"],
        num_sliding_attention_heads=8,
        per_layer_config={"0": {"num_attention_heads": 8}, "2": {"num_attention_heads": 8}},
    )
    write_config(folder, later)
    assert same(logits(folder), before)


@pytest.mark.parametrize("architecture", ["bailing_hybrid", "bailing_moe_v3"])
def test_bailings_fields_have_their_later_names(architecture: str, tmp_path: Path) -> None:
    """Its dimensions of heads are those of rotations there."""
    config = config_of(architecture, num_experts_per_tok=3)
    folder = make_folder(tmp_path, config)
    before = logits(folder)
    renamed = {
        "num_experts_per_tok": "num_experts_per_token",
        "n_group": "num_expert_group",
        "max_position_embeddings": "model_max_length",
        "norm_topk_prob": "moe_renormalize",
    }
    write_config(folder, saved(config, renamed, head_dim=32, linear_head_dim=64))
    assert same(logits(folder), before)
    assert load(folder).context == 2048


@pytest.mark.parametrize("nested", [False, True])
def test_lagunas_rotations_of_windows_may_have_a_field_of_their_own(nested: bool, tmp_path: Path) -> None:
    full = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
    sliding = {"rope_type": "default", "rope_theta": 20.0, "partial_rotary_factor": 1.0}
    config = config_of("laguna", gating=True)
    folder = make_folder(tmp_path, config)
    write_config(folder, {**config, "rope_parameters": {"full_attention": full, "sliding_attention": sliding}})
    before = logits(folder)
    rotations = {"full_attention": full} if nested else full
    write_config(folder, {**config, "gating": "per-head", "rope_parameters": rotations, "swa_rope_parameters": sliding})
    assert same(logits(folder), before)


def test_lagunas_gates_of_heads_may_be_named(tmp_path: Path) -> None:
    """Those of each element are not known to mlx-lm."""
    folder = make_folder(tmp_path, config_of("laguna"))
    write_config(folder, config_of("laguna", gating="per-head"))
    load(folder)
    write_config(folder, config_of("laguna", gating="per-element"))
    with pytest.raises(ModelError, match='gating is "per-element"'):
        load(folder)
