"""Output heads where a configuration and the weights differ about them.

mlx-lm takes the embeddings for the head of most models whose configuration does not say, and drops a head that is
stored: other logits without a word. Where the configuration says that the embeddings are the head, a stored copy of
them is refused by some classes and dropped by others. Where it says that they are not, and mlx-lm's class has no place
for a head, answers would be those of another model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ...errors import ModelError
from .hooks import Rules, sanitizing

_TIED = ("tie_word_embeddings", "tie_embedding")
_HEAD = "lm_head."
_ROWS = 4096
"""Rows of two tables that are compared at once."""


def is_said(config: Mapping[str, Any]) -> bool:
    """Whether a configuration says if the output head is the embedding."""
    return bool(_said(config))


def is_untied(config: Mapping[str, Any]) -> bool:
    """Whether a configuration says that the output head is not the embedding. What the language model's part says
    counts before the rest, and LFM2's older field before the later one, as in transformers."""
    return _said(config)[-1:] == [False]


def _said(config: Mapping[str, Any]) -> list[Any]:
    """What a configuration says about the output head, what counts last."""
    text = config.get("text_config")
    parts = [config, text] if isinstance(text, Mapping) else [config]
    return [part[name] for part in parts for name in _TIED if part.get(name) is not None]


def is_stored(names: Iterable[str]) -> bool:
    """Whether an output head is among tensors with these names."""
    return any(_is_head(name) for name in names)


def tied(arguments: Any) -> Any:
    """Return the class of a model's `arguments`, by which its language model takes its embeddings for the head.
    Pixtral's says that it does not, whatever its configuration."""
    inherited = arguments.from_dict

    def from_dict(cls: Any, params: dict[str, Any]) -> Any:
        made = inherited.__func__(cls, params)
        if isinstance(text := getattr(made, "text_config", None), dict):
            made.text_config = {**text, _TIED[0]: True}
        return made

    return type(arguments.__name__, (arguments,), {"from_dict": classmethod(from_dict)})


def without_copy(model: Any, untied: Path | None = None) -> Any:
    """Return the class `model`, made to drop a stored head that it has no place for. Its weights raise ModelError where
    that is a head of its own: where it is not the embedding, and the configuration of the folder `untied` says so."""

    def sanitized(module: Any, own: Rules, weights: dict[str, Any]) -> Mapping[str, Any]:
        head = {_part(name): array for name, array in weights.items() if _is_head(name)}
        found = own(weights)
        if is_stored(name for name, _ in tree_flatten(module.parameters())):
            return found
        if untied is not None and not _has_other_head(module, head) and not _is_copy(head, module, found):
            raise ModelError(
                f"{untied} can't be loaded: it has an output head of its own (its config.json says that "
                "tie_word_embeddings is false), and mlx-lm's code for this architecture knows its embeddings alone as "
                "one: answers would be wrong; use another model"
            )
        return {name: array for name, array in found.items() if not _is_head(name)}

    return sanitizing(model, sanitized)


def _is_head(name: str) -> bool:
    return name.startswith(_HEAD) or f".{_HEAD}" in name


def _part(name: str) -> str:
    """Return what a tensor of a head is of it: `weight`, or a part of its quantization."""
    return name.rpartition(_HEAD)[2]


def _has_other_head(module: Any, head: Mapping[str, Any]) -> bool:
    """Whether a layer of `module` has as many outputs as a stored `head`: it is one by another name."""
    rows = {array.shape[0] for array in head.values() if array.ndim}
    return any(isinstance(layer, nn.Linear) and layer.weight.shape[0] in rows for layer in module.modules())


def _is_copy(head: Mapping[str, Any], module: Any, weights: Mapping[str, Any]) -> bool:
    """Whether the tensors of a `head` are those of an embedding of `module` among its `weights`."""
    tables = [path for path, layer in module.named_modules() if isinstance(layer, nn.Embedding)]
    return any(all(_same(array, weights.get(f"{path}.{part}")) for part, array in head.items()) for path in tables)


def _same(one: Any, other: Any) -> bool:
    """Whether two tables are equal. Only a part is compared at once: the whole would take as much memory again."""
    if other is None or one.shape != other.shape:
        return False
    parts = (slice(start, start + _ROWS) for start in range(0, one.shape[0], _ROWS))
    return all(mx.array_equal(one[part], other[part]).item() for part in parts)
