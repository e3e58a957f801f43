"""The last layer of mlx-lm's models, for the tokens that reach the head alone.

The others only leave their keys and values there. So the layer is called twice: for all tokens up to its attention,
which writes these, and then for the selected ones. Other parts of it are not computed for all, as MLX is lazy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from .hooks import Selection, Window


class LayerWritten(Exception):
    """Raised by a cache's attention inside of `writing`: all keys and values of the layer are written."""


class Narrowed(Protocol):
    """A cache whose layer can be computed for some of a pass's tokens."""

    def writing(self) -> AbstractContextManager[None]:
        """Take keys and values inside the block; attention raises LayerWritten."""
        ...

    def narrowed(self) -> AbstractContextManager[None]:
        """Take no keys and values inside the block, and attend for the selected tokens alone."""
        ...


def narrow_last_layer(model: Any, selection: Selection | None) -> None:
    """Let the last layer of `model` compute the tokens of `selection` alone, where its cache can tell how."""
    layer = model.layers[-1] if selection is not None else None
    if layer is not None and not hasattr(type(layer), "narrows"):
        layer.__class__ = _narrowing(type(layer))
        vars(layer)["selection"] = selection


def _narrowing(kind: Any) -> type:
    def call(self: Any, x: Any, *args: Any, **named: Any) -> Any:
        selection: Selection = vars(self)["selection"]
        cache = _cache_of([*args, *named.values()])
        if cache is None or selection.rows is None or selection.keep is not None or not cache.narrows:
            return kind.__call__(self, x, *args, **named)
        with cache.writing():
            try:
                kind.__call__(self, x, *args, **named)
            except LayerWritten:
                pass
            else:
                raise NotImplementedError("the last layer has no attention")
        selected = x[selection.rows]
        with cache.narrowed():
            y = kind.__call__(self, selected, *args, **named)
        selection.narrowed = True
        return y

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__, "narrows": True})


def _cache_of(arguments: Sequence[Any]) -> Any | None:
    """The cache among a layer's other arguments, where it is the only one and can be narrowed, and no other argument
    has a line for each token."""
    flat = list(_flat(arguments))
    caches = [one for one in flat if hasattr(one, "narrowed")]
    others = [one for one in flat if not (one is None or isinstance(one, (Window, bool, int, float)))]
    return caches[0] if len(caches) == len(others) == 1 else None


def _flat(arguments: Sequence[Any]) -> Iterator[Any]:
    for one in arguments:
        if isinstance(one, (list, tuple)):
            yield from _flat(one)
        else:
            yield one
