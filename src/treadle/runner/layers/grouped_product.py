"""Grouped products on CUDA: tokens times the weights of the experts that they chose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from typing import Any

import mlx.core as mx

from ..device.cuda import CudaKernel, NewKernel, bits_of
from ..device.properties import DeviceProperties
from ..fused.mixture_kernels import CHOOSE, Choice, MixtureKernels

MOST_EXPERTS = 1024
_FILES = ["device/numbers.cuh", "layers/expert_weights.cuh", "layers/experts.cuh"]
_FEW_FILES, _MANY_FILES = [*_FILES, "layers/few_rows.cuh"], [*_FILES, "layers/many_rows.cuh"]
_WARPS, _TILE, _FEW_ROWS = 4, 32, 32
_JOINT = 2048  # bytes of sums that warps add up at once, for each of them
_MANY_THREADS, _MANY_TILES, _LONG_ROUTE = 256, 4, 4096
_TOGETHER, _MOST_TOGETHER, _CHOOSING = 64, 512, 16
"""The most tokens whose experts are chosen and routed by one block, the most experts, and the warps that choose. More
threads might have too few registers."""
_RESIDENT = 3  # blocks that a multiprocessor has registers for
_ROUTE = """
  treadle::route_experts<THREADS, ROWS>(indices, (treadle::Chunk*)chunks, (int*)order, indices_shape[0], EXPERTS);
"""
_CHOOSE_AND_ROUTE = f"""
  for (int token = threadIdx.x / 32; token < logits_shape[0]; token += THREADS / 32) {{{CHOOSE}  }}
  __syncthreads();
  treadle::route_experts<THREADS, ROWS>(
      chosen, (treadle::Chunk*)chunks, (int*)order, logits_shape[0] * (TOP + SHARED), EXPERTS + SHARED);
"""
_SETUP = """
  using K = treadle::Kind<T, treadle::Mode(MODE), BITS, GROUP, treadle::Activation(KIND), PAIRED, BIASED, TOKENS>;
  const treadle::Experts<T> weights = {{(const unsigned char*)w0, (const unsigned char*)w1},
                              {(const unsigned char*)s0, (const unsigned char*)s1}, {b0, b1}, w0_shape[1], x_shape[1]};
  const int top = order_shape[0] / x_shape[0];
  const float alpha = __int_as_float(ALPHA), limit = __int_as_float(LIMIT);
"""
_FEW = f"""{_SETUP}
  treadle::few_rows<K, PARTS, DEPTH>(
      x, weights, routing, routing_shape[1] == 1, (const int*)order, out, order_shape[0], top, alpha, limit);
"""
_MANY = f"""{_SETUP}
  treadle::many_rows<K, TALL, DEPTH>(
      x, weights, (const treadle::Chunk*)routing, (const int*)order, out, top, alpha, limit);
"""


class Mode(IntEnum):
    """How weights are quantized, as the kernels number it."""

    PLAIN = 0
    AFFINE = 1
    MXFP4 = 2
    NVFP4 = 3
    MXFP8 = 4


class Activation(IntEnum):
    """Functions between the products, as the kernels number them: of a gate and a linear part, or of one number."""

    NONE = 0
    SILU = 1
    CLAMPED_OAI = 2
    GELU_TANH = 3
    GELU_ERF = 4
    RELU2 = 5
    SILU_CLAMPED = 6
    CLAMPED_SILU = 7


@dataclass(frozen=True)
class Between:
    """An activation with its constants."""

    kind: Activation = Activation.NONE
    alpha: float = 0.0
    limit: float = 0.0


@dataclass(frozen=True)
class Format:
    """The form of weights: `bits` of each, quantized by `mode` in groups of `group` columns."""

    mode: Mode = Mode.PLAIN
    bits: int = 16
    group: int = 64

    @property
    def span(self) -> int:
        """Units of 64 columns that are never split: of a row in them, there are whole pieces of 16 bytes."""
        return 2 if self.bits % 2 else 1

    @property
    def units(self) -> int:
        """Units of 64 columns in a stage with few rows: at most 128 bytes of a row."""
        return 4 if self.bits == 3 else 2 if self.bits in (5, 6) else 16 // self.bits

    def scale_bytes(self, units: int, rows: int) -> int:
        """Bytes of the scales and biases of `rows` rows of `units` times 64 columns in shared memory."""
        size = {Mode.PLAIN: 0, Mode.AFFINE: 4}.get(self.mode, 1)
        return units * max(1, 64 // self.group) * rows * size


@dataclass(frozen=True)
class ExpertWeights:
    """Weights (E, N, K) of all experts, packed along K where they are quantized. `scales` are then (E, K / group, N, 2)
    with biases beside them, or (E, K / group, N) without. `bias` (E, N) is added to products."""

    form: Format
    weight: Any
    scales: Any | None = None
    bias: Any | None = None

    @property
    def experts(self) -> int:
        return int(self.weight.shape[0])

    @property
    def outputs(self) -> int:
        return int(self.weight.shape[1])


@dataclass(frozen=True)
class Routing:
    """The pairs (P,) of tokens and experts in the order of their experts, and the chunks (C, 4) that they are cut
    into: an expert, the first pair and the number of pairs. The first line has their number. A chunk has at most `rows`
    pairs. Of one token, `chunks` (P, 1) and `order` are its experts, and nothing is sorted."""

    chunks: Any
    order: Any
    rows: int

    @property
    def most(self) -> int:
        """The most chunks that there can be."""
        return int(self.chunks.shape[0]) - int(self.chunks.shape[1] > 1)


@dataclass(frozen=True)
class Tuning:
    """Choices that are measured: warps that share a tile's columns (1 or 4), stages of weights on their way with few
    and many rows, pairs per expert from which on there are many, and from which on their chunks have 128 rows instead
    of 64."""

    parts: int = 4
    depth: int = 3
    many_depth: int = 3
    many_pairs: int = 40
    tall_pairs: int = 96


class GroupedProduct:
    """The kernels, made by `kernel` for `chip`."""

    def __init__(
        self, kernel: NewKernel = CudaKernel, chip: DeviceProperties | None = None, tuning: Tuning | None = None
    ) -> None:
        self._kernel = kernel
        self._chip = DeviceProperties.of(mx.device_info()) if chip is None else chip
        self._tuning = Tuning() if tuning is None else tuning

    def route(self, indices: Any, experts: int, tokens: int) -> Routing:
        """Routing of `indices` (P,) uint32, those of a token side by side, with different experts of a token."""
        pairs = int(indices.shape[0])
        if tokens == 1:
            return Routing(indices[:, None], indices, _FEW_ROWS)
        rows = self._rows(pairs, experts)
        threads = -(-max(experts, 256) // 32) * 32 if pairs <= _LONG_ROUTE else MOST_EXPERTS
        chunks, order = _route(self._kernel)(
            [indices],
            [("THREADS", threads), ("ROWS", rows), ("EXPERTS", experts)],
            blocks=(1, 1),
            threads=threads,
            shapes=_routed(pairs, experts, rows),
            dtypes=[mx.uint32, mx.uint32],
        )
        return Routing(chunks, order, rows)

    def choose(self, logits: Any, choice: Choice) -> tuple[Any, Routing]:
        """The weights (T, all of a token), float32, of the experts that are chosen for `logits` as by
        `MixtureKernels.choose`, and their routing."""
        tokens, experts = logits.shape[0], logits.shape[1] - choice.gated + choice.shared
        if not 1 < tokens <= _TOGETHER or experts > _MOST_TOGETHER:
            chosen, weights = MixtureKernels(self._kernel).choose(logits, choice)
            return weights, self.route(chosen.reshape(-1), experts, tokens)
        pairs = tokens * choice.all
        rows, threads = self._rows(pairs, experts), -(-max(experts, 256, 32 * min(tokens, _CHOOSING)) // 32) * 32
        _, weights, chunks, order = _choose_and_route(self._kernel)(
            choice.inputs(logits),
            [*choice.template(logits), ("THREADS", threads), ("ROWS", rows)],
            blocks=(1, 1),
            threads=threads,
            shapes=[*[(tokens, choice.all)] * 2, *_routed(pairs, experts, rows)],
            dtypes=[mx.uint32, mx.float32, mx.uint32, mx.uint32],
        )
        return weights, Routing(chunks, order, rows)

    def _rows(self, pairs: int, experts: int) -> int:
        """The most rows of a chunk."""
        if pairs < self._tuning.many_pairs * experts:
            return _FEW_ROWS
        return 64 if pairs < self._tuning.tall_pairs * experts else 128

    def __call__(
        self, x: Any, weights: Sequence[ExpertWeights], routing: Routing, between: Between, *, tokens: bool
    ) -> Any:
        """Products (P, N) with `weights`: of one layer, or of a gate and its linear part. With `tokens` x is (T, K),
        and the result in the order of the chunks; without, x (P, K) is in that order, and the result in the pairs'."""
        first, last = weights[0], weights[-1]
        spare = first.weight
        inputs = [
            x,
            first.weight,
            last.weight,
            *(spare if one.scales is None else one.scales for one in (first, last)),
            *(x if one.bias is None else one.bias for one in (first, last)),
            routing.chunks,
            routing.order,
        ]
        template = [
            ("T", x.dtype),
            ("MODE", int(first.form.mode)),
            ("BITS", first.form.bits),
            ("GROUP", first.form.group),
            ("KIND", int(between.kind)),
            ("ALPHA", bits_of(between.alpha)),
            ("LIMIT", bits_of(between.limit)),
            ("PAIRED", len(weights) == 2),
            ("BIASED", first.bias is not None),
            ("TOKENS", tokens),
        ]
        tiles = first.outputs // 16 if len(weights) == 2 else -(-first.outputs // _TILE)
        shape = (int(routing.order.shape[0]), first.outputs)
        launch = self._few if routing.rows == _FEW_ROWS else self._many
        return launch(inputs, template, first.form, routing, tiles, shape)

    def _few(
        self, inputs: list[Any], template: list[Any], form: Format, routing: Routing, tiles: int, shape: Any
    ) -> Any:
        parts, depth = self._tuning.parts, self._tuning.depth
        stage = _TILE * form.units * form.bits * 8 + form.scale_bytes(form.units, _TILE)
        shared = _WARPS * depth * stage + (0 if parts == 1 else parts * _JOINT)
        resident = max(1, min(_RESIDENT, (self._chip.shared + 1024) // (shared + 1024)))
        return _few(self._kernel, shared)(
            inputs,
            [*template, ("PARTS", parts), ("DEPTH", depth)],
            blocks=(min(self._chip.processors * resident, routing.most * tiles), 1),
            threads=32 * _WARPS,
            shapes=[shape],
            dtypes=[inputs[0].dtype],
        )[0]

    def _many(
        self, inputs: list[Any], template: list[Any], form: Format, routing: Routing, tiles: int, shape: Any
    ) -> Any:
        depth = self._tuning.many_depth
        span = form.span
        stage = routing.rows * 128 * span + 128 * span * form.bits * 8 + form.scale_bytes(span, 128)
        return _many(self._kernel, depth * stage)(
            inputs,
            [*template, ("TALL", routing.rows // 16), ("DEPTH", depth)],
            blocks=(routing.most, -(-tiles // _MANY_TILES)),
            threads=_MANY_THREADS,
            shapes=[shape],
            dtypes=[inputs[0].dtype],
        )[0]


@cache
def _route(kernel: NewKernel) -> CudaKernel:
    return kernel("route_experts", ["indices"], ["chunks", "order"], _ROUTE, files=_FILES)


@cache
def _choose_and_route(kernel: NewKernel) -> CudaKernel:
    outputs, files = ["chosen", "weights", "chunks", "order"], [*_FILES, "fused/mixture.cuh"]
    return kernel("choose_and_route", ["logits", "bias", "scales"], outputs, _CHOOSE_AND_ROUTE, files=files)


def _routed(pairs: int, experts: int, rows: int) -> list[tuple[int, ...]]:
    """Shapes of the chunks of so many pairs, and of their order."""
    return [(1 + min(experts, pairs) + pairs // rows, 4), (pairs,)]


_INPUTS = ["x", "w0", "w1", "s0", "s1", "b0", "b1", "routing", "order"]


@cache
def _few(kernel: NewKernel, shared: int) -> CudaKernel:
    """The kernel for few rows. MLX sets a kernel's shared memory when it first loads it, so each size has its own."""
    return kernel("few_rows", _INPUTS, ["out"], _FEW, files=_FEW_FILES, shared_memory=shared)


@cache
def _many(kernel: NewKernel, shared: int) -> CudaKernel:
    """As `_few`, for many rows."""
    return kernel("many_rows", _INPUTS, ["out"], _MANY, files=_MANY_FILES, shared_memory=shared)
