"""CUDA kernels for recurrent layers: one launch computes all segments of a step, and writes their states in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import mlx.core as mx

from ..device.cuda import CudaKernel, bits_of
from ..mlxlm import RecurrentState
from ..unsupported import Unsupported
from .mixing import Mixing
from .step import Norm, RecurrentPass

_FILES = ("device/numbers.cuh", "recurrent/recurrence.cuh", "recurrent/convolution.cuh")
_SCAN = """
  namespace r = treadle::recurrent;
  const r::Gates<GATES> gates{STEPS, BETAS, LOGS, BIASES, SKIPS,
      __int_as_float(LOW), __int_as_float(HIGH), BOUNDED,
      __int_as_float(QUERY_SCALE), __int_as_float(KEY_SCALE), __int_as_float(EPSILON)};
  r::scan<r::KIND, NORMALIZED, D, ROWS, HEADS, GROUPS, LANES, WARPS, BLOCK>(
      r::heads(q, q_strides), r::heads(k, k_strides), r::heads(v, v_strides), gates, segments, const_cast<S*>(pool),
      out);
"""
_CONVOLVE = """
  treadle::recurrent::convolve<WIDTH, BIAS>(x, weight, bias, segments, rows, const_cast<T*>(pool), out, x_shape[0],
      CHANNELS);
"""
_MIX = """
  T* const pools[] = {POOLS};
  treadle::recurrent::mix<WIDTH, BIAS, SILU, GATED, CHANNELS, ALL, BEFORE, AFTER>(
      x, columns, weight, bias, segments, rows, pools, out, x_shape[0], x_shape[1]);
"""
NO_KERNEL = "there is no kernel for its recurrence"
_MOST_SHARED = 48 * 1024


@dataclass(frozen=True)
class Tiling:
    """Division of a recurrence among threads: `lanes` of a warp share a row of the state, blocks have `warps` warps and
    stage `block` tokens in shared memory."""

    lanes: int
    warps: int = 4
    block: int = 8

    @classmethod
    def of(cls, dim: int, *, arrays: int = 2) -> Tiling:
        """Return the tiling for rows of `dim` numbers, where a token's staged data are `arrays` times a row. Raises
        Unsupported where there is none."""
        if dim % 4:
            raise Unsupported(f"recurrence kernels take states of a multiple of 4 numbers a row, not of {dim}")
        lanes = next(lanes for lanes in (4, 2, 1) if dim % (4 * lanes) == 0)
        while dim // lanes > 48 and dim % (8 * lanes) == 0 and lanes < 32:
            lanes *= 2
        # Values and gates of a token take less than two rows' worth of 128 numbers.
        fitting = [block for block in (8, 4, 2) if 2 * block * 4 * (arrays * dim + 256) <= _MOST_SHARED]
        if dim // lanes > 64 or not fitting:
            raise Unsupported(f"recurrence kernels have no memory for states of {dim} numbers a row")
        return cls(lanes, block=fitting[0])


@dataclass(frozen=True)
class _Kind:
    """Names of a recurrence in the kernel's text: its kind, and the expressions of `Gates` with their types."""

    name: str
    steps: str
    betas: str
    logs: str
    biases: str
    skips: str
    inputs: tuple[str, ...]

    def source(self) -> str:
        body = _SCAN.replace("KIND", self.name)
        of = {"STEPS": self.steps, "BETAS": self.betas, "LOGS": self.logs, "BIASES": self.biases, "SKIPS": self.skips}
        for name, expression in of.items():
            body = body.replace(name, expression)
        return body.replace("GATES", "TA, TB, TL, TO, TK")


_A, _B = "r::scalars(a, a_strides)", "r::scalars(b, b_strides)"
_NO_VIEW, _NONE = "{}", "nullptr"
_KINDS = {
    "DELTA": _Kind("DELTA", _A, _B, "logs", "biases", _NONE, ("a", "b", "logs", "biases")),
    "VECTOR": _Kind("VECTOR", "r::heads(a, a_strides)", _B, "logs", "biases", _NONE, ("a", "b", "logs", "biases")),
    "SELECTIVE": _Kind("SELECTIVE", _A, _NO_VIEW, "logs", "biases", "skips", ("a", "logs", "biases", "skips")),
    "CHANNEL": _Kind("CHANNEL", _A, _NO_VIEW, "logs", _NONE, _NONE, ("a", "logs")),
    "CONSTANT": _Kind("CONSTANT", _NO_VIEW, _NO_VIEW, "logs", _NONE, _NONE, ("logs",)),
}


@dataclass
class RecurrentKernels:
    """The kernels, compiled at their first use; a compiler's refusal is a RuntimeError at the evaluation.

    Arrays of tokens are (T, 1, ...), `pool` is (slots, ...), and is written in place: the output of the same call is
    what later passes wait for, as all run on one stream. `tiling` takes the place of the kernels' own choice.
    """

    kernel: ClassVar[type[CudaKernel]] = CudaKernel
    dtypes: ClassVar[tuple[Any, ...]] = (mx.float32, mx.bfloat16, mx.float16)

    tiling: Tiling | None = None
    _made: dict[str, CudaKernel] = field(default_factory=dict, repr=False, kw_only=True)

    @classmethod
    def check(cls, state: RecurrentState) -> None:
        """Raise Unsupported where the kernels can't compute on such a state."""
        if state.dtype not in cls.dtypes:
            raise Unsupported(f"recurrence kernels keep states in {', '.join(map(str, cls.dtypes))}, not {state.dtype}")
        if state.convolution is None:
            Tiling.of(state.shape[-1], arrays=3)

    def new_pool(self, slots: int, shape: Sequence[int], dtype: Any) -> Any:
        """A pool of `slots` states of `shape`, which takes its memory at once."""
        pool = mx.zeros((slots, *shape), dtype)
        mx.eval(pool)
        return pool

    def convolve(self, x: Any, weight: Any, bias: Any | None, pool: Any, step: RecurrentPass) -> Any:
        """Causal convolution (T, 1, C) of `x` of that shape by `weight` (C, width, 1) and `bias` (C,). `pool` (slots,
        width - 1, C) has the inputs before each segment."""
        channels, width = int(weight.shape[0]), int(weight.shape[1])
        if "convolve" not in self._made:
            names = ["x", "weight", "bias", "segments", "rows", "pool"]
            self._made["convolve"] = self.kernel("convolve", names, ["out"], _CONVOLVE, files=_FILES)
        return self._made["convolve"](
            [x, weight, weight if bias is None else bias, step.table, step.rows, pool],
            [("T", x.dtype), ("W", weight.dtype), ("WIDTH", width), ("CHANNELS", channels), ("BIAS", bias is not None)],
            blocks=(-(-x.size // 256), 1),
            threads=256,
            shapes=[x.shape],
            dtypes=[x.dtype],
        )[0]

    def mix(self, x: Any, mixing: Mixing, pools: Sequence[Any], step: RecurrentPass) -> Any:
        """Outputs (T, 1, C + E) of `mixing` for `x` (T, N). Each of `pools` (slots, width - 1, C / their number) has
        the inputs of equally many channels before each segment."""
        name = f"mix_{len(pools)}"
        if name not in self._made:
            names = [f"pool{i}" for i in range(len(pools))]
            text = _MIX.replace("POOLS", ", ".join(f"const_cast<T*>({one})" for one in names))
            inputs = ["x", "columns", "weight", "bias", "segments", "rows", *names]
            self._made[name] = self.kernel("mix", inputs, ["out"], text, files=_FILES)
        bias, (before, after) = mixing.bias, mixing.gates or (0, 0)
        shape = (x.shape[0], 1, mixing.outputs)
        return self._made[name](
            [x, mixing.columns, mixing.weight, mixing.weight if bias is None else bias, step.table, step.rows, *pools],
            [
                *[("T", x.dtype), ("WIDTH", mixing.width), ("BIAS", bias is not None), ("SILU", mixing.silu)],
                *[("GATED", mixing.gates is not None), ("CHANNELS", mixing.channels), ("ALL", mixing.outputs)],
                *[("BEFORE", before), ("AFTER", after)],
            ],
            blocks=(-(-shape[0] * shape[2] // 256), 1),
            threads=256,
            shapes=[shape],
            dtypes=[x.dtype],
        )[0]

    def gated_delta(
        self,
        q: Any,
        k: Any,
        v: Any,
        a: Any,
        b: Any,
        a_log: Any,
        dt_bias: Any,
        pool: Any,
        step: RecurrentPass,
        *,
        lower_bound: float | None = None,
        largest_beta: float = 1.0,
        norm: Norm | None = None,
    ) -> Any:
        """Gated delta rule (T, 1, Hv, Dv) of `q` and `k` (T, 1, Hk, Dk) and `v` (T, 1, Hv, Dv), as mlx-lm's
        `gated_delta_update`. `a` is (T, 1, Hv) with `a_log` and `dt_bias` (Hv,), or has a gate for each number of a
        key: (T, 1, Hv, Dk) with `a_log` (Hv, 1) and `dt_bias` (Hv, Dk). `b` is (T, 1, Hv), `pool` (slots, Hv, Dv, Dk).
        With `norm`, `q` and `k` come before their normalization. `lower_bound` is not positive."""
        kind = "VECTOR" if a.ndim == 4 else "DELTA"
        gates, limits = [a, b, a_log, dt_bias], (abs(lower_bound or 0.0), largest_beta)
        return self._scan(kind, [q, k, v], gates, pool, step, limits, bounded=lower_bound is not None, norm=norm)

    def selective(
        self,
        x: Any,
        a_log: Any,
        b: Any,
        c: Any,
        d: Any,
        dt: Any,
        dt_bias: Any,
        pool: Any,
        step: RecurrentPass,
        *,
        limits: tuple[float, float],
    ) -> Any:
        """State space model of Mamba 2 (T, 1, H, P) of `x` of that shape, as mlx-lm's `ssm_update`: `b` and `c` (T, 1,
        G, N), `dt` (T, 1, H), `a_log`, `d` and `dt_bias` (H,), steps within `limits`, `pool` (slots, H, P, N)."""
        return self._scan("SELECTIVE", [c, b, x], [dt, a_log, dt_bias, d], pool, step, limits)

    def channels(self, x: Any, dt: Any, a_log: Any, b: Any, c: Any, pool: Any, step: RecurrentPass) -> Any:
        """State space model of Mamba 1 (T, 1, C) of `x` of that shape, without the direct path: steps `dt` (T, 1, C),
        `a_log` (C, N), `b` and `c` (T, 1, N), `pool` (slots, C, N)."""
        arrays = [c[:, :, None], b[:, :, None], x[:, :, None]]
        return self._scan("CHANNEL", arrays, [dt, a_log], pool[:, None], step)[:, :, 0]

    def lightning(self, q: Any, k: Any, v: Any, logs: Any, pool: Any, step: RecurrentPass, *, scale: float) -> Any:
        """Lightning attention (T, 1, H, Dv) of `q` and `k` (T, 1, H, Dk) and `v` (T, 1, H, Dv) with decays exp(`logs`)
        (H,), queries scaled. `pool` is (slots, H, Dv, Dk)."""
        return self._scan("CONSTANT", [q, k, v], [logs], pool, step, scale=scale)

    def apply(self, function: Any, arrays: Sequence[Any], pool: Any, step: RecurrentPass) -> Any:
        """Raise Unsupported, as a model's own function is no kernel."""
        raise Unsupported(NO_KERNEL)

    def _scan(
        self,
        name: str,
        arrays: Sequence[Any],
        gates: Sequence[Any],
        pool: Any,
        step: RecurrentPass,
        limits: tuple[float, float] = (0.0, 1.0),
        *,
        bounded: bool = False,
        scale: float = 1.0,
        norm: Norm | None = None,
    ) -> Any:
        kind, (_, heads, rows, dim) = _KINDS[name], pool.shape
        dtype, values = arrays[0].dtype, arrays[2]
        tiling = self.tiling or Tiling.of(dim, arrays=3 if name == "VECTOR" else 2)
        if step.table.shape[0] == values.shape[0]:  # tokens of as many segments: each has one
            tiling = replace(tiling, block=1)
        if name not in self._made:
            names = ["q", "k", "v", *kind.inputs, "segments", "pool"]
            self._made[name] = self.kernel(name.lower(), names, ["out"], kind.source(), files=_FILES, strided=True)
        of = dict(zip(kind.inputs, gates, strict=True))
        scales = (scale, 1.0, 0.0) if norm is None else norm.scales
        numbers = dict(zip(("LOW", "HIGH", "QUERY_SCALE", "KEY_SCALE", "EPSILON"), (*limits, *scales), strict=True))
        types = {"TA": "a", "TB": "b", "TL": "logs", "TO": "biases", "TK": "skips"}
        return self._made[name](
            [*arrays, *gates, step.table, pool],
            [
                *[(type_, of[input_].dtype if input_ in of else dtype) for type_, input_ in types.items()],
                *[("Q", dtype), ("T", values.dtype)],
                *[("S", pool.dtype), ("D", dim), ("ROWS", rows), ("HEADS", heads)],
                ("GROUPS", int(arrays[0].shape[2])),
                *[("LANES", tiling.lanes), ("WARPS", tiling.warps), ("BLOCK", tiling.block), ("BOUNDED", bounded)],
                *[(number, bits_of(value)) for number, value in numbers.items()],
                ("NORMALIZED", norm is not None),
            ],
            blocks=(int(step.table.shape[0]) * -(-rows * tiling.lanes // (tiling.warps * 32)), heads),
            threads=tiling.warps * 32,
            shapes=[values.shape],
            dtypes=[values.dtype],
        )[0]
