"""Reader of a sentence-transformers folder: the pooling, and the layers behind it.

`modules.json` lists the modules. Each has a folder with a `config.json`, and Dense layers their weights.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...core.messages import Pooling
from ...errors import ModelError
from ..pooling import Dense

MODULES = "modules.json"
_MODES = {
    "pooling_mode_lasttoken": Pooling.LAST,
    "pooling_mode_mean_tokens": Pooling.MEAN,
    "pooling_mode_cls_token": Pooling.CLS,
}
_NAMES = {"lasttoken": Pooling.LAST, "last": Pooling.LAST, "mean": Pooling.MEAN, "cls": Pooling.CLS}
_ACTIVATIONS: Mapping[str, Callable[[Any], Any]] = {
    "Identity": lambda vector: vector,
    "Tanh": mx.tanh,
    "ReLU": nn.relu,
    "GELU": nn.gelu,
    "SiLU": nn.silu,
    "Sigmoid": mx.sigmoid,
}


@dataclass(frozen=True)
class PoolingModules:
    """The pooling that a folder describes, and the layers behind it."""

    pooling: Pooling
    dense: tuple[Dense, ...] = ()


def has_modules(folder: Path) -> bool:
    """Whether the folder is one of sentence-transformers."""
    return (folder / MODULES).is_file()


def read_modules(folder: Path) -> PoolingModules:
    """Read the folder's modules. Raises ModelError for those that are torn, or that can't be computed here."""
    pooling: Pooling | None = None
    dense: list[Dense] = []
    for kind, path in _listed(folder):
        if kind == "Pooling":
            pooling = _pooling(path)
        elif kind == "Dense":
            dense.append(_dense(path))
        elif kind not in ("Transformer", "Normalize"):
            raise ModelError(f"{folder / MODULES} has a module {kind}, which is not known here: use another model")
        if dense and pooling is None:
            raise ModelError(f"{folder / MODULES} has a Dense module before the pooling, which is not known here")
    if pooling is None:
        raise ModelError(f"{folder / MODULES} names no Pooling module: it is not an embedding model's folder")
    return PoolingModules(pooling, tuple(dense))


def _listed(folder: Path) -> list[tuple[str, Path]]:
    """Return the kind and the folder of each module, in their order."""
    path = folder / MODULES
    value = _json(path)
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise ModelError(f"{path} must hold a list of modules: download the model again")
    found = []
    for one in sorted(value, key=lambda one: one.get("idx", 0)):
        kind, inner = str(one.get("type", "")).rpartition(".")[2], str(one.get("path", ""))
        place = PurePath(inner)
        if place.is_absolute() or ".." in place.parts:
            raise ModelError(f"{path} names a module outside the folder: {inner!r}")
        found.append((kind, folder / place))
    return found


def _pooling(path: Path) -> Pooling:
    config = _object(path / "config.json")
    if config.get("include_prompt") is False:
        raise ModelError(f"{path} leaves prompts out of the pooling, which is not known here: use another model")
    given = config.get("pooling_mode")
    modes = [given] if isinstance(given, str) else given if isinstance(given, list) else None
    if modes is None:
        asked = [name for name, on in config.items() if name.startswith("pooling_mode_") and on is True]
        found = [_MODES.get(name) for name in asked]
    else:
        asked = [str(mode) for mode in modes]
        found = [_NAMES.get(name) for name in asked]
    if len(found) != 1 or found[0] is None:
        raise ModelError(f"{path} pools by {', '.join(asked) or 'nothing'}: only last, mean or cls is known here")
    return found[0]


def _dense(path: Path) -> Dense:
    config, file = _object(path / "config.json"), path / "model.safetensors"
    name = str(config.get("activation_function", "")).rpartition(".")[2]
    if name not in _ACTIVATIONS:
        raise ModelError(f"{path} has the activation {name!r}, which is not known here: use another model")
    if not file.is_file():
        raise ModelError(f"{path} has no model.safetensors: download the model again, or use one that has it")
    try:
        weights: Any = mx.load(str(file))
    except (RuntimeError, ValueError, OSError) as error:
        raise ModelError(f"{file} can't be read: {error}; download it again") from error
    weight, bias = weights.get("linear.weight"), weights.get("linear.bias")
    shape = (config.get("out_features"), config.get("in_features"))
    if weight is None or weight.shape != shape or (bias is None) is (config.get("bias", True) is True):
        raise ModelError(f"{file} does not hold the layer that its config.json describes: download it again")
    bias = None if bias is None else bias.astype(mx.float32)
    return Dense(weight.astype(mx.float32), bias, _ACTIVATIONS[name])


def _object(path: Path) -> dict[str, Any]:
    value = _json(path)
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object: download the model again")
    return value


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} is missing, though {MODULES} names it: download the model again") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} is torn or not JSON: download the model again ({error})") from error
