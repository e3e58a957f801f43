"""Scaled rotary positions (RoPE) that a configuration asks for and mlx-lm's class of the model does not read, or not as
a whole.

Positions beyond the length that a model was trained for need other frequencies: YaRN (Peng et al., 2023), those of
Llama 3.1, LongRoPE (Ding et al., 2024), or positions divided by a factor. A class that does not know the field turns by
plain ones without a word, or refuses them. transformers and vLLM scale those of every architecture.

YaRN and LongRoPE also multiply the rotated dimensions by a factor. mlx-lm computes it, also where `attention_factor`
gives another one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.nn as nn

from .axes import replace_parts, rotations_of
from .hooks import derived
from .older_fields import reading, with_older_fields

_KINDS = ("linear", "llama3", "yarn", "longrope")
_LENGTH = "max_position_embeddings"
_TRAINED = "original_max_position_embeddings"
_LOCAL = "rope_local_base_freq"
_FACTOR = "attention_factor"
_WITH_FACTOR = ("yarn", "longrope", "su")
_FACTORS = {"YarnRoPE": "mscale", "DeepseekV2YarnRotaryEmbedding": "mscale", "SuScaledRoPE": "_scale"}
"""Where mlx-lm's classes of such rotations have the factor."""
_ALPHA = "DynamicNTKAlphaRoPE"
_HUNYUAN = "hunyuan_v1_dense"
_BASE = 10000.0
_READ: Mapping[str, Sequence[str]] = {
    "qwen2_moe": (),
    "nemotron": (),
    "internlm2": ("linear", "dynamic"),
    "internlm3": ("linear", "dynamic"),
    "phi3": ("longrope", "su"),
    _HUNYUAN: ("dynamic",),
}
"""Kinds that a class computes, by mlx-lm's module, of those that refuse others: Nemotron's takes linear ones whose
factor is written with a fraction."""


def scaling(model: Any, config: Mapping[str, Any]) -> Any:
    """Return the class `model`, whose rotations are scaled as `config` says where it leaves all of them plain. Where
    windows have rotations of their own, it is not known which are to be scaled. A factor that `config` gives counts in
    every class."""
    text = _text(config)
    wanted = _wanted(text)
    if wanted is None and not _has_factor(text):
        return model
    applied = None if wanted is None or wanted["type"] not in _KINDS or _LOCAL in text else wanted

    def begin(self: Any, *args: Any) -> None:
        with _factors_read():
            model.__init__(self, *args)
        if wanted is not None:
            _adapt(self, text, wanted)
        plain = _plain(self)
        if applied is not None and _fit(plain, applied["type"]):
            _scale(self, plain, applied)

    return derived(model, {"__init__": begin})


def leaving(arguments: Any) -> Any:
    """Return the class of a model's `arguments`, without the kinds of scaled rotations that it would refuse: `scaling`
    applies them, and those that it does not know are told."""
    read = _READ.get(arguments.__module__.rpartition(".")[2])
    if read is None:
        return arguments

    def changed(params: dict[str, Any]) -> dict[str, Any]:
        found = params.get("rope_scaling")
        kind = found.get("type") or found.get("rope_type") if isinstance(found, Mapping) else None
        return params if kind is None or kind in read else {**params, "rope_scaling": None}

    return reading(arguments, changed)


def ignored(model: Any, config: Mapping[str, Any]) -> str:
    """Return the kind of scaled rotations that `config` asks for where those of `model` are plain; else nothing."""
    wanted = _wanted(_text(config))
    return str(wanted["type"]) if wanted is not None and _plain(model) else ""


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the configuration of the language model, by the older names."""
    made = with_older_fields(config)
    text = made.get("text_config")
    return text if isinstance(text, Mapping) else made


def _wanted(text: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return how rotations are to be scaled, with the length before it; None where they are plain, or those of axes."""
    found = text.get("rope_scaling")
    if not isinstance(found, Mapping) or "mrope_section" in found:
        return None
    kind = _kind(found)
    if kind in ("default", "mrope") or (kind == "linear" and found.get("factor") == 1):
        return None
    lengths = {_LENGTH: text[_LENGTH], _TRAINED: text.get(_TRAINED) or text[_LENGTH]} if _LENGTH in text else {}
    return {**lengths, **found, "type": kind}


def _kind(scaling: Mapping[str, Any]) -> Any:
    return scaling.get("type") or scaling.get("rope_type") or "default"


def _has_factor(text: Mapping[str, Any]) -> bool:
    """Whether a configuration gives a factor, for all layers or for a kind of layers."""
    given = [text.get(name) for name in ("rope_scaling", "rope_parameters")]
    found = [one for one in given if isinstance(one, Mapping)]
    return any(isinstance(part, Mapping) and _FACTOR in part for one in found for part in (one, *one.values()))


@contextmanager
def _factors_read() -> Iterator[None]:
    """Let mlx-lm's models read the factor of the rotations that they make inside the block."""
    from mlx_lm.models import rope_utils  # which `connect` has imported, and checked

    own = rope_utils.initialize_rope

    def initialize(
        dims: Any,
        base: Any,
        traditional: Any,
        scaling_config: Any | None = None,
        max_position_embeddings: Any | None = None,
    ) -> Any:
        made = own(dims, base, traditional, scaling_config, max_position_embeddings)
        return _give_factor(made, scaling_config or {})

    loaded = [one for name, one in sys.modules.items() if name.startswith("mlx_lm.models.")]
    changed = [one for one in loaded if getattr(one, "initialize_rope", None) is own]
    for module in changed:
        module.initialize_rope = initialize  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module in changed:
            module.initialize_rope = own  # type: ignore[attr-defined]


def _give_factor(rotation: Any, scaling: Mapping[str, Any]) -> Any:
    """Return `rotation`, with the factor that its `scaling` gives. PhiMoE's own field counts before it."""
    name, factor = _FACTORS.get(type(rotation).__name__), scaling.get(_FACTOR)
    if name is not None and factor is not None and _kind(scaling) in _WITH_FACTOR and not scaling.get("long_mscale"):
        setattr(rotation, name, factor)
    return rotation


def _adapt(model: Any, text: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Give rotations that classes of `model` make themselves the factor that is `wanted`, and make those of HunYuan
    plain ones where it was not to scale them."""

    def adapted(one: Any) -> Any:
        if type(one).__name__ == _ALPHA and wanted["type"] not in _READ[_HUNYUAN]:
            return nn.RoPE(one.dims, traditional=False, base=text.get("rope_theta", _BASE))
        if type(one).__name__ == "YarnRoPE":  # which `initialize_rope` has made, by the kind of the layer
            return one
        return _give_factor(one, wanted)

    replace_parts(model, adapted)


def _plain(model: Any) -> list[Any]:
    """Return the rotations of `model` if all are plain; else none."""
    found = rotations_of(model)
    return found if all(type(one) is nn.RoPE and one.scale == 1.0 for one in found) else []


def _fit(rotations: Sequence[Any], kind: str) -> bool:
    """Whether all are of one kind. mlx-lm's LongRoPE turns pairs that are half of the dimensions apart alone."""
    return len({one.base for one in rotations}) == 1 and not (kind == "longrope" and rotations[0].traditional)


def _scale(model: Any, rotations: Sequence[Any], wanted: dict[str, Any]) -> None:
    from mlx_lm.models.rope_utils import initialize_rope  # which `connect` has imported, and checked

    plain = {id(one) for one in rotations}

    def scaled(one: Any) -> Any:
        if id(one) not in plain:
            return one
        made = initialize_rope(one.dims, one.base, one.traditional, wanted, wanted.get(_LENGTH))
        return _give_factor(made, wanted)

    replace_parts(model, scaled)
