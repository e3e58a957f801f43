"""Heads for multi-token prediction (MTP) in checkpoints, which mlx-lm drops, as models of one layer.

A head joins the hidden state behind a token with the embedding of the next one, and predicts the token after that by a
decoder layer like the model's own. So it is mlx-lm's model of the family with one layer, whose embedding is replaced by
the joint: quantization, and what mlx-lm changes in weights, are those of the model itself. Embeddings and output head
are shared with the model, also where a checkpoint holds copies.

The layouts are those that vLLM, SGLang and transformers read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..weight_files import stored_tensors
from .draft_head import DraftHead, NoHead
from .fp8 import dequantized
from .hooks import SelectingNorm, Selection, derived, select
from .older_fields import reading_later_fields
from .scaled_rotations import scaling
from .text_types import plain_classes

_JOINT = "joint."
_NORM = "model.norm.weight"
_CONV = "conv1d.weight"
_EXPERT = re.compile(r"(.*\.mlp)\.experts\.(\d+)\.(\w+)\.(\w+)")
_SHARED = re.compile(r"(^|\.)(embed_tokens|lm_head)\.")
_QUANTIZATION = ("group_size", "bits", "mode")


@dataclass(frozen=True)
class MtpFamily:
    """Layout of a family's heads, whose tensors have names with the pattern `prefix` (with the number of the model's
    layers for {layers}). Only the first head of several is used.

    `joint` has the names of the parts of the joint, and `renamed` those of others by what they begin with. `shared`
    tensors are copies of the model's, or of other heads, and not read. With `state_first` the hidden state comes before
    the embedding. `config` makes the one layer like the head's. Where `before_norm` the head takes states in front of
    last norms, the model's and its own, else those behind them.
    """

    prefix: str
    joint: Mapping[str, str]
    renamed: Mapping[str, str]
    config: Mapping[str, Any]
    shared: tuple[str, ...] = ()
    state_first: bool = False
    before_norm: bool = False


_QWEN = MtpFamily(
    prefix=r"(?:.*\.)?mtp\.",
    joint={"pre_fc_norm_embedding": "token_norm", "pre_fc_norm_hidden": "state_norm", "fc": "projection"},
    renamed={"norm.": "model.norm.", "layers.0.": "model.layers.0."},
    config={"num_hidden_layers": 1, "full_attention_interval": 1, "mlp_only_layers": []},
    shared=("embed_tokens.", "lm_head.", *(f"layers.{number}." for number in range(1, 10))),
)
_DEEPSEEK = MtpFamily(
    prefix=r"model\.layers\.{layers}\.",
    joint={"enorm": "token_norm", "hnorm": "state_norm", "eh_proj": "projection"},
    renamed={"shared_head.norm.": "model.norm.", "": "model.layers.0."},
    config={"num_hidden_layers": 1, "first_k_dense_replace": 0},
    shared=("embed_tokens.", "shared_head.head.", "self_attn.rotary_emb."),
)
_MIMO = MtpFamily(
    prefix=r"model\.mtp_layers\.0\.",
    joint={"token_layernorm": "token_norm", "hidden_layernorm": "state_norm", "input_proj": "projection"},
    renamed={"final_layernorm.": "model.norm.", "": "model.layers.0."},
    config={"num_hidden_layers": 1},
    shared=("self_attn.rotary_emb.",),
    state_first=True,
    before_norm=True,
)
FAMILIES: Mapping[str, MtpFamily] = {
    "qwen3_next": _QWEN,
    "qwen3_5": _QWEN,
    "qwen3_5_moe": _QWEN,
    "glm4_moe": _DEEPSEEK,
    "glm4_moe_lite": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "mimo": _MIMO,
}
"""Families by the name of mlx-lm's module."""


class Joint(nn.Module):  # type: ignore[misc]
    """The embedding of a head: of tokens, joined with the hidden states that `selection` has for them; without any,
    with the embeddings themselves, as tests of layers and caches need no others."""

    def __init__(self, size: int, eps: float, *, state_first: bool) -> None:
        super().__init__()
        self.token_norm = nn.RMSNorm(size, eps=eps)
        self.state_norm = nn.RMSNorm(size, eps=eps)
        self.projection = nn.Linear(2 * size, size, bias=False)
        self._state_first = state_first
        self._selection = Selection()

    def share(self, tokens: Any, selection: Selection) -> None:
        """Embed tokens by the model's own module `tokens`."""
        self.tokens = tokens
        self._selection = selection

    def __call__(self, tokens: Any) -> Any:
        embedded, states = self.tokens(tokens), self._selection.fed
        states = embedded if states is None else states.reshape(embedded.shape).astype(embedded.dtype)
        parts = [self.token_norm(embedded), self.state_norm(states)]
        return self.projection(mx.concatenate(parts[::-1] if self._state_first else parts, axis=-1))

    def as_linear(self, states: Any) -> Any:
        """Logits, where the output head is the embedding."""
        return self.tokens.as_linear(states)


def family_of(module: Any) -> MtpFamily | None:
    """Return the layout of heads for mlx-lm's model `module`; None where it is not known."""
    return FAMILIES.get(type(module).__module__.rpartition(".")[2])


def load_head(utils: Any, folder: Path, target: Any, config: Mapping[str, Any]) -> Any:
    """Return the head in `folder` for mlx-lm's model `target`, with its own weights alone, not read yet. `config` is
    the folder's. Raises NoHead, and whatever mlx-lm raises for weights that don't fit."""
    family = family_of(target)
    if family is None:
        raise NoHead("MTP weights of its architecture are not known")
    text: Any = config.get("text_config")
    nested = isinstance(text, Mapping)
    changed: dict[str, Any] = {"text_config": {**text, **family.config}} if nested else {**family.config}
    if isinstance(stored := config.get("quantization"), Mapping):  # entries of single layers are the model's
        changed["quantization"] = {name: value for name, value in stored.items() if name in _QUANTIZATION}
    changed["quantize_activations"] = False
    layers = int((text if nested else config)["num_hidden_layers"])

    def classes(config: dict[str, Any]) -> tuple[type, type]:
        model, arguments = plain_classes(utils, config)
        stored = dequantized(stored_tensors(folder), config)
        return _head_class(scaling(model, config), family, layers, stored), reading_later_fields(arguments)

    module, _ = utils.load_model(
        folder, lazy=True, strict=True, trust_remote_code=False, model_config=changed, get_model_classes=classes
    )
    _inner(module).embed_tokens = nn.Identity()
    if "lm_head" in _text(module):
        _text(module).lm_head = nn.Identity()
    return module


def finish_head(module: Any, target: Any) -> DraftHead:
    """Return the head `module`, which `load_head` made, with the embedding and the output head of `target`. Raises
    NoHead."""
    family, joint, inner = family_of(target), module.joint, _inner(module)
    assert family is not None
    del module.joint
    inner.embed_tokens = joint
    joint.share(_inner(target).embed_tokens, select(module))
    if "lm_head" in _text(module):
        _text(module).lm_head = _text(target).lm_head
    own = (joint.projection, *inner.layers)
    if not family.before_norm:
        return DraftHead(module, own)
    return DraftHead(module, own, _scale(_inner(target).norm), _scale(inner.norm))


def _scale(norm: Any) -> Any:
    """Return what turns states behind `norm` into those in front of it, up to their length, which the joint drops."""
    weight = (norm.norm if isinstance(norm, SelectingNorm) else norm).weight
    if mx.any(weight == 0).item():
        raise NoHead("its MTP head takes states in front of a norm, some of whose weights are zero")
    return 1 / weight


def _head_class(model: Any, family: MtpFamily, layers: int, stored: Mapping[str, Any]) -> Any:
    """Return the class `model` for a head of a model with so many layers, which is found among all `stored` weights."""

    def begin(self: Any, arguments: Any) -> None:
        model.__init__(self, arguments)
        norm = _inner(self).norm
        self.joint = Joint(norm.weight.shape[0], norm.eps, state_first=family.state_first)
        if hasattr(_inner(self), "ssm_idx"):
            _inner(self).ssm_idx = None  # there is no recurrent layer to make a mask for

    def sanitize(self: Any, weights: dict[str, Any]) -> dict[str, Any]:
        found = _found(family, layers, stored)
        return {**_changed(found, stored, partial(model.sanitize, self)), **_placeholders(self)}

    return derived(model, {"__init__": begin, "sanitize": sanitize})


def _found(family: MtpFamily, layers: int, weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors of the head, as those of a model with one layer and a joint."""
    prefix, found = re.compile(family.prefix.replace("{layers}", str(layers))), {}
    for name, value in weights.items():
        if (start := prefix.match(name)) is None:
            continue
        rest = name[start.end() :]
        if not rest.startswith(family.shared):
            found[_renamed(family, rest)] = value
    if not found:
        raise NoHead("its folder holds no MTP weights")
    if _NORM not in found:
        raise NoHead("its MTP weights lack their last norm")
    return found


def _renamed(family: MtpFamily, name: str) -> str:
    part, _, rest = name.partition(".")
    if part in family.joint:
        return f"{_JOINT}{family.joint[part]}.{rest}"
    return next((new + name[len(old) :] for old, new in family.renamed.items() if name.startswith(old)), name)


def _changed(
    found: dict[str, Any], weights: Mapping[str, Any], change: Callable[[dict[str, Any]], Mapping[str, Any]]
) -> dict[str, Any]:
    """Return `found` tensors as mlx-lm's `change` makes those of a model. By the shape of a convolution it tells
    whether a checkpoint has been changed before, and adds one to norms if not."""
    norm, before = found[_NORM], dict(found)
    conv = next((value for name, value in weights.items() if name.endswith(_CONV)), None)
    if conv is not None:
        before[f"model.layers.0.{_CONV}"] = conv
    done = {name: value for name, value in change(before).items() if not name.endswith(_CONV)}
    shifted = not any(value is norm for value in done.values())
    changed = {name: value for name, value in done.items() if _JOINT not in name}
    for name, value in done.items():
        if _JOINT in name:
            own = name[name.index(_JOINT) :]
            changed[own] = value + 1.0 if shifted and "norm." in own else value
    return _stacked(changed)


def _stacked(weights: dict[str, Any]) -> dict[str, Any]:
    """Return `weights` with single experts stacked: those of some heads are, where the model's are joined."""
    rest, experts = dict[str, Any](), dict[str, dict[int, Any]]()
    for name, value in weights.items():
        if found := _EXPERT.fullmatch(name):
            experts.setdefault(f"{found[1]}.switch_mlp.{found[3]}.{found[4]}", {})[int(found[2])] = value
        else:
            rest[name] = value
    return rest | {name: mx.stack([ones[i] for i in sorted(ones)]) for name, ones in experts.items()}


def _placeholders(module: Any) -> dict[str, Any]:
    """Return the embedding and the output head that `module` began with, which are never computed."""
    return {name: value for name, value in tree_flatten(module.parameters()) if _SHARED.search(name)}


def _text(module: Any) -> Any:
    return getattr(module, "language_model", module)


def _inner(module: Any) -> Any:
    return _text(module).model
