"""The attention of a model's layers, recorded from one run of it."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from ..kv.paged.kernels import AttentionShape
from ..mlxlm import FETCHED


def check_attention(module: Any, layers: int) -> None:
    """Raises NotImplementedError where a layer attends to other keys and values than its own cache's, as layers do that
    share a cache, or that change what it returns; whatever the module's code raises comes through."""
    _recorded(module, layers)


def attention_shapes(module: Any, layers: int) -> list[AttentionShape]:
    """The shape of each of the module's `layers` layers. Raises NotImplementedError where a layer's attention is not
    attention over its own keys and values; whatever the module's code raises comes through."""
    return [recorder.shape for recorder in _recorded(module, layers)]


def _recorded(module: Any, layers: int) -> list[_Recorder]:
    recorders = [_Recorder() for _ in range(layers)]
    try:
        module(mx.array([[1]], mx.int32), cache=recorders)
    finally:
        FETCHED.clear()
    return recorders


class _Recorder:
    """A layer cache that records the shape of its layer's attention."""

    offset = 0

    def __init__(self) -> None:
        self.keys: Any = None
        self.values: Any = None
        self.queries: Any = None
        self.has_sinks = False

    def make_mask(self, *_: Any, **__: Any) -> None:
        return None

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[Any, Any]:
        self.keys, self.values = keys, values
        return FETCHED.put(self, keys, values)

    def keys_and_values(self) -> tuple[Any, Any]:
        return FETCHED.of(self)

    def attend(self, queries: Any, keys: Any, values: Any, scale: float, window: int, sinks: Any | None) -> Any:
        if keys is not self.keys or values is not self.values:
            raise NotImplementedError("a layer attends to other keys and values than its cache's")
        self.has_sinks = sinks is not None
        self.queries = queries
        return mx.zeros((*queries.shape[:-1], values.shape[-1]), queries.dtype)

    @property
    def shape(self) -> AttentionShape:
        if self.has_sinks:
            raise NotImplementedError("the kernels know no attention sinks")
        if self.queries is None or self.values.shape != self.keys.shape:
            raise NotImplementedError("a layer's keys and values differ in shape, or are shared")
        _, heads, _, dim = self.keys.shape
        return AttentionShape(heads, self.queries.shape[1], dim, self.keys.dtype)
