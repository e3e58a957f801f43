"""Taps in front of decoder layers of mlx-lm's models: the residual streams that EAGLE-3 heads read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .hooks import Selection


def tap_layers(model: Any, selection: Selection, layers: Sequence[int]) -> None:
    """Keep the residual streams in front of `layers` of `model`, by their index, wherever `selection` keeps hidden
    states. Raises IndexError for a layer that there is not."""
    for index in layers:
        layer = model.layers[index]
        if "tapped_as" not in vars(layer):
            layer.__class__ = _tapping(type(layer))
            vars(layer)["tapped_as"] = index
            vars(layer)["tapped_for"] = selection
    selection.layers = tuple(sorted(layers))


def _tapping(kind: Any) -> type:
    def call(self: Any, x: Any, *args: Any, **named: Any) -> Any:
        selection, index = vars(self)["tapped_for"], vars(self)["tapped_as"]
        if selection.keep is not None and index in selection.layers:
            selection.tapped[index] = selection.kept_of(x)
        return kind.__call__(self, x, *args, **named)

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})
