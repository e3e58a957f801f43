"""The attention of a model's layers, recorded from one run of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx

from ..kv.cache_layout import CacheKind, CacheLayout
from ..kv.paged.kernels import AttentionShape
from ..mlxlm import FETCHED, MlxLm
from ..unsupported import Unsupported

_ROWS = 2


def attending(library: MlxLm, module: Any, layout: CacheLayout) -> CacheLayout:
    """The `layout` of the module's caches, with those marked as unused that got no keys and values in a run of it."""
    recorders = iter(_recorded(library, module, layout))
    kinds = [
        CacheKind.UNUSED if kind is CacheKind.ATTENTION and next(recorders).keys is None else kind
        for kind in layout.kinds
    ]
    return replace(layout, kinds=kinds)


def latent_layers(library: MlxLm, module: Any, layout: CacheLayout) -> list[bool]:
    """Whether each of the module's layers with attention attends to latents. Raises NotImplementedError where one
    attends to other keys and values than a cache's, as layers do that change what it returns; whatever the module's
    code raises comes through."""
    return [recorder.latent for recorder in _recorded(library, module, layout)]


def attention_shapes(library: MlxLm, module: Any, layout: CacheLayout) -> list[AttentionShape]:
    """The shape of each of the module's layers with attention. Raises NotImplementedError where a layer's attention is
    not attention over its own keys and values, and Unsupported where it is over a part of them; whatever the module's
    code raises comes through."""
    return [recorder.shape for recorder in _recorded(library, module, layout)]


def _recorded(library: MlxLm, module: Any, layout: CacheLayout) -> list[_Recorder]:
    """Caches that have recorded a run of two rows of a token, as some code takes a single one alone; recurrent layers
    have mlx-lm's own."""
    recorders = [_Recorder() for kind in layout.kinds if kind is CacheKind.ATTENTION]
    leaves = library.leaves(library.new_caches(module))
    own = [leaf for leaf, kind in zip(leaves, layout.kinds, strict=True) if kind is CacheKind.RECURRENT]
    try:
        module(mx.ones((_ROWS, 1), mx.int32), cache=layout.caches(recorders, own))
    finally:
        FETCHED.clear()
    return recorders


class _Recorder:
    """A layer cache that records the shape of its layer's attention."""

    def __init__(self) -> None:
        self.offset = mx.zeros(_ROWS, mx.int32)
        self.keys: Any = None
        self.values: Any = None
        self.queries: Any = None
        self.sinks = False
        self.softcap = 0.0
        self.latent = False
        self.chooses = False

    def make_mask(self, *_: Any, **__: Any) -> None:
        return None

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[Any, Any]:
        self.keys, self.values = keys, values
        return FETCHED.put(self, keys, values)

    def keys_and_values(self) -> tuple[Any, Any]:
        return FETCHED.of(self)

    def attend(
        self,
        queries: Any,
        keys: Any,
        values: Any,
        scale: float,
        window: int,
        sinks: Any | None,
        *,
        softcap: float = 0.0,
    ) -> Any:
        if keys is not self.keys or values is not self.values:
            raise NotImplementedError("a layer attends to other keys and values than its cache's")
        self.queries, self.sinks, self.softcap = queries, sinks is not None, softcap
        return mx.zeros((*queries.shape[:-1], values.shape[-1]), queries.dtype)

    def attend_latent(self, queries: Any, rotated: Any, latents: Any, scale: float) -> Any:
        if latents is not self.keys or self.values.shape[:-1] != latents.shape[:-1]:
            raise NotImplementedError("a layer attends to other latents than its cache's")
        self.queries, self.latent = queries, True
        return mx.zeros(queries.shape, queries.dtype)

    def choices(self, choose: Any, *arrays: Any) -> None:
        self.chooses = True

    @property
    def shape(self) -> AttentionShape:
        if self.chooses:
            raise Unsupported("its attention looks at a chosen part of the tokens")
        if self.queries is None:
            raise NotImplementedError("a layer computes no attention of its own")
        _, heads, _, dim = self.keys.shape
        query_heads, dtype, value_dim = self.queries.shape[1], self.keys.dtype, self.values.shape[-1]
        if self.latent:
            return AttentionShape(heads, query_heads, dim + value_dim, dtype, dim, latent=True)
        return AttentionShape(heads, query_heads, dim, dtype, value_dim, self.sinks, self.softcap)
