"""Tiny models with an MTP head in their folder, as published: raw tensors, which mlx-lm changes at load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from tests.support.architectures import ARCHITECTURES
from treadle.runner.mlxlm import connect

FAMILIES = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "glm4_moe", "glm4_moe_lite", "deepseek_v3", "mimo")
Weights = dict[str, Any]
_CONFIGS = {**ARCHITECTURES, "deepseek_v3": {**ARCHITECTURES["deepseek_v3"], "num_hidden_layers": 61}}
"""mlx-lm drops layer 61 of DeepSeek's models, whatever the number of their layers."""


def head_prefix(family: str) -> str:
    """What the names of the head's tensors begin with."""
    if family.startswith("qwen"):
        return "mtp."
    return "model.mtp_layers.0." if family == "mimo" else f"model.layers.{text_config(family)['num_hidden_layers']}."


def make_headed(folder: Path, family: str, *, seed: int = 0, **changed: Any) -> Path:
    """Write a model of `family` with a head, and return its folder. Random weights are larger than usual; norms differ
    from one. Tensors that are `changed` by name, without the prefix, are replaced, or left out where that is None."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"model_type": family, **_CONFIGS[family]}
    head = head_tensors(family, seed)
    for name, value in changed.items():
        head.pop(name, None)
        head |= {} if value is None else {name: value}
    named = {head_prefix(family) + name: value for name, value in head.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), {**_raw(random_tensors(config, seed), family), **named})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def head_tensors(family: str, seed: int = 0) -> Weights:
    """Return a head's tensors, as published, without the prefix of their names."""
    config = {"model_type": family, **_CONFIGS[family]}
    one = {"num_hidden_layers": 1, "full_attention_interval": 1, "first_k_dense_replace": 0, "mlp_only_layers": []}
    text = {**config["text_config"], **one} if "text_config" in config else None
    layer = _raw(
        random_tensors({**config, **one} if text is None else {**config, "text_config": text}, seed + 1), family
    )
    size, rng = text_config(family)["hidden_size"], np.random.default_rng(seed)
    one_less = family.startswith("qwen")
    parts = {
        name.partition("layers.0.")[2]: _varied(name, value, rng, one_less)
        for name, value in layer.items()
        if "layers.0." in name
    }
    norms = [_varied("norm", mx.ones(size), rng, one_less) for _ in range(3)]
    joint = _array(rng.uniform(-1, 1, (size, 2 * size)) * 3 * (2 * size) ** -0.5)
    if family.startswith("qwen"):
        names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "fc", "layers.0.")
    elif family == "mimo":
        names = ("token_layernorm", "hidden_layernorm", "final_layernorm", "input_proj", "")
    else:
        names = ("enorm", "hnorm", "shared_head.norm", "eh_proj", "")
    own = {f"{name}.weight": value for name, value in zip(names, [*norms, joint], strict=False)}
    return {**own, **{names[4] + name: value for name, value in parts.items()}}


def _varied(name: str, value: Any, rng: np.random.Generator, one_less: bool) -> Any:
    """Return a tensor of a new model with random values where they are all the same."""
    if "norm" in name:
        return _array(rng.uniform(0.6, 1.4, value.shape) - one_less)
    is_zero = not mx.any(value != 0).item()
    return _array(rng.uniform(-0.3, 0.3, value.shape)) if is_zero else value


def tensors(folder: Path) -> Weights:
    """Return the tensors in a model's folder, in memory: the file may be written anew."""
    found: Weights = dict(mx.load(str(folder / "model.safetensors")))  # type: ignore[arg-type]
    mx.eval(found)
    return found


def write_tensors(folder: Path, changed: Weights) -> None:
    """Replace tensors in a model's folder, or remove those that are None."""
    found = {**tensors(folder), **changed}
    kept = {name: value for name, value in found.items() if value is not None}
    mx.save_safetensors(str(folder / "model.safetensors"), kept)


ADDED = ("o_proj.weight", "down_proj.weight")
"""Ends of names of the tensors through which a layer adds anything."""


def aligned(size: int) -> Weights:
    """Return tensors of a DeepSeek-like head that passes the next token's embedding on."""
    norms = dict.fromkeys(("enorm.weight", "shared_head.norm.weight"), mx.ones(size))
    return {**norms, "eh_proj.weight": mx.eye(size, 2 * size)}


def text_config(family: str) -> dict[str, Any]:
    """The configuration of a family's language model."""
    config: dict[str, Any] = _CONFIGS[family]
    return config.get("text_config", config)


def _array(values: Any) -> Any:
    return mx.array(np.asarray(values, np.float32))


def random_tensors(config: dict[str, Any], seed: int) -> Weights:
    """Return the tensors of a random model, as mlx-lm names them."""
    connect()
    from mlx.utils import tree_flatten
    from mlx_lm.utils import _get_classes

    model_class, arguments = _get_classes(config)
    mx.random.seed(seed)
    model = model_class(arguments.from_dict(config))
    return {name: value * 3 if value.ndim == 2 else value for name, value in tree_flatten(model.parameters())}


def _raw(weights: Weights, family: str) -> Weights:
    """Return the tensors as they are published: of Qwen's models with experts by themselves or joined, convolutions in
    PyTorch's order, and norms less one."""
    raw: Weights = {}
    for name, value in weights.items():
        if family.startswith("qwen"):
            name = name.removeprefix("language_model.")
            if "conv1d" in name:
                value = value.moveaxis(2, 1)
            elif value.ndim == 1 and "norm" in name and "linear_attn" not in name:
                value = value - 1
        raw |= _experts(name, value, joined=family == "qwen3_5_moe" and "mtp" not in name)
    return _joined(raw) if family == "qwen3_5_moe" else _latent(raw, family)


def _experts(name: str, value: Any, *, joined: bool) -> Weights:
    """Return the tensors of single experts out of stacked ones."""
    if "switch_mlp." not in name or joined:
        return {name: value}
    before, part = name.split("switch_mlp.")
    return {f"{before}experts.{i}.{part}": value[i] for i in range(value.shape[0])}


def _joined(weights: Weights) -> Weights:
    """Return gate and up projections of experts as one tensor, as Qwen 3.5 has them."""
    joined = {name: value for name, value in weights.items() if "switch_mlp." not in name}
    for name, value in weights.items():
        if name.endswith("switch_mlp.gate_proj.weight"):
            before = name.removesuffix("switch_mlp.gate_proj.weight")
            up = weights[f"{before}switch_mlp.up_proj.weight"]
            joined[f"{before}experts.gate_up_proj"] = mx.concatenate([value, up], axis=1)
            joined[f"{before}experts.down_proj"] = weights[f"{before}switch_mlp.down_proj.weight"]
    return joined


def _latent(weights: Weights, family: str) -> Weights:
    """Return the two halves of a latent's product as one tensor, as DeepSeek has them."""
    raw = {name: value for name, value in weights.items() if "embed_q." not in name and "unembed_out." not in name}
    for name, value in weights.items():
        if name.endswith("embed_q.weight"):
            before = name.removesuffix("embed_q.weight")
            halves = [value.swapaxes(-1, -2), weights[f"{before}unembed_out.weight"]]
            both = mx.concatenate(halves, axis=1)
            raw[f"{before}kv_b_proj.weight"] = both.reshape(-1, both.shape[-1])
    return raw
