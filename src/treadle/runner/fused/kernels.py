"""Kernels between the matrix products of a decoder layer, one for each gap.

A decoder layer of MLX's operations is about 22 kernels, and on a small model or a small batch the time goes into
starting them. With these it is nine, four of them matrix products.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import mlx.core as mx

from ..device.cuda import CudaKernel, NewKernel, bits_of
from ..kv.paged.pool import Pool
from . import layer_texts as texts
from .norms import Norm

_LARGEST = 65504.0
"""The largest number in float16."""


@dataclass(frozen=True)
class Table:
    """Embeddings of `width` dimensions: `weight`, quantized to `bits` bits with `scales` and `biases` for every
    `group`; with 16 bits all three are the same array. Embeddings are multiplied by `scale`."""

    weight: Any
    scales: Any
    biases: Any
    width: int
    bits: int = 16
    group: int = 64
    scale: float = 1.0


class Activation(IntEnum):
    """Activation functions, by their numbers in the kernel. GELU is by the error function, or its tanh form."""

    SILU = 0
    GELU = 1
    GELU_TANH = 2
    RELU_SQUARED = 3


@dataclass(frozen=True)
class Heads:
    """A layer's numbers of heads, their dimensions, and the tokens of a page. With `shared` the keys, before their norm
    and rotation, are the values, too. With `gated` a gate of as many dimensions is behind each query."""

    queries: int
    kv: int
    dim: int
    page: int
    shared: bool = False
    gated: bool = False

    @property
    def stored(self) -> int:
        """Heads of a product for queries, maybe gates, keys and values."""
        return self.queries * (2 if self.gated else 1) + (1 if self.shared else 2) * self.kv


@dataclass(frozen=True)
class HeadNorms:
    """Root mean square norms of queries and keys, by weights of each dimension (D,), or of all heads' (heads * D,) if
    `whole`; None for none. With `values` values are normalized by head, without weights."""

    queries: Any | None = None
    keys: Any | None = None
    eps: float = 1e-6
    whole: bool = False
    values: bool = False


@dataclass(frozen=True)
class Weighted:
    """A branch (T, W) as the sum of outputs of experts `y` (T, k, W), with `weights` (T, k), float32."""

    y: Any
    weights: Any

    def sum(self) -> Any:
        """The branch, by MLX."""
        return (self.y.astype(mx.float32) * self.weights[..., None]).sum(axis=1).astype(self.y.dtype)


@dataclass(frozen=True)
class Residual:
    """Addition to the residual stream: of a branch times `multiplier`, or normalized by `post`. Sums are `clipped` to
    float16's range where the model does that, and then multiplied by `output`. Where two branches are added, each may
    be normalized before: the one by `branch`, the other by `other`, by root mean squares without bias."""

    post: Norm | None = None
    multiplier: float = 1.0
    clipped: bool = False
    output: float = 1.0
    branch: Norm | None = None
    other: Norm | None = None

    @property
    def norms(self) -> list[Norm]:
        """All norms."""
        return [one for one in (self.post, self.branch, self.other) if one is not None]


_ADDED = Residual()


class LayerKernels:
    """Kernels between a layer's matrix products, made by `kernel`."""

    def __init__(self, kernel: NewKernel) -> None:
        self._new = kernel
        self._no_scales = mx.zeros(1)
        mx.eval(self._no_scales)  # not in each pass
        self._embed = self._made("embed", ["tokens", "table", "scales", "biases"], ["out"], texts.EMBED)
        self._cos_sin = kernel("cos_sin", ["positions", "inv_freq"], ["out"], texts.COS_SIN)
        self._qk_scales = self._made("qk_scales", ["qkv"], ["out"], texts.QK_SCALES)
        self._activate = self._made("activate", ["x"], ["out"], texts.ACTIVATE)
        self._rotations: dict[bool, CudaKernel] = {}
        self._add_norms: dict[tuple[str, ...], CudaKernel] = {}

    def _made(self, name: str, inputs: list[str], outputs: list[str], text: str) -> CudaKernel:
        return self._new(name, inputs, outputs, text, files=["device/numbers.cuh"])

    def embed(self, tokens: Any, table: Table) -> Any:
        """Rows (T, W) of `table` for `tokens` (T,), in its type."""
        return self._embed(
            [tokens, table.weight, table.scales, table.biases],
            [
                ("T", table.scales.dtype),
                ("WIDTH", table.width),
                ("BITS", table.bits),
                ("GROUP", table.group),
                ("SCALED", table.scale != 1),
                ("SCALE", bits_of(table.scale)),
            ],
            blocks=(tokens.shape[0], 1),
            threads=128,
            shapes=[(tokens.shape[0], table.width)],
            dtypes=[table.scales.dtype],
        )[0]

    def cos_sin(self, positions: Any, inv_freq: Any, scale: float = 1.0) -> Any:
        """Cosines and sines (T, R / 2, 2), float32, of `positions` (T,) times `inv_freq` (R / 2,) radians, times
        `scale`."""
        shape = (positions.shape[0], inv_freq.shape[0], 2)
        return self._cos_sin(
            [positions, inv_freq],
            [("SCALE", bits_of(scale))],
            blocks=(-(-shape[0] * shape[1] // 128), 1),
            threads=128,
            shapes=[shape],
            dtypes=[mx.float32],
        )[0]

    def rotate(
        self,
        qkv: Any,
        norms: HeadNorms,
        cos_sin: Any | None,
        slots: Any,
        pool: Pool,
        heads: Heads,
        *,
        interleaved: bool = False,
    ) -> Any:
        """Queries (T, query heads, 1, D) out of `qkv` (T, stored heads * D): normalized, and their first R dimensions
        rotated by `cos_sin` (T, R / 2, 2), or not (None). Keys likewise; they and the values are written to `slots` of
        `pool`, those at -1 nowhere. Dimensions are rotated with those R / 2 further on, or, `interleaved`, with the
        next ones."""
        count = qkv.shape[0] * (heads.queries + 2 * heads.kv)
        weights = (qkv, qkv) if norms.queries is None else (norms.queries, norms.keys)
        rotation = qkv if cos_sin is None else cos_sin
        whole = norms.whole and norms.queries is not None
        scales = [self.qk_scales(qkv, norms.eps, heads)] if whole else []
        kv_scales = self._no_scales if pool.scales is None else pool.scales
        return self._rotate(whole)(
            [qkv, *weights, rotation, slots, pool.data, kv_scales, *scales],
            [
                ("T", qkv.dtype),
                ("S", pool.data.dtype),
                ("D", heads.dim),
                ("HQ", heads.queries),
                ("HKV", heads.kv),
                ("PAGE", heads.page),
                ("SHARED", heads.shared),
                ("STEP", 2 if heads.gated else 1),
                ("NORM", 0 if norms.queries is None else 2 if whole else 1),
                ("VALUE_NORM", norms.values),
                ("EPS", bits_of(norms.eps)),
                ("ROTATED", 0 if cos_sin is None else 2 * cos_sin.shape[1]),
                ("INTERLEAVED", interleaved),
            ],
            blocks=(-(-count // 4), 1),
            threads=128,
            shapes=[(qkv.shape[0], heads.queries, 1, heads.dim)],
            dtypes=[qkv.dtype],
        )[0]

    def _rotate(self, whole: bool) -> CudaKernel:
        if whole not in self._rotations:
            names = ["qkv", "q_norm", "k_norm", "cos_sin", "slots", "pool", "kv_scales", *(["scales"] if whole else [])]
            text = texts.ROTATE.replace("SCALES_OF", "scales" if whole else "turns")
            self._rotations[whole] = self._made("rotate", names, ["q"], text)
        return self._rotations[whole]

    def qk_scales(self, qkv: Any, eps: float, heads: Heads) -> Any:
        """Factors (T, 2), float32, that normalize all queries of a token together, and all keys."""
        return self._qk_scales(
            [qkv],
            [("T", qkv.dtype), ("D", heads.dim), ("HQ", heads.queries), ("HKV", heads.kv), ("EPS", bits_of(eps))],
            blocks=(qkv.shape[0], 2),
            threads=128,
            shapes=[(qkv.shape[0], 2)],
            dtypes=[mx.float32],
        )[0]

    def add_norm(
        self,
        x: Any,
        r: Any,
        norm: Norm | None,
        residual: Residual = _ADDED,
        other: Any | None = None,
        more: Sequence[Norm] = (),
    ) -> list[Any]:
        """`x` plus the branch `r` (T, W), or the sum of `r` and `other`, as `residual` says; this sum by `norm`, or as
        it is (None); and by each of `more`, which differ from `norm` in their weights only. Branches may be `Weighted`
        sums."""
        if x.shape[1] % 8 or not all(one.known for one in (*residual.norms, *([] if norm is None else [norm]))):
            return _added_by_mlx(x, r, norm, residual, other, more)
        post, threads = residual.post, min(512, -(-x.shape[1] // 256) * 32)
        arrays = {
            "other": _lines(other),
            "shares": _shares(r),
            "other_shares": _shares(other),
            "branch_weight": _weight(residual.branch),
            "other_weight": _weight(residual.other),
            "post_weight": _weight(post),
            "post_bias": post and post.bias,
            "weight": _weight(norm),
            "bias": norm and norm.bias,
            **{f"weight{i}": one.weight for i, one in enumerate(more)},
        }
        given = {name: array for name, array in arrays.items() if array is not None}
        outputs = 1 if norm is None else 2 + len(more)
        made = self._add_norm(tuple(given), len(more))(
            [x, _lines(r), *given.values()],
            [
                ("T", x.dtype),
                ("WIDTH", x.shape[1]),
                ("THREADS", threads),
                *[("LINES", _count(r)), ("OTHER_LINES", _count(other)), ("MORE", len(more))],
                *[("NORMED", residual.branch is not None), ("OTHER_NORMED", residual.other is not None)],
                *[("BRANCH_EPS", _eps(residual.branch)), ("OTHER_EPS", _eps(residual.other))],
                ("PARALLEL", other is not None),
                ("SCALED", residual.multiplier != 1),
                ("MULTIPLIER", bits_of(residual.multiplier)),
                ("CLIPPED", residual.clipped and x.dtype == mx.float16),
                ("RESCALED", residual.output != 1),
                ("OUTPUT", bits_of(residual.output)),
                *_template(post, "POST", "POST_EPS", "POST_BIASED"),
                *_template(norm, "NORM", "EPS", "BIASED"),
            ],
            blocks=(x.shape[0], 1),
            threads=threads,
            shapes=[x.shape] * outputs,
            dtypes=[x.dtype] * outputs,
        )
        return made if norm is not None else [made[0], made[0]]

    def _add_norm(self, names: tuple[str, ...], more: int) -> CudaKernel:
        """The kernel with inputs of such `names`: in its text, `x` stands for those that are not there."""
        if names not in self._add_norms:
            text = texts.ADD_NORM.replace("MORE_WEIGHTS", ", ".join(f"weight{i}" for i in range(more)) or "x")
            text = text.replace("MORE_OUTPUTS", ", ".join(f"y{i}" for i in range(more)) or "h")
            for name in ("shares", "other_shares"):
                text = re.sub(rf"\b{name.upper()}\b", name if name in names else "(const float*)nullptr", text)
            for name in ("post_weight", "post_bias", "weight", "bias", "other", "branch_weight", "other_weight"):
                text = re.sub(rf"\b{name.upper()}\b", name if name in names else "x", text)
            outputs = ["h", *(["y"] if "weight" in names else []), *(f"y{i}" for i in range(more))]
            text = re.sub(r"\bY\b", "y" if "weight" in names else "h", text)
            self._add_norms[names] = self._made("add_norm", ["x", "r", *names], outputs, text)
        return self._add_norms[names]

    def activate(self, x: Any, activation: Activation, *, gated: bool = True) -> Any:
        """`activation` of `x` (T, W); or, `gated`, that of the gate times up (T, W), for `x` (T, 2 W) with gate before
        up. W is a multiple of 8."""
        rows, width = x.shape[0], x.shape[1] // (2 if gated else 1)
        return self._activate(
            [x],
            [("T", x.dtype), ("WIDTH", width), ("ACTIVATION", int(activation)), ("GATED", gated)],
            blocks=(-(-rows * width // 8 // 256), 1),
            threads=256,
            shapes=[(rows, width)],
            dtypes=[x.dtype],
        )[0]


def _lines(branch: Any | None) -> Any | None:
    return branch.y if isinstance(branch, Weighted) else branch


def _shares(branch: Any | None) -> Any | None:
    return branch.weights if isinstance(branch, Weighted) else None


def _count(branch: Any | None) -> int:
    """Lines of a token that are added up; 0 where there is one."""
    return int(branch.weights.shape[1]) if isinstance(branch, Weighted) else 0


def _weight(norm: Norm | None) -> Any | None:
    return None if norm is None else norm.weight


def _eps(norm: Norm | None) -> int:
    return 0 if norm is None else bits_of(norm.eps)


def _template(norm: Norm | None, kind: str, eps: str, biased: str) -> list[tuple[str, Any]]:
    if norm is None:
        return [(kind, 0), (eps, 0), (biased, False)]
    return [(kind, 2 if norm.centered else 1), (eps, bits_of(norm.eps)), (biased, norm.bias is not None)]


def _added_by_mlx(
    x: Any, r: Any, norm: Norm | None, residual: Residual, other: Any | None, more: Sequence[Norm]
) -> list[Any]:
    r, other = (one.sum() if isinstance(one, Weighted) else one for one in (r, other))
    r = r if residual.branch is None else residual.branch(r)
    other = other if residual.other is None else residual.other(other)
    r = r if other is None else r + other
    r = r if residual.multiplier == 1 else r * residual.multiplier
    h = x + (r if residual.post is None else residual.post(r))
    h = mx.clip(h, -_LARGEST, _LARGEST) if residual.clipped and h.dtype == mx.float16 else h
    h = h if residual.output == 1 else h * residual.output
    return [h, h if norm is None else norm(h), *(one(h) for one in more)]
