"""Architectures supported by the installed mlx-lm, read from its source files without importing it."""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_NAME = re.compile(r"[A-Za-z0-9_-]{1,100}")
_RENAMED: Mapping[str, str] = {
    "smolvlm": "mistral3",
    "idefics3": "mistral3",
    "lfm2_vl": "lfm2-vl",
    "qwen2_vl_text": "qwen2_vl",
    "qwen2_5_vl_text": "qwen2_vl",
    "qwen3_vl_text": "qwen3_vl",
    "qwen3_vl_moe_text": "qwen3_vl_moe",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe_text": "qwen3_5_moe",
    "gemma3n_text": "gemma3n",
    "gemma4_unified_text": "gemma4_text",
}
"""Types that mlx-lm has under other names, by its modules (`runner/mlxlm/vision_text`, `text_types`)."""
_TYPES, _CLASSES = "MODEL_REMAPPING", "MODEL_ARCHITECTURE_REMAPPING"


def is_known(config: Mapping[str, Any]) -> bool | None:
    """Return whether mlx-lm supports the model of `config`; None if mlx-lm is not installed."""
    folder = _library()
    if folder is None:
        return None
    tables = _tables(folder)
    kind, classes = str(config.get("model_type")), config.get("architectures") or ()
    names = (classes,) if isinstance(classes, str) else classes if isinstance(classes, list) else ()
    renamed = next((to for name in names if isinstance(name, str) and (to := tables[_CLASSES].get((kind, name)))), None)
    name = renamed or tables[_TYPES].get(kind, _RENAMED.get(kind, kind))
    return _NAME.fullmatch(name) is not None and _has_model(folder / "models" / f"{name}.py")


@functools.cache
def _has_model(module: Path) -> bool:
    """Return whether a module of mlx-lm is an architecture, not a part of some."""
    return module.is_file() and "\nclass ModelArgs" in module.read_text(encoding="utf-8")


def renamed() -> Mapping[str, str]:
    """Return the model types that are served by mlx-lm's module of another one; empty if mlx-lm is not installed."""
    folder = _library()
    return {} if folder is None else {**_tables(folder)[_TYPES], **_RENAMED}


def _library() -> Path | None:
    found = importlib.util.find_spec("mlx_lm")
    return Path(found.origin).parent if found is not None and found.origin else None


@functools.cache
def _tables(folder: Path) -> Mapping[str, Mapping[Any, str]]:
    """Return mlx-lm's tables that rename model types and classes to its modules."""
    found: dict[str, Mapping[Any, str]] = {_TYPES: {}, _CLASSES: {}}
    tree = ast.parse((folder / "utils.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id in found:
            found[node.targets[0].id] = ast.literal_eval(node.value)
    return found
