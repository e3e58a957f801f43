"""Tiny EAGLE-3 heads in folders of their own, in the layouts of Speculators and of the original checkpoints, and what
mlx-vlm's module drafts with them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from tests.support.architectures import COMMON

Layout = Literal["speculators", "original"]
Weights = dict[str, Any]
LAYERS = (1, 2, 3)
"""The layers in front of which the heads read states."""
VOCABULARY = 264
SIZE = COMMON["hidden_size"]
_DRAFTED = 100
_HIDDEN = 96
TEXT = {
    **COMMON,
    "vocab_size": VOCABULARY,
    "model_type": "llama",
    "num_hidden_layers": 1,
    "intermediate_size": _HIDDEN,
}


def make_eagle(folder: Path, *, layout: Layout = "speculators", layers: int = 1, seed: int = 0, **changed: Any) -> Path:
    """Write a random head of so many `layers`, and return its folder. Entries of its configuration are `changed`, or
    left out where that is None."""
    folder.mkdir(parents=True, exist_ok=True)
    own = {"draft_vocab_size": _DRAFTED, "norm_before_residual": False, "norm_before_fc": False, **changed}
    text = {**TEXT, "num_hidden_layers": layers}
    if layout == "speculators":
        config: dict[str, Any] = {
            "architectures": ["Eagle3Speculator"],
            "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
            "speculators_model_type": "eagle3",
            "transformer_layer_config": text,
            "eagle_aux_hidden_state_layer_ids": list(LAYERS),
        }
    else:
        config = {**text, "architectures": ["LlamaForCausalLMEagle3"]}
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in LAYERS]}
    config = {name: value for name, value in {**config, **own}.items() if value is not None}
    write_config(folder, config)
    weights = _weights(layers, bool(config["norm_before_fc"]), np.random.default_rng(seed))
    if layout == "original":
        weights = {name.replace("layers.0.", "midlayer."): value for name, value in weights.items()}
        del weights["embed_tokens.weight"]
    write_weights(folder, weights)
    return folder


def _weights(layers: int, norm_before_fc: bool, rng: np.random.Generator) -> Weights:
    """Return random weights as Speculators names them. They are larger than usual; norms differ from one."""

    def product(outputs: int, inputs: int) -> Any:
        return mx.array((rng.uniform(-1, 1, (outputs, inputs)) * 3 * inputs**-0.5).astype(np.float32))

    def norm(size: int = SIZE) -> Any:
        return mx.array(rng.uniform(0.6, 1.4, size).astype(np.float32))

    ids = np.sort(rng.permutation(VOCABULARY)[:_DRAFTED])
    found: Weights = {
        "d2t": mx.array(ids - np.arange(_DRAFTED)),
        "t2d": mx.array(np.isin(np.arange(VOCABULARY), ids)),
        "embed_tokens.weight": mx.zeros((VOCABULARY, SIZE)),
        "fc.weight": product(SIZE, len(LAYERS) * SIZE),
        "norm.weight": norm(),
        "lm_head.weight": product(_DRAFTED, SIZE),
    }
    if norm_before_fc:
        found["input_norm.weight"] = norm(len(LAYERS) * SIZE)
    heads, kv = (COMMON[name] * COMMON["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    for layer in range(layers):
        inputs = SIZE if layer else 2 * SIZE
        parts = {
            **{
                f"self_attn.{name}_proj": product(rows, inputs)
                for name, rows in zip("qkv", (heads, kv, kv), strict=True)
            },
            "self_attn.o_proj": product(SIZE, heads),
            "mlp.gate_proj": product(_HIDDEN, SIZE),
            "mlp.up_proj": product(_HIDDEN, SIZE),
            "mlp.down_proj": product(SIZE, _HIDDEN),
            "input_layernorm": norm(),
            "post_attention_layernorm": norm(),
            **({} if layer else {"hidden_norm": norm()}),
        }
        found |= {f"layers.{layer}.{name}.weight": value for name, value in parts.items()}
    return found


def make_right(folder: Path, output: Any) -> Path:
    """Write a head that knows the next token of a model without layers, whose output head has weights `output` (V, D):
    its attention sees the token's embedding alone, as equal ones are closest, and passes it on. It drafts tokens in
    descending order of their ids."""
    make_eagle(folder, layout="original", num_key_value_heads=4, norm_before_residual=True, draft_vocab_size=VOCABULARY)
    weights, eye = read_weights(folder), mx.eye(SIZE)
    for name in ("fc.weight", "midlayer.mlp.down_proj.weight", "midlayer.hidden_norm.weight"):
        weights[name] = weights[name] * 0
    for name in ("midlayer.input_layernorm.weight", "norm.weight"):
        weights[name] = mx.ones(SIZE)
    for name, scale in (("q", 4), ("k", 4), ("v", 1)):
        weights[f"midlayer.self_attn.{name}_proj.weight"] = mx.concatenate([scale * eye, 0 * eye], axis=1)
    weights["midlayer.self_attn.o_proj.weight"] = eye
    weights["lm_head.weight"] = output[::-1]
    weights["d2t"] = mx.arange(VOCABULARY)[::-1] - mx.arange(VOCABULARY)
    write_weights(folder, weights)
    return folder


def read_config(folder: Path) -> dict[str, Any]:
    """Return the configuration of a head."""
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def write_config(folder: Path, config: dict[str, Any]) -> None:
    """Replace the configuration of a head."""
    (folder / "config.json").write_text(json.dumps(config))


def read_weights(folder: Path) -> Weights:
    """Return the weights of a head, in memory: the file may be written anew."""
    found: Weights = dict(mx.load(str(folder / "model.safetensors")))  # type: ignore[arg-type]
    mx.eval(found)
    return found


def write_weights(folder: Path, weights: Weights) -> None:
    """Replace the weights of a head, without those that are None."""
    kept = {name: value for name, value in weights.items() if value is not None}
    mx.save_safetensors(str(folder / "model.safetensors"), kept)


class EagleReference:
    """mlx-vlm's module with the weights of a random head in `folder`, for a model with `embedding` (V, D)."""

    def __init__(self, folder: Path, embedding: Any) -> None:
        from mlx_vlm.speculative.drafters.eagle3 import Eagle3DraftModel, ModelConfig

        config = read_config(folder)
        text = config.get("transformer_layer_config", config)
        named = {name.replace("midlayer.", "layers.0."): value for name, value in read_weights(folder).items()}
        self._model = Eagle3DraftModel(ModelConfig.from_dict({**config, "transformer_layer_config": text}))
        weights = self._model.sanitize({**named, "embed_tokens.weight": embedding})
        self._model.load_weights(list(weights.items()))

    def drafts(self, states: npt.NDArray[np.float64], tokens: Sequence[int], count: int) -> list[int]:
        """Return `count` greedy tokens behind the last of `tokens` (n + 1): `states` (n, 3 D) are those of the first
        n."""
        model, last = self._model, int(tokens[-1])
        cache = model.reset(None)
        given = mx.array(states.astype(np.float32))[None]
        model.prefill_from_target_hidden(mx.array([list(tokens[:-1])]), given, last, None, greedy=True)
        found: list[int] = model.draft_block(last, given[:, -1:], cache, count + 1, None, greedy=True)[0].tolist()
        return found
