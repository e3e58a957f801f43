"""Quantized weights as other programs publish them: read as what they stand for, or refused before a token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from tests.support.architectures import config_of, make_folder, new_module
from tests.support.fp8_models import by_blocks, by_tensor, write
from tests.support.mtp_models import make_headed, tensors
from treadle.errors import ModelError
from treadle.runner.loading.loader import load
from treadle.runner.mlxlm import connect

Weights = dict[str, Any]
Split = Callable[[Any], tuple[Any, Any]]
BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
TENSORS = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
PROMPT = tuple(range(3, 43))
OTHER_VERSION = "use a version in MLX's layout, such as one of mlx-community, or one that is not quantized"


def in_fp8(weights: Weights, split: Split) -> tuple[Weights, Weights]:
    """The tensors that are published, and what they stand for."""
    published, meant = dict(weights), dict(weights)
    for name, array in weights.items():
        if name.endswith("_proj.weight") and array.ndim == 2:
            stored, scale = split(array)
            published |= {name: stored, f"{name}_scale_inv": scale}
            published[name.removesuffix("weight") + "activation_scale"] = mx.ones(1, mx.bfloat16)
            wide = mx.repeat(mx.repeat(scale, 128, axis=0), 128, axis=1) if scale.ndim == 2 else scale
            wide = wide[: array.shape[0], : array.shape[1]] if scale.ndim == 2 else scale
            meant[name] = (mx.from_fp8(stored, dtype=mx.bfloat16) * wide).astype(mx.bfloat16)
    return published, meant


def logits(module: Any) -> Any:
    module.set_dtype(mx.float32)
    return module(mx.array([PROMPT]))


@pytest.mark.parametrize(
    ("architecture", "split", "stored"),
    [
        ("llama", by_blocks, BLOCKS),
        ("qwen3", by_blocks, BLOCKS),
        ("qwen3_5", by_blocks, BLOCKS),
        ("glm4_moe", by_blocks, BLOCKS),
        ("deepseek_v3", by_blocks, BLOCKS),
        ("ministral3", by_blocks, BLOCKS),
        ("ministral3", by_tensor, TENSORS),
    ],
)
def test_fp8_with_scales_is_what_it_stands_for(
    architecture: str, split: Split, stored: dict[str, Any], tmp_path: Path
) -> None:
    """mlx-lm refuses the scales of most families, and reads the bytes of Ministral 3 as numbers."""
    config = config_of(architecture)
    published, meant = in_fp8(tensors(make_folder(tmp_path / "plain", config)), split)
    write(tmp_path / "fp8", published, {**config, "quantization_config": stored})
    expected = new_module(config)
    expected.load_weights(list(meant.items()))
    module, _ = connect().load(tmp_path / "fp8")
    assert mx.allclose(logits(module), logits(expected), atol=1e-4).item()


def test_an_mtp_head_in_fp8_is_read(tmp_path: Path) -> None:
    folder = make_headed(tmp_path / "plain", "glm4_moe")
    published, meant = in_fp8(tensors(folder), by_blocks)
    config = {**config_of("glm4_moe"), "quantization_config": BLOCKS}
    write(tmp_path / "fp8", published, config)
    library = connect()
    module, _ = library.load(tmp_path / "fp8")
    head = library.load_head(tmp_path / "fp8", module, config)
    name = f"model.layers.{config['num_hidden_layers']}.self_attn.q_proj.weight"
    assert mx.array_equal(head.model.layers[0].self_attn.q_proj.weight, meant[name]).item()


def test_bytes_without_scales_are_refused(tmp_path: Path) -> None:
    """mlx-lm computes with the bytes as numbers."""
    config = config_of("llama")
    published, _ = in_fp8(tensors(make_folder(tmp_path / "plain", config)), by_tensor)
    write(tmp_path / "fp8", {name: array for name, array in published.items() if "scale" not in name}, config)
    with pytest.raises(ModelError, match=r"_proj\.weight is stored as uint8, .* no scales") as error:
        load(tmp_path / "fp8", memory=1 << 25)
    assert OTHER_VERSION in error.value.message


@pytest.mark.parametrize(
    ("stored", "ending", "words"),
    [
        ({"bits": 4}, "bias", '({"bits": 4}): '),
        ({"quant_method": "bitsandbytes"}, "SCB", "(bitsandbytes): the config has no place for 1 parameters"),
        ({"quant_method": "gptq", "bits": 4}, "g_idx", "(gptq): Found model.layers.0.mlp.up_proj.g_idx in weights"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "input_scale", "(modelopt FP8): Unsupported"),
        ({"quant_method": "awq", "bits": 4}, "bias", "(awq): no tensor is packed in that format (if they are plain, "),
        (
            {"quant_method": "compressed-tensors", "format": "float-quantized"},
            "weight_scale",
            "(compressed-tensors float-quantized): unsupported",
        ),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "weight_packed", "weight_packed"),
    ],
)
def test_a_format_of_another_program_is_named_with_the_cure(
    stored: dict[str, Any], ending: str, words: str, tmp_path: Path
) -> None:
    config = config_of("llama")
    weights = {**tensors(make_folder(tmp_path, config)), f"model.layers.0.mlp.up_proj.{ending}": mx.ones(4)}
    write(tmp_path, weights, {**config, "quantization_config": stored})
    with pytest.raises(ModelError) as error:
        load(tmp_path, memory=1 << 25)
    assert "mlx-lm does not read its weights, which another program quantized" in error.value.message
    assert words in error.value.message
    assert "local variable" not in error.value.message
    assert error.value.message.endswith(OTHER_VERSION)
