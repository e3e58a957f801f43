"""EAGLE-3 heads (Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time
Test", 2025) as models of one layer, or a few.

A head reads hidden states in front of some layers of the model, side by side, and the next token. A product makes them
as wide as an embedding. The first layer attends to both, its norm of each, and further layers are plain ones. The
output head is the head's own, for fewer tokens. What it feeds to itself is its last state in front of its norm.

So it is mlx-lm's Llama with another embedding, which gives both parts side by side, and another first layer. Layouts
of checkpoints are those that vLLM, SGLang and mlx-vlm read: Speculators' (`transformer_layer_config`, `layers.0`), and
the original one (`midlayer`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..weight_files import stored_tensors
from .draft_head import DraftHead, NoHead
from .hooks import Selection, derived, select
from .injection import embedding_of, text_model

_JOINT = "joint."
_RENAMED = {
    "midlayer.": "model.layers.0.",
    "layers.": "model.layers.",
    "norm.": "model.norm.",
    "fc.": f"{_JOINT}fc.",
    "input_norm.": f"{_JOINT}input_norm.",
    "embed_tokens.": f"{_JOINT}tokens.",
}
_LAYERS = "eagle_aux_hidden_state_layer_ids"
_COUNTS = ("hidden_size", "vocab_size", "num_attention_heads", "intermediate_size")
_UNREAD = ("t2d", "d2t", "verifier_")
_IDS, _EMBEDDING, _OUTPUT = "d2t", "embed_tokens.weight", "lm_head.weight"
_UNKNOWN = ("norm_output", "fc_norm")
"""Settings of other kinds of heads."""


@dataclass(frozen=True)
class EagleShape:
    """What a head is made for: a model with hidden states of `states` numbers and `vocabulary` tokens. It reads those
    in front of `layers`, by index, in ascending order. With `shares_embedding` it has none of its own."""

    states: int
    vocabulary: int
    layers: tuple[int, ...]
    shares_embedding: bool


class Joint(nn.Module):  # type: ignore[misc]
    """The embedding of a head: of tokens, beside the hidden states that `selection` has for them, which a product has
    made as wide unless they are the head's own; without any, beside the embeddings themselves, as tests of layers and
    caches need no others."""

    def __init__(self, states: int, config: Mapping[str, Any], *, own_tokens: bool) -> None:
        super().__init__()
        size = config["hidden_size"]
        if own_tokens:
            self.tokens = nn.Embedding(config["target_vocabulary"], size)
        if config.get("norm_before_fc"):
            self.input_norm = nn.RMSNorm(states, eps=config["rms_norm_eps"])
        self.fc = nn.Linear(states, size, bias=bool(config.get("bias")))
        self._states = states
        self._selection = Selection()

    def share(self, tokens: Any | None, selection: Selection) -> None:
        """Embed tokens by the model's own module `tokens`, if it is not None."""
        if tokens is not None:
            self.tokens = tokens
        self._selection = selection

    def __call__(self, tokens: Any) -> Any:
        embedded, states = self.tokens(tokens), self._selection.fed
        states = embedded if states is None else self._widened(states.astype(embedded.dtype)).reshape(embedded.shape)
        return mx.concatenate([embedded, states], axis=-1)

    def _widened(self, states: Any) -> Any:
        if states.shape[-1] != self._states:
            return states
        return self.fc(self.input_norm(states) if "input_norm" in self else states)

    def as_linear(self, states: Any) -> Any:
        """Logits, where the output head is the embedding."""
        return self.tokens.as_linear(states)


class FirstLayer(nn.Module):  # type: ignore[misc]
    """The first layer of a head, made of mlx-lm's `layer`, for an embedding and a hidden state (..., 2 D) side by side.
    The residual stream is the state, or `norm_before_residual`."""

    def __init__(self, layer: Any, size: int, eps: float, *, norm_before_residual: bool) -> None:
        super().__init__()
        self.use_sliding = layer.use_sliding
        self.input_layernorm = layer.input_layernorm
        self.hidden_norm = nn.RMSNorm(size, eps=eps)
        self.self_attn = layer.self_attn
        self.post_attention_layernorm = layer.post_attention_layernorm
        self.mlp = layer.mlp
        for name in ("q_proj", "k_proj", "v_proj"):
            product = getattr(self.self_attn, name)
            setattr(self.self_attn, name, nn.Linear(2 * size, product.weight.shape[0], bias="bias" in product))
        self._norm_before_residual = norm_before_residual

    def __call__(self, x: Any, mask: Any | None = None, cache: Any | None = None) -> Any:
        embedded, states = mx.split(x, 2, axis=-1)
        normed = self.hidden_norm(states)
        residual = normed if self._norm_before_residual else states
        joined = mx.concatenate([self.input_layernorm(embedded), normed], axis=-1)
        x = residual + self.self_attn(joined, mask, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


def eagle_shape(config: Mapping[str, Any], layers: int) -> EagleShape:
    """Return what the head of `config` is made for, if its model has so many layers. Raises NoHead."""
    text = _text(config)
    for name in _COUNTS:
        if not isinstance(count := text.get(name), int) or count < 1:
            raise NoHead(f"its config.json has no {name}")
    size = config.get("target_hidden_size") or text["hidden_size"]
    if not isinstance(size, int):
        raise NoHead("its target_hidden_size is no number")
    shares = size == text["hidden_size"] and not config.get("embed_requires_grad")
    read = _layers(config, layers)
    if size * len(read) == text["hidden_size"]:
        raise NoHead(f"it reads states of {len(read)} layers, which are as wide as its own")
    return EagleShape(size, text["vocab_size"], read, shares)


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of `config` that describes layers."""
    text = config.get("transformer_layer_config")
    return text if isinstance(text, Mapping) else config


def _layers(config: Mapping[str, Any], count: int) -> tuple[int, ...]:
    """Return the layers in front of which a head reads states. Ids of Speculators, vLLM and mlx-vlm name these; those
    in SGLang's `eagle_config` name the layers behind which it reads."""
    nested = config.get("eagle_config")
    nested = nested if isinstance(nested, Mapping) else {}
    if nested.get("use_aux_hidden_state") is False:
        raise NoHead("it reads no states of layers in the middle, as EAGLE-3 heads do")
    found: Sequence[Any] = (2, count // 2, count - 3)
    if ids := _numbers(config):
        found = ids
    elif ids := _numbers(nested):
        found = [one + 1 for one in ids]
    wrong = next((one for one in found if not 0 <= one < count), None)
    if wrong is not None:
        raise NoHead(f"it reads states in front of layer {wrong}, and the model has layers 0 to {count - 1}")
    if len(set(found)) < len(found):
        raise NoHead(f"it reads states in front of layers {', '.join(map(str, found))}, which are not all different")
    return tuple(sorted(found))


def _numbers(config: Mapping[str, Any]) -> Sequence[int]:
    """Return the ids of layers in `config`; empty where it has none. Raises NoHead."""
    found = config.get(_LAYERS) or ()
    if not isinstance(found, (list, tuple)) or not all(isinstance(one, int) for one in found):
        raise NoHead(f"its {_LAYERS} is no list of numbers")
    return found


def load_eagle(utils: Any, folder: Path, config: Mapping[str, Any], shape: EagleShape) -> tuple[Any, Any | None]:
    """Return the head in `folder`, with its own weights alone, not read yet, and the model's ids of the tokens that it
    drafts (None: all). Raises NoHead, and whatever mlx-lm raises for weights that don't fit."""
    weights = {name.removeprefix("model."): value for name, value in stored_tensors(folder).items()}
    settings = _settings(config, weights, shape)

    def classes(config: dict[str, Any]) -> tuple[type, type]:
        model, arguments = utils._get_classes(config)
        return _head_class(model, settings, shape, set(weights)), arguments

    module, _ = utils.load_model(
        folder, lazy=True, strict=True, trust_remote_code=False, model_config=settings, get_model_classes=classes
    )
    return module, _ids(weights.get(_IDS), settings["vocab_size"], shape.vocabulary)


def _settings(config: Mapping[str, Any], weights: Mapping[str, Any], shape: EagleShape) -> dict[str, Any]:
    """Return the configuration of the head as mlx-lm's Llama, with the head's own."""
    text = _text(config)
    if (activation := text.get("hidden_act", "silu")) != "silu":
        raise NoHead(f"its activation function is {activation}, and only silu is known")
    if unknown := next((name for name in _UNKNOWN if config.get(name)), None):
        raise NoHead(f"its config.json has {unknown}, which is not known")
    ids, output = weights.get(_IDS), weights.get(_OUTPUT)
    if ids is not None and output is None:
        raise NoHead(f"its weights lack {_OUTPUT}")
    rows = shape.vocabulary if output is None else output.shape[0]
    if ids is None and rows != shape.vocabulary:
        raise NoHead(f"it drafts {rows} of the model's tokens, and its weights lack {_IDS}, which names them")
    if ids is not None and ids.shape != (rows,):
        raise NoHead(f"its {_IDS} has shape {ids.shape}, and its output head is for {rows} tokens")
    layers = int(text.get("num_hidden_layers") or 1)
    types = text.get("layer_types")
    return {
        **text,
        **_rotation(text),
        "model_type": "llama",
        "num_hidden_layers": layers,
        "layer_types": types if isinstance(types, list) and len(types) == layers else None,
        "vocab_size": rows,
        "target_vocabulary": shape.vocabulary,
        "tie_word_embeddings": output is None and bool(text.get("tie_word_embeddings")),
        "rms_norm_eps": text.get("rms_norm_eps", 1e-6),
        "norm_before_fc": config.get("norm_before_fc"),
        "norm_before_residual": bool(config.get("norm_before_residual")),
    }


def _rotation(text: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of rotary positions by the names that mlx-lm's Llama reads."""
    given = text.get("rope_parameters")
    if not isinstance(given, Mapping):
        return {}
    scaled = given.get("rope_type", "default") != "default"
    base = given.get("rope_theta", text.get("rope_theta", 10000.0))
    return {"rope_theta": base, "rope_scaling": dict(given) if scaled else None}


def _ids(offsets: Any | None, count: int, vocabulary: int) -> Any | None:
    """Return the model's ids of the tokens that a head drafts. Raises NoHead where the model lacks one."""
    if offsets is None:
        return None
    ids = mx.arange(count, dtype=mx.int32) + offsets.astype(mx.int32)
    least, most = mx.min(ids).item(), mx.max(ids).item()
    if least < 0 or most >= vocabulary:  # type: ignore[operator]
        wrong = least if least < 0 else most  # type: ignore[operator]
        raise NoHead(f"it drafts token {wrong}, and the model has {vocabulary} tokens")
    return ids


def _head_class(model: Any, settings: Mapping[str, Any], shape: EagleShape, names: set[str]) -> Any:
    """Return the class `model` for a head with weights of these `names`."""
    own_tokens = not shape.shares_embedding
    if own_tokens and _EMBEDDING not in names:
        raise NoHead(f"its weights lack {_EMBEDDING}, and it can't share the model's")

    def begin(self: Any, arguments: Any) -> None:
        model.__init__(self, arguments)
        self.model.embed_tokens = nn.Identity()
        if _OUTPUT not in names and not arguments.tie_word_embeddings:
            self.lm_head = nn.Identity()
        self.joint = Joint(shape.states * len(shape.layers), settings, own_tokens=own_tokens)
        eps, before = arguments.rms_norm_eps, settings["norm_before_residual"]
        layers = self.model.layers
        layers[0] = FirstLayer(layers[0], arguments.hidden_size, eps, norm_before_residual=before)

    def sanitize(self: Any, weights: dict[str, Any]) -> dict[str, Any]:
        skipped = _UNREAD if own_tokens else (*_UNREAD, "embed_tokens.")
        bare = {name.removeprefix("model."): value for name, value in weights.items() if "rotary_emb." not in name}
        return {_renamed(name): value for name, value in bare.items() if not name.startswith(skipped)}

    return derived(model, {"__init__": begin, "sanitize": sanitize})


def _renamed(name: str) -> str:
    return next((new + name[len(old) :] for old, new in _RENAMED.items() if name.startswith(old)), name)


def finish_eagle(module: Any, target: Any, ids: Any | None) -> DraftHead:
    """Return the head `module`, which `load_eagle` made, with what it shares with the model `target`. Raises
    NoHead."""
    joint, text, tokens = module.joint, text_model(target), embedding_of(target)
    if "tokens" not in joint and tokens is None:
        raise NoHead(f"its weights lack {_EMBEDDING}, and the model's embedding is not known")
    own = [joint.fc, *module.model.layers]
    del module.joint
    module.model.embed_tokens = joint
    selection = select(module)
    assert selection is not None, "the last norm of mlx-lm's Llama is known"
    selection.before_norm = True
    joint.share(None if "tokens" in joint else tokens, selection)
    if type(module.get("lm_head")) is not nn.Identity:
        own += [module.lm_head] if "lm_head" in module else []
    elif "lm_head" in text:
        module.lm_head = text.lm_head
    else:
        module.args.tie_word_embeddings = True
    return DraftHead(module, tuple(own), ids=ids)
