"""The shape of a model's attention, recorded from one run of it."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from ..kv.backend import Unsupported
from ..kv.paged.kernels import AttentionShape


def attention_shape(module: Any, layers: int) -> AttentionShape:
    """The shape that all of the module's `layers` layers have. Raises Unsupported where they differ, or where a layer's
    attention is not plain attention over its own keys and values; whatever the module's code raises comes through."""
    recorders = [_Recorder() for _ in range(layers)]
    module(mx.array([[1]], mx.int32), cache=recorders)
    shapes = {recorder.shape for recorder in recorders}
    if len(shapes) > 1:
        raise Unsupported("its layers have different heads")
    (shape,) = shapes
    return shape


class _Recorder:
    """A layer cache that records the shape of its layer's attention."""

    offset = 0

    def __init__(self) -> None:
        self.keys: Any = None
        self.values: Any = None
        self.queries: Any = None

    def make_mask(self, *_: Any, **__: Any) -> None:
        return None

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[Any, Any]:
        self.keys, self.values = keys, values
        return keys, values

    def attend(self, queries: Any, scale: float, window: int, sinks: Any | None) -> Any:
        if sinks is not None:
            raise NotImplementedError("the kernels know no attention sinks")
        self.queries = queries
        return queries

    @property
    def shape(self) -> AttentionShape:
        if self.queries is None or self.values.shape != self.keys.shape:
            raise NotImplementedError("a layer's keys and values differ in shape, or are shared")
        _, heads, _, dim = self.keys.shape
        return AttentionShape(heads, self.queries.shape[1], dim, self.keys.dtype)
