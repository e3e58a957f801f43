"""Kernels of mixers, beside those that all layers have: gates and norms of heads, and latents on their way to pages."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx

from ..device.cuda import CudaKernel, NewKernel, bits_of
from ..kv.paged.pool import Pool
from .norms import Norm

_FILES = ["device/numbers.cuh", "fused/mixers.cuh"]
_WARPS = 4
_GATE_HEADS = """
  treadle::gate_heads<HEADS, D, NORM, SILU>(
      y, weight, gates, places, out, y_shape[0], gates_shape[1], __int_as_float(EPS));
"""
_PUT_LATENTS = f"""
  QUERIES_OUT
  treadle::put_latents<QUERIES, FIRST, LATENT, R, ROTATED, INTERLEAVED, {_WARPS}>(
      x, query_weight, weight, (const float*)cos_sin, slots, const_cast<T*>(pool), queries, x_shape[1],
      __int_as_float(QUERY_EPS), __int_as_float(EPS));
"""


@dataclass(frozen=True)
class Gate:
    """Gates of heads among a product's outputs: `places` (H,) int32 are the columns of each head's first one. Heads are
    multiplied by the sigmoids of gates, or, with `silu`, by their SiLU; first they are normalized by `norm`, if any."""

    places: Any
    silu: bool = False
    norm: Norm | None = None


@dataclass(frozen=True)
class Latents:
    """A product's outputs in multi-head latent attention: queries of a low rank (`rank`, 0: none) by `query_norm`; from
    column `first` on a latent of `dims` dimensions by `norm`; behind it a key of `rotated` dimensions, in pairs that
    are `interleaved` or half of them apart."""

    rank: int
    first: int
    dims: int
    rotated: int
    norm: Norm
    query_norm: Norm | None = None
    interleaved: bool = False


class MixerKernels:
    """The kernels, made by `kernel`."""

    def __init__(self, kernel: NewKernel) -> None:
        self._kernel = kernel

    def gate_heads(self, y: Any, gate: Gate, gates: Any, dim: int) -> Any:
        """Heads `y` (T, H * D) of `dim` dimensions, times their `gate` in `gates` (T, N)."""
        norm = gate.norm
        return _gate_heads(self._kernel)(
            [y, y if norm is None else norm.weight, gates, gate.places],
            [
                *[("T", y.dtype), ("HEADS", y.shape[1] // dim), ("D", dim), ("NORM", norm is not None)],
                *[("SILU", gate.silu), ("EPS", bits_of(0.0 if norm is None else norm.eps))],
            ],
            blocks=(-(-y.shape[0] * (y.shape[1] // dim) // _WARPS), 1),
            threads=32 * _WARPS,
            shapes=[y.shape],
            dtypes=[y.dtype],
        )[0]

    def put_latents(self, x: Any, latents: Latents, cos_sin: Any | None, slots: Any, pool: Pool) -> tuple[Any, Any]:
        """Normalized queries (T, rank) of `x` (T, N), or `x` where they have no rank of their own; and a token that is
        there once latents and rotated keys are in `slots` of `pool`, those at -1 nowhere. Keys are rotated by `cos_sin`
        (T, R / 2, 2), or not (None)."""
        few, norm = latents.rank > 0, latents.norm
        query_norm = norm if latents.query_norm is None else latents.query_norm
        made = _put_latents(self._kernel, few)(
            [x, query_norm.weight, norm.weight, x if cos_sin is None else cos_sin, slots, pool.data],
            [
                *[("T", x.dtype), ("QUERIES", latents.rank), ("FIRST", latents.first), ("LATENT", latents.dims)],
                *[("R", latents.rotated), ("ROTATED", cos_sin is not None)],
                ("INTERLEAVED", latents.interleaved),
                *[("QUERY_EPS", bits_of(query_norm.eps)), ("EPS", bits_of(norm.eps))],
            ],
            blocks=(x.shape[0], 1 + few),
            threads=32 * _WARPS,
            shapes=[(x.shape[0], latents.rank) if few else (1,)],
            dtypes=[x.dtype if few else mx.int32],
        )[0]
        return (made, slots) if few else (x, made)


@cache
def _gate_heads(kernel: NewKernel) -> CudaKernel:
    return kernel("gate_heads", ["y", "weight", "gates", "places"], ["out"], _GATE_HEADS, files=_FILES)


@cache
def _put_latents(kernel: NewKernel, queries: bool) -> CudaKernel:
    """The kernel that normalizes queries as well, or leaves a token behind."""
    first = "" if queries else "T* queries = nullptr;\n  if (blockIdx.x == 0 && threadIdx.x == 0) written[0] = 0;"
    names = ["x", "query_weight", "weight", "cos_sin", "slots", "pool"]
    outputs = ["queries"] if queries else ["written"]
    return kernel("put_latents", names, outputs, _PUT_LATENTS.replace("QUERIES_OUT", first), files=_FILES)
