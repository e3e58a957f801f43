"""Check of the installed mlx-lm: version, names, arguments and behaviour that this server relies on."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import mlx.core as mx

from .caches import Caches, extend, extract, keep_rows, merge

SUPPORTED = ((0, 32, 2), (0, 33))
_FUNCTIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "mlx_lm.utils": {
        "load_model": ("model_path", "lazy", "strict", "trust_remote_code", "model_config", "get_model_classes"),
        "_get_classes": ("config",),
        "load_config": ("model_path",),
        "get_total_parameters": ("model",),
        "dequantize_model": ("model",),
    },
    "mlx_lm.models.cache": {"make_prompt_cache": ("model",)},
    "mlx_lm.models.base": {
        "scaled_dot_product_attention": ("queries", "keys", "values", "cache", "scale", "mask", "sinks")
    },
    "mlx_lm.models.rope_utils": {
        "initialize_rope": ("dims", "base", "traditional", "scaling_config", "max_position_embeddings")
    },
}
_BATCHED = ("state", "nbytes", "merge", "extend", "filter", "extract", "prepare", "finalize")
_CLASSES: dict[str, tuple[str, ...]] = {
    "KVCache": ("state", "nbytes", "merge", "size", "is_trimmable", "trim"),
    "RotatingKVCache": ("state", "nbytes", "merge", "size"),
    "ChunkedKVCache": ("state", "nbytes", "keys_and_values"),
    "BatchKVCache": _BATCHED,
    "BatchRotatingKVCache": _BATCHED,
    "ArraysCache": _BATCHED,
    "CacheList": _BATCHED,
}


def problems(version: str, modules: Mapping[str, ModuleType]) -> list[str]:
    """Missing or different parts of mlx-lm's `modules`, by name; empty where it fits."""
    found = [*_version_problems(version), *_missing(modules)]
    return found or _wrong_behaviour(modules["mlx_lm.models.cache"])


def _version_problems(version: str) -> list[str]:
    parts = tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
    low, high = SUPPORTED
    return [] if low <= parts < high else ["the version must be at least 0.32.2 and below 0.33"]


def _missing(modules: Mapping[str, ModuleType]) -> list[str]:
    found = []
    for module, functions in _FUNCTIONS.items():
        for name, arguments in functions.items():
            function = getattr(modules[module], name, None)
            known = inspect.signature(function).parameters if callable(function) else {}
            lost = [argument for argument in arguments if argument not in known]
            if lost:
                found.append(f"{module}.{name}({', '.join(lost)}) is missing")
    for name, members in _CLASSES.items():
        known_class = getattr(modules["mlx_lm.models.cache"], name, None)
        lost = [member for member in members if not hasattr(known_class, member)]
        if lost:
            found.append(f"mlx_lm.models.cache.{name} has no {', '.join(lost)}")
    return found


def _wrong_behaviour(cache: ModuleType) -> list[str]:
    """Whether rows of different lengths survive a batch: merged, extended, filtered and taken out again."""
    rows = [_filled(cache.KVCache(), length) for length in (3, 1, 2)]
    batch = merge(rows[:2])
    extend(batch, merge(rows[2:]))
    keep_rows(batch, [0, 2])
    for place, row in ((0, rows[0]), (1, rows[2])):
        back = extract(batch, place)[0]
        if back.size() != row[0].size() or not mx.array_equal(back.keys, row[0].keys[..., : back.size(), :]).item():
            return ["mlx_lm.models.cache.BatchKVCache does not give back the rows that were put into it"]
    return []


def _filled(cache: Any, length: int) -> Caches:
    values = mx.arange(length, dtype=mx.float32).reshape(1, 1, length, 1) + length
    cache.update_and_fetch(values, values)
    return [cache]
