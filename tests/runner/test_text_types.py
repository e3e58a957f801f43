"""Language models of vision models that were saved alone, under the model types of their configurations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from tests.support.architectures import config_of, make_folder
from tests.support.mtp_models import make_headed, tensors
from treadle.models import architectures
from treadle.runner.loading.headless import is_headless
from treadle.runner.loading.loader import load
from treadle.runner.mlxlm import connect
from treadle.runner.mlxlm.text_types import TYPES
from treadle.runner.mlxlm.vision_text import _OWN_TYPES

OUTER = {
    "qwen2_vl_text": "qwen2_vl",
    "qwen2_5_vl_text": "qwen2_vl",
    "qwen3_vl_text": "qwen3_vl",
    "qwen3_vl_moe_text": "qwen3_vl_moe",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe_text": "qwen3_5_moe",
    "gemma3n_text": "gemma3n",
}
PROMPT = tuple(range(3, 43))


def save_alone(folder: Path, kind: str, prefix: str) -> Any:
    """Save the language model of a vision model under its own type, and return the logits that it has to give."""
    config = config_of(OUTER[kind])
    weights = tensors(make_folder(folder, config))
    module, _ = connect().load(folder)
    expected = module(mx.array([PROMPT]))
    mx.eval(expected)
    mx.save_safetensors(str(folder / "model.safetensors"), {_named(name, prefix): weights[name] for name in weights})
    (folder / "config.json").write_text(json.dumps({**config["text_config"], "model_type": kind}))
    return expected


def _named(name: str, prefix: str) -> str:
    for outer in ("language_model.model.", "model.language_model."):
        if name.startswith(outer):
            return prefix + name.removeprefix(outer)
    return name.removeprefix("language_model.")


@pytest.mark.parametrize("prefix", ["model.", "model.language_model."])
@pytest.mark.parametrize("kind", OUTER)
def test_a_language_model_alone_gives_what_it_gives_in_its_vision_model(kind: str, prefix: str, tmp_path: Path) -> None:
    expected = save_alone(tmp_path, kind, prefix)
    module, _ = connect().load(tmp_path)
    assert mx.allclose(module(mx.array([PROMPT])), expected, atol=1e-4).item()


@pytest.mark.parametrize("kind", ["qwen3_vl_text", "qwen3_5_text"])
def test_one_without_a_head_is_an_embedding_model(kind: str, tmp_path: Path) -> None:
    """As AutoModel saves it."""
    save_alone(tmp_path, kind, "")
    weights = tensors(tmp_path)
    bare = {name: array for name, array in weights.items() if "lm_head" not in name}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), bare)
    assert is_headless(tmp_path)
    assert load(tmp_path, memory=1 << 26).embedding.only


def test_gemma_4_unified_is_gemma_4(tmp_path: Path) -> None:
    config = config_of("gemma4_text")
    folder = make_folder(tmp_path, config)
    expected, _ = connect().load(folder)
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "gemma4_unified_text"}))
    module, _ = connect().load(folder)
    assert mx.array_equal(module(mx.array([PROMPT])), expected(mx.array([PROMPT]))).item()


def test_a_language_model_alone_has_its_mtp_head(tmp_path: Path) -> None:
    folder = make_headed(tmp_path, "qwen3_5")
    config = json.loads((folder / "config.json").read_text())
    alone = {**config["text_config"], "model_type": "qwen3_5_text"}
    library, heads = connect(), []
    for one in (config, alone):
        (folder / "config.json").write_text(json.dumps(one))
        module, _ = library.load(folder)
        heads.append(library.load_head(folder, module, one).joint.projection.weight)
    assert mx.array_equal(*heads).item()


def test_every_type_that_is_read_under_another_name_is_known_before_a_load() -> None:
    for kind in {*TYPES, *_OWN_TYPES}:
        assert architectures.is_known({"model_type": kind})
        assert kind in architectures.renamed()
