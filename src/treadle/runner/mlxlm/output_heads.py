"""Output heads where a configuration and the weights differ about them.

mlx-lm takes the embeddings for the head of most models whose configuration does not say, and drops a head that is
stored: other logits without a word. Where the configuration says that the embeddings are the head, a stored copy of
them is refused by some classes and dropped by others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mlx.utils import tree_flatten

from .hooks import Rules, sanitizing

_TIED = ("tie_word_embeddings", "tie_embedding")
_HEAD = "lm_head."


def is_said(config: Mapping[str, Any]) -> bool:
    """Whether a configuration says if the output head is the embedding."""
    text = config.get("text_config")
    parts = [config, text] if isinstance(text, Mapping) else [config]
    return any(part.get(name) is not None for part in parts for name in _TIED)


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


def without_copy(model: Any) -> Any:
    """Return the class `model`, made to drop a stored head that it has no place for."""

    def sanitized(module: Any, own: Rules, weights: dict[str, Any]) -> Mapping[str, Any]:
        found = own(weights)
        if is_stored(name for name, _ in tree_flatten(module.parameters())):
            return found
        return {name: array for name, array in found.items() if not _is_head(name)}

    return sanitizing(model, sanitized)


def _is_head(name: str) -> bool:
    return name.startswith(_HEAD) or f".{_HEAD}" in name
