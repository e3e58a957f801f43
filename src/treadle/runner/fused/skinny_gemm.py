"""Skinny GEMM: matrix products of few rows on CUDA, in one reading of the weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product, takewhile
from typing import Any

import mlx.core as mx

from ..device.cuda import CudaKernel, NewKernel
from ..device.properties import DeviceProperties
from .workspace import LaunchOrder, Workspace

MOST_ROWS = {16: 32, 8: 64, 4: 64}
"""The most rows, by bits of a weight: more are faster through MLX."""
SIZES = (8, 16, 32, 64)
"""Rows of x that kernels are compiled for."""
_GROUPS = (64, 128)
_STAGE, _TILE = 256, 16
_UNQUANTIZED_GROUP = 32  # there are no scales to read: columns are split between stages
_WARPS, _PARTS, _MOST_SPLITS = (4, 8, 12), (1, 2, 4), 16
_BUSY = {16: 0.26, 8: 0.1, 4: 0.08}  # us for a stage of a tile, all warps at work
_BODY = """
  treadle::skinny_gemm<T, ROWS, BITS, GROUP, DEPTH, BIASED>(
      x, (const unsigned*)w, s, b, ADDED, out, const_cast<float*>(partial), const_cast<int*>(counters), x_shape[0],
      w_shape[0], x_shape[1], counters_shape[0]);
"""


@dataclass(frozen=True)
class Weights:
    """The shape of weights: `outputs` rows of `inputs` columns of `bits` bits, in groups of `group` where they are
    quantized."""

    outputs: int
    inputs: int
    bits: int
    group: int

    @property
    def tiles(self) -> int:
        return -(-self.outputs // _TILE)

    @property
    def quantized(self) -> bool:
        return self.bits != 16

    @property
    def eight(self) -> int:
        """Columns of eight groups, which are never split: 16 bytes of scales."""
        return 8 * self.group


@dataclass(frozen=True)
class Launch:
    """Launch configuration of a product of at most `rows` rows. A block has `warps` warps, `parts` of which share a
    tile; the grid is `across` blocks for the tiles by `splits` for the columns. Weights are copied `depth` stages
    ahead."""

    rows: int
    depth: int
    warps: int
    parts: int
    splits: int
    across: int

    @property
    def tall(self) -> int:
        """Rows in units of eight, a tensor core's operand."""
        return self.rows // 8

    def columns(self, weights: Weights) -> int:
        """The most columns of a block."""
        return -(-(weights.inputs // weights.eight) // self.splits) * weights.eight

    def shared(self, weights: Weights) -> int:
        """Bytes of a block's shared memory: the warps' rings, x, its sums, and the parts' results to add."""
        columns, stages = self.columns(weights), weights.eight // _STAGE
        scales = 0 if not weights.quantized else ((stages + self.depth - 2) // stages + 1) * 2 * _TILE * 16
        ring = self.depth * _TILE * _STAGE * weights.bits // 8 + scales
        sums = 0 if not weights.quantized else columns // weights.eight * self.tall * 512
        joint = (self.warps - self.warps // self.parts) * self.tall * 512
        return self.warps * ring + columns * self.rows * 2 + sums + joint

    def cost(self, weights: Weights) -> float:
        """Estimate in microseconds, fitted to an H200: to start and to load x, to read the weights (with all warps
        busy, or one alone), and to merge."""
        columns, warps = self.columns(weights), self.warps // self.parts
        stages = columns / _STAGE
        alone = -(-weights.tiles // (self.across * warps)) * stages / self.parts * (0.75 + 0.1 * self.tall)
        busy = -(-weights.tiles // self.across) * stages * _BUSY[weights.bits]
        if weights.quantized:
            busy *= max(1.0, self.tall / 2 + 0.1) * (0.7 + 3.6 / self.warps)
        merge = 2.0 + 0.05 * self.splits * self.tall + self.splits * weights.tiles * self.tall * 1024 / 3e6
        start = 3.5 + self.rows * columns / 20000 + 0.3 * (self.parts - 1) * self.tall
        return start + max(alone, busy) + (merge if self.splits > 1 else 0.0)


@cache
def launch(weights: Weights, rows: int, chip: DeviceProperties) -> Launch | None:
    """The cheapest launch for `rows`, one of `SIZES`; None where x does not fit into shared memory."""
    fitting = (one for one in _launches(weights, rows, chip) if one.shared(weights) <= chip.shared)
    return min(fitting, key=lambda one: one.cost(weights), default=None)


def _launches(weights: Weights, rows: int, chip: DeviceProperties) -> Iterator[Launch]:
    depth = 4 if rows == 8 and weights.bits == 4 else 3
    for warps, parts in product(_WARPS, _PARTS):
        for splits in range(1, min(_MOST_SPLITS, weights.inputs // weights.eight // parts, chip.processors) + 1):
            across = min(-(-weights.tiles * parts // warps), chip.processors // splits)
            yield Launch(rows, depth, warps, parts, splits, across)


class SkinnyGemm:
    """x W^T for weights W (N, K), quantized to `bits` bits with `scales` and `biases` in groups of `group`, or not (16
    bits), and x of up to `most_rows` rows (None: as many as pay). `kernel` makes the kernel for `chip`. Products that
    come one after the other may share a `workspace`, and others with an `order`. Raises NotImplementedError for weights
    that the kernel does not support."""

    def __init__(
        self,
        weight: Any,
        scales: Any | None = None,
        biases: Any | None = None,
        bits: int = 16,
        group: int = 0,
        kernel: NewKernel = CudaKernel,
        chip: DeviceProperties | None = None,
        workspace: Workspace | None = None,
        order: LaunchOrder | None = None,
        most_rows: int | None = None,
    ) -> None:
        self._kernel = kernel
        self._order = order
        self._workspace = Workspace(mx.float32) if workspace is None else workspace
        self._chip = DeviceProperties.of(mx.device_info()) if chip is None else chip
        self._arrays = [weight, weight, weight] if scales is None else [weight, scales, biases]
        dtype = self._arrays[1].dtype
        known = scales is None or (bits in MOST_ROWS and group in _GROUPS)
        if not known or dtype not in (mx.bfloat16, mx.float16):
            raise NotImplementedError(f"weights of {bits} bits in groups of {group} with scales in {dtype}")
        columns = int(weight.shape[1]) * (1 if scales is None else 32 // bits)
        self._weights = Weights(int(weight.shape[0]), columns, bits, _UNQUANTIZED_GROUP if scales is None else group)
        if self._weights.inputs % self._weights.eight or self._weights.outputs < _TILE:
            raise NotImplementedError(f"a product of {self._weights.inputs} columns and {self._weights.outputs} rows")
        self.most_rows = self._most_rows(most_rows or MOST_ROWS[bits])
        self._workspace.reserve(max(self._partial(size) for size in SIZES if size <= self.most_rows))
        self._counters = {parts: mx.zeros((parts, self._weights.tiles), mx.int32) for parts in _PARTS}
        mx.eval(self._counters)

    def _most_rows(self, asked: int) -> int:
        """The most rows that the kernel takes, of as many as were `asked` for. Raises NotImplementedError where there
        are none."""
        most = [size for size in SIZES if size <= asked]
        fitting = list(takewhile(lambda size: self._launch(size) is not None, most))
        if not fitting:
            raise NotImplementedError(f"{self._weights.inputs} columns: they need more shared memory than there is")
        return fitting[-1]

    def _launch(self, rows: int) -> Launch | None:
        return launch(self._weights, next(size for size in SIZES if rows <= size), self._chip)

    def _partial(self, rows: int) -> int:
        """Partial sums of blocks that share tiles."""
        found = self._launch(rows)
        return 1 if found is None or found.splits == 1 else found.splits * self._weights.tiles * found.tall * 128

    def __call__(self, x: Any, bias: Any | None = None) -> Any:
        """(T, N) of `x` (T, K), at most `most_rows` rows, in the type of the scales or of weights without; plus `bias`
        (N,)."""
        config, weights = self._launch(x.shape[0]), self._weights
        assert config is not None
        partial = self._workspace.array(self._partial(x.shape[0]))
        order = self._order
        others = [*(() if bias is None else (bias,)), *(() if order is None else (order.last,))]
        y = _made(self._kernel, self._chip.shared, order is not None, bias is not None)(
            [x, *self._arrays, self._counters[config.parts], partial, *others],
            [
                ("T", x.dtype),
                ("ROWS", config.rows),
                ("BITS", weights.bits),
                ("GROUP", weights.group),
                ("DEPTH", config.depth),
                ("BIASED", bias is not None),
            ],
            blocks=(config.across, config.splits),
            threads=32 * config.warps,
            shapes=[(x.shape[0], weights.outputs)],
            dtypes=[x.dtype],
        )[0]
        if order is not None:
            order.last = y
        return y


@cache
def _made(kernel: NewKernel, shared: int, ordered: bool, biased: bool) -> CudaKernel:
    """The kernel, with all the shared memory there is: MLX asks for it when it first loads a kernel, not at each
    launch. The number of parts comes with the counters' shape: as a template parameter it would mean another
    compilation."""
    files = ["device/numbers.cuh", "fused/skinny_gemm.cuh"]
    others = [*(["added"] if biased else []), *(["after"] if ordered else [])]
    body = _BODY.replace("ADDED", "added" if biased else "(const T*)nullptr")
    return kernel(
        "skinny_gemm",
        ["x", "w", "s", "b", "counters", "partial", *others],
        ["out"],
        body,
        files=files,
        shared_memory=shared,
    )
