"""Folders of vision models as transformers saves them, by its classes and releases: names and configurations."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.runner.looped import Looped
from tests.runner.test_pooling import close, vector
from tests.runner.vision.asked import Asked, Picture, VisionModel
from tests.support.tiny_vision import FAMILIES, config_of
from tests.support.vision_layouts import LAYOUTS, later_config, make_saved, rename
from treadle.core.messages import Pooling
from treadle.errors import ModelError
from treadle.runner.build import build
from treadle.runner.mlxlm import with_older_fields
from treadle.runner.vision_names import names_of

ModelOf = Callable[[str], VisionModel]
BY_CLASS = ("ForConditionalGeneration", "AutoModel")
CASES = [
    *((family, layout) for family in FAMILIES for layout in BY_CLASS),
    *((family, "before 4.52") for family in ("gemma3", "llava", "mistral3")),
    *((family, "Qwen before 4.52") for family in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl_moe")),
    *((family, "5.5") for family in ("qwen3_5", "qwen3_5_moe", "qwen3_vl")),
]
LATER = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "gemma3", "llava")


@pytest.fixture(scope="module")
def asked_of(model_of: ModelOf) -> Callable[[str], tuple[Asked, list[int]]]:
    """A request to a family's model, and mlx-vlm's answer."""
    known: dict[str, tuple[Asked, list[int]]] = {}

    def get(family: str) -> tuple[Asked, list[int]]:
        if family not in known:
            asked = model_of(family).ask("asked", Picture(1), text=1)
            known[family] = asked, model_of(family).expected(asked)
        return known[family]

    return get


def answer(folder: Path, asked: Asked) -> list[int]:
    runner = build(folder, max_running=2)
    assert runner.capabilities().modalities == ("text", "image")
    return Looped(runner).run(asked.submit)["asked"]


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_a_folder_is_read_by_the_names_of_each_layout(
    family: str, layout: str, tmp_path: Path, asked_of: Callable[[str], tuple[Asked, list[int]]]
) -> None:
    asked, expected = asked_of(family)
    assert answer(make_saved(tmp_path, family, partial(rename, family=family, layout=layout)), asked) == expected


@pytest.mark.parametrize("family", ["gemma3", "llava"])
def test_a_tower_without_the_name_of_its_inner_model_is_read(
    family: str, tmp_path: Path, asked_of: Callable[[str], tuple[Asked, list[int]]]
) -> None:
    """As transformers 5 has it in memory."""

    def change(weights: dict[str, Any]) -> dict[str, Any]:
        found = rename(weights, family, "ForConditionalGeneration")
        return {name.replace("vision_tower.vision_model.", "vision_tower."): array for name, array in found.items()}

    asked, expected = asked_of(family)
    assert answer(make_saved(tmp_path, family, change), asked) == expected


@pytest.mark.parametrize("family", LATER)
def test_a_configuration_of_transformers_5_is_read(
    family: str, tmp_path: Path, asked_of: Callable[[str], tuple[Asked, list[int]]]
) -> None:
    """Rotations, sections of axes, experts and ties stand elsewhere."""
    folder = make_saved(tmp_path, family, partial(rename, family=family, layout="ForConditionalGeneration"))
    (folder / "config.json").write_text(json.dumps(later_config(family)))
    asked, expected = asked_of(family)
    assert answer(folder, asked) == expected


def without_head(weights: dict[str, Any], family: str, layout: str) -> dict[str, Any]:
    return {name: array for name, array in rename(weights, family, layout).items() if "lm_head" not in name}


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl_moe", "gemma3", "smolvlm", "pixtral"])
def test_a_model_of_automodel_without_its_head_gives_embeddings_of_images(
    family: str, tmp_path: Path, model_of: ModelOf
) -> None:
    folder = make_saved(tmp_path, family, partial(without_head, family=family, layout="AutoModel"))
    runner = build(folder, max_running=2)
    assert runner.capabilities().embedding.only
    asked = model_of(family).ask("pooled", Picture(1), tokens=0, pooling=Pooling.LAST)
    loops = [Looped(one, prefill_tokens=64) for one in (runner, model_of(family).runner)]
    for loop in loops:
        loop.run(asked.submit)
    assert close(*(vector(loop, "pooled") for loop in loops))


def test_a_gemma_3_that_does_not_say_that_its_head_is_tied_generates(tmp_path: Path) -> None:
    """Its configuration leaves the field out, and its weights have no head: as published."""
    folder = make_saved(tmp_path, "gemma3", partial(without_head, family="gemma3", layout="before 4.52"))
    config = config_of("gemma3")
    del config["text_config"]["tie_word_embeddings"]
    (folder / "config.json").write_text(json.dumps(config))
    assert not build(folder, max_running=2).capabilities().embedding.only


def test_names_of_no_layout_are_refused_with_the_cure(tmp_path: Path) -> None:
    def change(weights: dict[str, Any]) -> dict[str, Any]:
        return {f"vlm.{name}": array for name, array in rename(weights, "qwen3_vl", "AutoModel").items()}

    with pytest.raises(ModelError) as error:
        build(make_saved(tmp_path, "qwen3_vl", change), max_running=2)
    assert "tensors have names unknown for qwen3_vl, such as vlm." in str(error.value)
    assert "AutoModelForImageTextToText" in str(error.value)


def test_a_model_that_was_saved_without_its_tower_is_told(tmp_path: Path) -> None:
    def change(weights: dict[str, Any]) -> dict[str, Any]:
        found = rename(weights, "qwen3_vl", "ForConditionalGeneration")
        return {name: array for name, array in found.items() if "visual" not in name}

    can = build(make_saved(tmp_path, "qwen3_vl", change), max_running=2).capabilities()
    assert can.modalities == ("text",)
    assert "its weights have no vision_tower: save the whole model" in can.no_images


@pytest.mark.parametrize(
    ("family", "name", "own"),
    [
        ("qwen3_5", "model.language_model.visual.merger.norm.weight", "vision_tower.merger.norm.weight"),
        ("qwen3_5", "language_model.mtp.fc.weight", "mtp.fc.weight"),
        ("pixtral", "model.vision_encoder.ln_pre.weight", "vision_tower.vision_model.ln_pre.weight"),
        ("pixtral", "model.vision_projection.linear_1.bias", "multi_modal_projector.linear_1.bias"),
        ("lfm2_vl", "vision_tower.vision_model.encoder.layers.0.q.bias", "vision_tower.encoder.layers.0.q.bias"),
        ("lfm2_vl", "embedding_norm.weight", "language_model.model.embedding_norm.weight"),
        ("gemma4", "model.audio_tower.layers.0.norm.weight", "audio_tower.layers.0.norm.weight"),
        ("gemma4", "norm.weight", "language_model.model.norm.weight"),
        ("gemma4", "model.", None),
    ],
)
def test_names_of_parts(family: str, name: str, own: str | None) -> None:
    names = names_of({"model_type": family})
    assert names is not None
    assert names.known(name) == own


def test_layouts_are_known_of_vision_models_alone() -> None:
    assert names_of({"model_type": "llama"}) is None
    assert all(names_of({"model_type": family}) for family in FAMILIES)
    assert set(BY_CLASS) < set(LAYOUTS)


@pytest.mark.parametrize(
    ("later", "older"),
    [
        (
            {"rope_theta": 5e5, "rope_type": "default"},
            {"rope_theta": 5e5, "rotary_emb_base": 5e5, "rope_scaling": None},
        ),
        (
            {"rope_theta": 5e5, "rope_type": "llama3", "factor": 8.0},
            {
                "rope_theta": 5e5,
                "rotary_emb_base": 5e5,
                "rope_scaling": {"rope_theta": 5e5, "rope_type": "llama3", "type": "llama3", "factor": 8.0},
            },
        ),
        (
            {"partial_rotary_factor": 0.5},
            {"partial_rotary_factor": 0.5, "rotary_pct": 0.5, "rope_scaling": None},
        ),
        ({"full_attention": {"rope_theta": 1e6}, "sliding_attention": None}, {}),
        ("default", {}),
    ],
)
def test_rotations_have_their_older_fields(later: Any, older: dict[str, Any]) -> None:
    config = {"model_type": "llama", "rope_parameters": later}
    assert with_older_fields(config) == {**config, **older}


def test_older_fields_that_are_there_stay() -> None:
    config = {"rope_parameters": {"rope_theta": 5e5}, "rope_theta": 1e4, "num_local_experts": 8, "num_experts": None}
    added = {"num_experts": 8, "rotary_emb_base": 5e5, "rope_scaling": None}
    assert with_older_fields(config) == {**config, **added}


def test_heads_of_single_layers_are_those_of_gemma_4_without_a_window() -> None:
    config = {"per_layer_config": {"05": {"head_dim": 512, "num_key_value_heads": 4}, "11": {"head_dim": 512}}}
    assert with_older_fields(config) == {**config, "global_head_dim": 512, "num_global_key_value_heads": 4}
