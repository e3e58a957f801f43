"""Values of a config.json that no model can have, or that do not fit: the likely causes of a load that failed."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

_COUNTS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_OPTIONAL_COUNTS = ("num_key_value_heads", "intermediate_size", "head_dim", "max_position_embeddings")
_SCALINGS = ("rope_scaling", "rope_parameters")
_OF_SCALINGS = (
    *("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"),
    *("low_freq_factor", "high_freq_factor"),
)
_TRUE = {"gating": "per-head"}
"""Text that a field which is true or false may have for true, as Laguna's does."""
_TURNED = "partial_rotary_factor"
_OBJECTS = ("quantization", "quantization_config", *_SCALINGS)
_LARGEST = 2**31 - 1  # of a dimension in MLX
_MOST = {int: _LARGEST, float: float("inf")}
_SHOWN = 40
_LARGEST_INT = 2**63 - 1  # of a number in MLX
_SIZES = re.compile(r"size|dim|rank|experts|width|heads|state|channels|embd|group|conv|kernel|window")
"""Parts of names of fields that are sizes of weights."""
_NEVER_ZERO = re.compile(r"head_dim|state|kernel|d_conv")
"""Parts of names of fields that no model has as 0."""


def read_config(folder: Path) -> Mapping[str, Any]:
    """The folder's config.json; empty where there is none that is an object."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, Mapping) else {}


def oddities(folder: Path) -> list[str]:
    """Each odd value of the folder's config.json, as `name is value`; empty where there is none or no such file."""
    return [line for part in _parts(read_config(folder)) for line in _odd(part)]


def mistyped(config: Mapping[str, Any], types: Mapping[str, Any]) -> list[str]:
    """Each value that does not have the type that the architecture's code gives its field, by `types`, as `name is
    value`. What is null counts as not given where the field has a default."""
    found: dict[str, Any] = {}
    for part in _parts(config):
        given = {name: part[name] for name in part.keys() & types.keys() if not _is_true(name, part[name])}
        found |= {name: value for name, value in given.items() if not _fits(value, types[name])}
    return [f"{name} is {_short(value)}" for name, value in sorted(found.items())]


def no_flags(config: Mapping[str, Any], types: Mapping[str, Any]) -> list[str]:
    """Values of fields that are true or false to the architecture's code, by `types`, and are neither, nor 1 or 0, as
    `name is value`: the code takes any text, and any list with entries, for true."""
    names = {name for name, type_ in types.items() if bool in _kinds(type_) and {*_kinds(type_)} <= {bool, NoneType}}
    found = {name: part[name] for part in _parts(config) for name in part.keys() & names}
    odd = {name: one for name, one in found.items() if one not in (True, False, None) and not _is_true(name, one)}
    return [f"{name} is {_short(value)}" for name, value in sorted(odd.items())]


def _is_true(name: str, value: Any) -> bool:
    return isinstance(value, str) and _TRUE.get(name) == value


def _kinds(type_: Any) -> tuple[Any, ...]:
    return get_args(type_) if get_origin(type_) in (Union, UnionType) else (type_,)


def doubtful(config: Mapping[str, Any], types: Mapping[str, Any]) -> list[str]:
    """Values that hardly any model has, as `name is value`, by the `types` of the architecture's fields: the likely
    causes where a field that has none of its own is read by code that fails, or gives weights another shape."""
    found = {
        name: part[name] for part in _parts(config) for name in part if _is_doubtful(name, part[name], types.get(name))
    }
    return [f"{name} is {_short(value)}" for name, value in sorted(found.items())]


def _is_doubtful(name: str, value: Any, type_: Any) -> bool:
    kinds = _kinds(type_)
    if isinstance(value, str):
        return str in kinds and not {int, float}.isdisjoint(kinds) and value != "auto"
    if not isinstance(value, (int, float)) or isinstance(value, bool) or {int, float}.isdisjoint(kinds):
        return False
    if not math.isfinite(value) or abs(value) > _LARGEST_INT:
        return True
    if float in kinds or "token" in name:  # some give -1 or -200 as the id of a token that stands for others
        return False
    if value < 0 or value != int(value) or (isinstance(value, float) and _SIZES.search(name)):
        return True
    return value == 0 and bool(_NEVER_ZERO.search(name))


def too_large(config: Mapping[str, Any]) -> list[str]:
    """Whole numbers that MLX does not have, as `name is value`."""
    return _where(config, lambda value: _is_int(value) and abs(value) > _LARGEST_INT)


def not_finite(config: Mapping[str, Any]) -> list[str]:
    """Numbers that are NaN or infinite, as `name is value`."""
    return _where(config, lambda value: isinstance(value, float) and not math.isfinite(value))


def not_given(config: Mapping[str, Any], types: Mapping[str, Any]) -> list[str]:
    """Fields that every model gives, that the architecture's code has a default for, and that are not there."""
    parts = _parts(config)
    return [f"{name} is missing" for name in _COUNTS if name in types and not any(name in part for part in parts)]


def lacking_scaling(config: Mapping[str, Any], name: str) -> list[str]:
    """The settings of scaled positions without the field `name`, as `place.name is missing`."""
    scalings = [(place, own) for part in _parts(config) for place, own in _scalings(part)]
    kinds = [(place, own) for place, own in scalings if own.get("rope_type", own.get("type", "default")) != "default"]
    return [f"{place}.{name} is missing" for place, own in kinds if name not in own]


def contradictions(config: Mapping[str, Any]) -> list[str]:
    """Values that do not fit each other."""
    return [line for part in _parts(config) for line in _multiples(part)]


def foreign_format(config: Mapping[str, Any]) -> str:
    """The format of another program that the weights are quantized in, in words; empty where there is none."""
    stored = next((part["quantization_config"] for part in _parts(config) if part.get("quantization_config")), None)
    if "quantization" in config or not isinstance(stored, Mapping):
        return ""
    names = [stored[name] for name in ("quant_method", "format", "quant_algo") if isinstance(stored.get(name), str)]
    return " ".join(names) or _short(stored)


def _multiples(config: Mapping[str, Any]) -> list[str]:
    hidden, heads, kv = (config.get(name) for name in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    experts, groups = config.get("n_routed_experts"), config.get("n_group")
    found = []
    if _is_int(experts) and _is_int(groups) and groups and experts % groups:
        found.append(f"n_routed_experts is {experts}, not a multiple of n_group, {groups}")
    if _is_int(heads) and _is_int(kv) and kv and heads % kv:
        found.append(f"num_attention_heads is {heads}, not a multiple of num_key_value_heads, {kv}")
    if _is_int(hidden) and _is_int(heads) and heads and hidden % heads and config.get("head_dim") is None:
        found.append(f"hidden_size is {hidden}, not a multiple of num_attention_heads, {heads}")
    return found


def zeros(config: Mapping[str, Any]) -> list[str]:
    """Fields that are zero."""
    return _where(config, lambda value: _is_int(value) and value == 0)


def empty_sizes(config: Mapping[str, Any], shape: Sequence[int]) -> list[str]:
    """Fields that are zero and are sizes of weights, as `name is value`, where a weight's `shape` has a zero."""
    return [line for line in zeros(config) if _SIZES.search(line)] if 0 in shape else []


def _where(config: Mapping[str, Any], holds: Callable[[Any], bool]) -> list[str]:
    """Fields of the config and its language model whose value `holds`, as `name is value`."""
    return [f"{name} is {_short(value)}" for part in _parts(config) for name, value in part.items() if holds(value)]


def dimensions(config: Mapping[str, Any], sizes: Sequence[int], defaults: Mapping[str, int]) -> list[str]:
    """Fields that may have given a weight one of these sizes: a number of heads and their dimensions, or one field.
    `defaults` are the numbers that the architecture's code takes for fields that are missing."""
    given = [(name, value) for part in _parts(config) for name, value in part.items() if _is_int(value) and value > 0]
    numbers = [(name, value, f"{name} is {value}") for name, value in dict(given).items()]
    numbers += [(name, value, f"{name} is missing, and {value} by default") for name, value in defaults.items()]
    heads = [one for one in numbers if one[1] > 0 and ("heads" in one[0] or "n_head" in one[0])]
    dims = [one for one in numbers if "head_dim" in one[0]]
    hidden = dict(given).get("hidden_size", 0)
    for size in sizes:
        pairs = [(one, other) for one, other in product(heads, dims) if one[1] * other[1] == size]
        parts = [(one,) for one in heads if hidden // one[1] == size]
        whole = [(one,) for one in numbers if one[1] == size and _SIZES.search(one[0])]
        if found := [*pairs, *parts, *whole]:
            return [said for _, _, said in found[0]]
    return []


def _parts(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The config, and the part of it that is of the language model."""
    return [part for part in (config, config.get("text_config")) if isinstance(part, Mapping)]


def _fits(value: Any, type_: Any) -> bool:
    """Whether a value of JSON has a type of Python's annotations, as far as that is of JSON."""
    if get_origin(type_) in (Union, UnionType):
        return any(_fits(value, one) for one in get_args(type_))
    kind = get_origin(type_) or type_
    if kind in (int, float):  # many numbers that may have a fraction are annotated as whole
        return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= _MOST[kind]
    if kind in (str, bool, NoneType):
        return isinstance(value, kind)
    if kind in (list, tuple):
        return isinstance(value, (list, tuple))
    return isinstance(value, Mapping) if kind is dict else True


def _odd(config: Mapping[str, Any]) -> list[str]:
    """Odd values of one object. What is null counts as not given, except where every model gives it."""
    found = {name: config[name] for name in _COUNTS if name in config and not _is_count(config[name])}
    given = {name: value for name, value in config.items() if value is not None}
    found |= {name: given[name] for name in _OPTIONAL_COUNTS if name in given and not _is_count(given[name])}
    numbers = [name for name in given if name == "rope_theta" or name.endswith(("_eps", "_epsilon"))]
    found |= {name: given[name] for name in numbers if not _is_above_zero(given[name])}
    found |= {name: given[name] for name in _OBJECTS if name in given and not isinstance(given[name], Mapping)}
    for place, own in (("", given), *((f"{name}.", scaling) for name, scaling in _scalings(given))):
        if (turned := own.get(_TURNED)) is not None and not (_is_above_zero(turned) and turned <= 1):
            found[f"{place}{_TURNED}"] = turned
    for place, scaling in _scalings(given):
        numbers = [name for name in _OF_SCALINGS if scaling.get(name) is not None]
        found |= {f"{place}.{name}": scaling[name] for name in numbers if not _is_above_zero(scaling[name])}
    return [f"{name} is {_short(value)}" for name, value in found.items()]


def _scalings(config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The settings of scaled positions, of all layers or of a kind of layers, each with its place in `config`."""
    for name in _SCALINGS:
        given = config.get(name)
        if isinstance(given, Mapping):
            yield name, given
            yield from ((f"{name}.{kind}", own) for kind, own in given.items() if isinstance(own, Mapping))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _LARGEST


def _is_above_zero(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
