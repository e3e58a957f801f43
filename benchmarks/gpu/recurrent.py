"""Recurrent layers on a GPU: correctness at the shapes of real models, and times beside MLX's operations and the floor.

    python benchmarks/gpu/recurrent.py [--small] [--tilings] [--kinds delta ...] [--no-times]

First each kernel against mlx-lm's operations in float32, for prompts, chunks and decoding rows in one batch. Then
times: decode steps of several batch sizes, and prompts of 2,048 tokens. Each launch reads what the one before it wrote,
so that a graph of many has no parallel ones, and states in turn come from several pools so that no cache holds them.
The floor is the state, read and written, with inputs and outputs once, at 4.3 TB/s. `--tilings` times other divisions
among threads. MLX's operations and the chunked form are timed in fewer tries, as a prompt of them takes long.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

from benchmarks.gpu.timing import seconds  # noqa: E402
from mlx_lm.models.gated_delta import gated_delta_ops, normalize_qk  # noqa: E402
from mlx_lm.models.ssm import compute_dt, ssm_attn  # noqa: E402

from treadle.runner.recurrent import chunked  # noqa: E402
from treadle.runner.recurrent.kernels import RecurrentKernels, Tiling  # noqa: E402
from treadle.runner.recurrent.step import FRESH, Norm, RecurrentPass, SlotSegment, tables  # noqa: E402

BANDWIDTH = 4.3e12
LIMITS = (0.0, float("inf"))
TOLERANCE = 0.02
TYPE = mx.bfloat16


@dataclass(frozen=True)
class Shape:
    """A recurrence: its kind, heads, heads of keys and queries, and numbers a head has of values and of keys."""

    kind: str
    heads: int
    groups: int
    values: int
    keys: int

    @property
    def state(self) -> tuple[int, ...]:
        if self.kind == "mamba 1":
            return self.values, self.keys
        return self.heads, self.values, self.keys

    def size(self, tokens: int, rows: int) -> float:
        """Bytes that a step must move."""
        state = float(np.prod(self.state)) * 4 * 2 * rows
        gates = self.keys * self.heads if self.kind == "kda" else 2 * self.heads
        return state + tokens * 2 * (2 * self.heads * self.values + 2 * self.groups * self.keys + gates)


SHAPES = (
    Shape("delta", 32, 16, 128, 128),  # Qwen3-Next
    Shape("kda", 32, 32, 128, 128),  # Kimi-linear
    Shape("mamba 2", 128, 8, 64, 128),  # nemotron_h
    Shape("mamba 1", 1, 1, 8192, 16),  # Jamba
    Shape("lightning", 16, 16, 128, 128),  # Bailing linear
)
CONVOLUTION = (8192, 4)


def random(*shape: int, dtype: Any = TYPE, scale: float = 1.0) -> Any:
    return (mx.random.normal(shape) * scale).astype(dtype)


class Layer:
    """Random weights of a layer, a step's inputs, and the pools of its states."""

    def __init__(self, shape: Shape, tokens: int, slots: int, pools: int = 1, kernels: Any = None) -> None:
        self.shape, self.kernels = shape, kernels or RecurrentKernels()
        heads, groups, keys, values = shape.heads, shape.groups, shape.keys, shape.values
        self.q, self.k = (random(tokens, 1, groups, keys, scale=keys**-0.5) for _ in range(2))
        self.v = random(tokens, 1, heads, values)
        gate = {"kda": (heads, keys), "mamba 1": (values,)}.get(shape.kind, (heads,))
        self.a, self.b = random(tokens, 1, *gate), random(tokens, 1, heads)
        of = {"kda": (heads, 1), "mamba 1": (values, keys)}.get(shape.kind, (heads,))
        self.logs = random(*of, dtype=mx.float32, scale=0.5)
        self.bias = random(*gate, dtype=mx.float32, scale=0.5)
        self.skip, self.norm = random(heads), Norm(keys**-0.5, 1e-6)
        self.pools = [random(slots, *shape.state, dtype=mx.float32) for _ in range(pools)]
        if shape.kind == "mamba 1":
            self.a, self.v = mx.abs(self.a) * 0.1, self.v[:, :, 0]
            self.q, self.k = self.q[:, :, 0], self.k[:, :, 0]
        mx.eval(vars(self).get("pools"), self.q, self.k, self.v, self.a, self.b, self.logs, self.bias, self.skip)

    def run(self, step: RecurrentPass, values: Any, i: int = 0) -> Any:
        """Outputs of a launch on `values`, which are of the same shape."""
        pool, own = self.pools[i % len(self.pools)], self.kernels
        match self.shape.kind:
            case "delta" | "kda":
                arrays = [self.q, self.k, values, self.a, self.b, self.logs, self.bias]
                return own.gated_delta(*[*arrays, pool, step], norm=self.norm)
            case "mamba 2":
                arrays = [values, self.logs, self.k, self.q, self.skip, self.a, self.bias]
                return own.selective(*[*arrays, pool, step], limits=LIMITS)
            case "mamba 1":
                return own.channels(values, self.a, self.logs, self.k, self.q, pool, step)
        return own.lightning(self.q, self.k, values, -mx.exp(self.logs), pool, step, scale=0.1)

    def reference(self, at: slice, state: Any, values: Any | None = None, *, wide: bool = True) -> tuple[Any, Any]:
        """Outputs and state of one sequence's tokens by mlx-lm's operations, (1, n, ...) in float32 with `wide`; of
        several sequences of one token each where `state` has them."""
        values = self.v if values is None else values
        rows = state.shape[0]
        v, q, k, a, b = (x[at].reshape(rows, -1, *x.shape[2:]) for x in (values, self.q, self.k, self.a, self.b))
        if wide:
            v, q, k, a, b = (x.astype(mx.float32) for x in (v, q, k, a, b))
        match self.shape.kind:
            case "delta" | "kda":
                q, k = normalize_qk(q, k, inv_scale=self.norm.inverse_scale, eps=self.norm.epsilon)
                decay = mx.exp(-mx.exp(self.logs) * mx.logaddexp(a + self.bias, 0))
                return gated_delta_ops(q, k, v, decay, mx.sigmoid(b), state)
            case "mamba 2":
                return ssm_attn(v, self.logs, k, q, self.skip, a, self.bias, state, LIMITS)
            case "mamba 1":
                return self._mamba_1(v, a, k, q, state)
        decay = mx.broadcast_to(mx.exp(-mx.exp(self.logs)), v.shape[:3])
        q, k, v = (x.astype(mx.float32) for x in (q * 0.1, k, v))
        made = []
        for t in range(v.shape[1]):
            state = state * decay[:, t, :, None, None] + v[:, t, :, :, None] * k[:, t, :, None]
            made.append((state @ q[:, t, :, :, None]).squeeze(-1))
        return mx.stack(made, axis=1), state

    def _mamba_1(self, x: Any, dt: Any, b: Any, c: Any, state: Any) -> tuple[Any, Any]:
        made = []
        for t in range(x.shape[1]):
            state = state * mx.exp(dt[:, t, :, None] * -mx.exp(self.logs))
            state = state + (dt[:, t] * x[:, t])[..., None] * b[:, t, None]
            made.append((state @ c[:, t, :, None]).squeeze(-1))
        return mx.stack(made, axis=1), state

    def chunked(self, state: Any) -> tuple[Any, Any]:
        """One sequence's outputs and state in the chunked form."""
        q, k, v, a, b = (x[:, 0].astype(mx.float32) for x in (self.q, self.k, self.v, self.a, self.b))
        match self.shape.kind:
            case "delta" | "kda":
                q, k = normalize_qk(q, k, inv_scale=self.norm.inverse_scale, eps=self.norm.epsilon)
                logs = -mx.exp(self.logs) * mx.logaddexp(a + self.bias, 0)
                return chunked.delta(q, k, v, logs, mx.sigmoid(b), state)
            case "mamba 2":
                steps = compute_dt(a, self.bias, LIMITS)
                return chunked.linear(q, k, v * steps[..., None], -mx.exp(self.logs) * steps, state)
            case "mamba 1":
                return chunked.channels(v, a, -mx.exp(self.logs), k, q, state)
        return chunked.linear(q * 0.1, k, v, mx.broadcast_to(-mx.exp(self.logs), v.shape[:2]), state)


def step_of(counts: Iterable[int], slots: int, *, fresh: int = 0) -> RecurrentPass:
    """A step of segments of `counts` tokens; the first `fresh` begin their sequences. Targets follow the sources."""
    own, first = [], 0
    for i, count in enumerate(counts):
        own.append(SlotSegment(first, count, FRESH if i < fresh else i, slots - 1 - i))
        first += count
    step = RecurrentPass()
    step.begin(own, *map(mx.array, tables(own)))
    return step


def error(found: Any, wanted: Any) -> float:
    wanted = wanted.astype(mx.float32)
    return float(mx.abs(found.astype(mx.float32) - wanted).max() / mx.maximum(mx.abs(wanted).max(), 1e-6))


def check(shape: Shape, counts: tuple[int, ...], tiling: Tiling | None = None) -> bool:
    """Compare outputs and states of all segments of a step; print the largest error."""
    slots = 2 * len(counts)
    layer = Layer(shape, sum(counts), slots, kernels=RecurrentKernels(tiling))
    before = np.array(layer.pools[0])
    step = step_of(counts, slots, fresh=1)
    out = layer.run(step, layer.v)
    mx.eval(out)
    after, worst = np.array(layer.pools[0]), 0.0
    for one in step.segments:
        state = mx.array(before[one.source] if one.source >= 0 else np.zeros_like(before[0]))[None]
        at = slice(one.first, one.first + one.count)
        y, state = layer.reference(at, state)
        worst = max(worst, error(out[at].reshape(y.shape), y), error(mx.array(after[one.target])[None], state))
    print(
        f"{shape.kind} {counts}: largest relative error {worst:.4f}{'' if worst < TOLERANCE else '  WRONG'}", flush=True
    )
    return worst < TOLERANCE


def wrong(shape: Shape, counts: tuple[int, ...]) -> float:
    return float(not check(shape, counts))


def check_convolution(counts: tuple[int, ...]) -> bool:
    channels, width = CONVOLUTION
    slots = 2 * len(counts)
    x, weight = random(sum(counts), 1, channels), random(channels, width, 1)
    pool = random(slots, width - 1, channels)
    mx.eval(x, weight, pool)
    before = np.array(pool.astype(mx.float32))
    step = step_of(counts, slots, fresh=1)
    out = RecurrentKernels().convolve(x, weight, None, pool, step)
    mx.eval(out)
    after, worst = pool.astype(mx.float32), 0.0
    for one in step.segments:
        state = mx.array(before[one.source] if one.source >= 0 else np.zeros_like(before[0]))
        both = mx.concatenate([state, x[one.first : one.first + one.count, 0].astype(mx.float32)])
        y = mx.conv1d(both[None], weight.astype(mx.float32), groups=channels)[0]
        worst = max(worst, error(out[one.first : one.first + one.count, 0], y))
        worst = max(worst, error(after[one.target], both[one.count :]))
    print(
        f"convolution {counts}: largest relative error {worst:.4f}{'' if worst < TOLERANCE else '  WRONG'}", flush=True
    )
    return worst < TOLERANCE


def empty_concatenation(tokens: int = 3) -> bool:
    """Whether an array before which one of no columns is put stays as it is: the layer caches rely on it."""
    x = random(tokens, 1, 64)
    return bool(mx.array_equal(mx.concatenate([mx.zeros((tokens, 0, 64), TYPE), x], axis=1), x))


class Chain:
    """Calls that compute `launches` launches each, every one on the outputs of the one before, also of earlier calls: a
    graph has no two that could run side by side."""

    def __init__(self, run: Callable[[Any, int], Any], first: Any, launches: int) -> None:
        self._run = run
        self._values = first
        self._launches = launches

    def __call__(self, _: int) -> Any:
        for i in range(self._launches):
            self._values = self._run(self._values, i)
        return self._values


def per_launch(run: Callable[[Any, int], Any], first: Any, launches: int = 20) -> float:
    """Seconds of one launch of a chain."""
    return seconds(Chain(run, first, launches), 4) / launches


def attempt(name: str, run: Callable[[], float]) -> float | None:
    """Seconds; None, with a line, where it failed."""
    try:
        return run()
    except Exception as failure:  # a variant that the compiler refuses must not end the others
        print(f"{name} FAILED: {type(failure).__name__}: {str(failure)[:1500]}", flush=True)
        return None


def once(run: Callable[[], Any]) -> float:
    """Seconds of one run, its own best of two after one to warm up; the host builds it meanwhile."""
    mx.eval(run())
    tries = []
    for _ in range(2):
        began = time.perf_counter()
        mx.eval(run())
        tries.append(time.perf_counter() - began)
    return min(tries)


def line(name: str, floor: float, times: dict[str, float | None]) -> None:
    first = next(iter(times.values()))
    parts = []
    for way, t in times.items():
        if t is not None:
            ratio = f", {t / first:.1f}x" if first and t is not first else ""
            parts.append(f"{way} {t * 1e6:.1f} us = {floor / t:.0%}{ratio}")
    print(f"{name}: floor {floor * 1e6:.1f} us; {'; '.join(parts)}", flush=True)


def kernel_s(shape: Shape, counts: list[int], launches: int, tiling: Tiling | None = None) -> float:
    """Seconds of one launch on a step of segments of `counts` tokens."""
    slots = 2 * len(counts)
    pools = max(1, min(12, int(3e8 // (slots * np.prod(shape.state) * 4))))
    layer = Layer(shape, sum(counts), slots, pools, RecurrentKernels(tiling))
    step = step_of(counts, slots)
    return seconds(Chain(partial(layer.run, step), layer.v, launches), 4) / launches


def decode_times(shape: Shape, batches: Iterable[int], launches: int, tilings: list[Tiling]) -> None:
    for rows in batches:
        floor = shape.size(rows, rows) / BANDWIDTH
        ways: dict[str, float | None] = {}
        ways["kernel"] = attempt("kernel", partial(kernel_s, shape, [1] * rows, launches))
        for tiling in tilings:
            ways[_name(tiling)] = attempt(str(tiling), partial(kernel_s, shape, [1] * rows, launches, tiling))
        layer = Layer(shape, rows, rows)

        def run(layer: Layer = layer) -> Any:
            values, state = layer.v, layer.pools[0]
            for _ in range(8):
                values, state = layer.reference(slice(None), state, values, wide=False)
                values = values.reshape(layer.v.shape).astype(TYPE)
            return values, state

        whole = attempt("mlx", partial(once, run))
        ways["mlx"] = None if whole is None else whole / 8
        line(f"{shape.kind}, decode of {rows}", floor, ways)


def prompt_times(shape: Shape, prompts: list[list[int]], tilings: list[Tiling], loop: int) -> None:
    for counts in prompts:
        tokens = sum(counts)
        floor = shape.size(tokens, len(counts)) / BANDWIDTH
        ways: dict[str, float | None] = {}
        ways["kernel"] = attempt("kernel", partial(kernel_s, shape, counts, 4))
        for tiling in tilings:
            ways[_name(tiling)] = attempt(str(tiling), partial(kernel_s, shape, counts, 4, tiling))
        if len(counts) == 1:
            layer = Layer(shape, tokens, 1)
            ways["chunked operations"] = attempt("chunked", partial(once, partial(layer.chunked, layer.pools[0][0])))
            one = partial(layer.reference, slice(0, loop), layer.pools[0], wide=False)
            t = attempt("mlx", partial(once, one))
            ways[f"mlx (by {loop} tokens)"] = None if t is None else t * tokens / loop
        line(f"{shape.kind}, prompts of {counts[0]} x {len(counts)}", floor, ways)


def _name(tiling: Tiling) -> str:
    return f"{tiling.lanes} lanes {tiling.warps} warps {tiling.block} tokens"


def convolution_times(batches: Iterable[int], prompt: int) -> None:
    channels, width = CONVOLUTION
    weight = random(channels, width, 1)
    for counts in [*([1] * rows for rows in batches), [prompt]]:
        slots, tokens = 2 * len(counts), sum(counts)
        floor = (len(counts) * 2 * (width - 1) + 2 * tokens) * channels * 2 / BANDWIDTH
        pool, x = random(slots, width - 1, channels), random(tokens, 1, channels)
        step, kernels = step_of(counts, slots), RecurrentKernels()

        def ours(x: Any, _: int, pool: Any = pool, step: Any = step, kernels: Any = kernels) -> Any:
            return kernels.convolve(x, weight, None, pool, step)

        def theirs(x: Any, _: int, pool: Any = pool, rows: int = len(counts)) -> Any:
            both = mx.concatenate([pool[:rows], x.reshape(rows, -1, channels)], axis=1)
            return mx.conv1d(both, weight, groups=channels).reshape(x.shape)

        times = {
            "kernel": attempt("kernel", partial(per_launch, ours, x)),
            "mlx": attempt("mlx", partial(per_launch, theirs, x)),
        }
        name = f"decode of {len(counts)}" if tokens == len(counts) else f"a prompt of {tokens}"
        line(f"convolution, {name}", floor, times)


def tilings_of(shape: Shape, *, decode: bool) -> list[Tiling]:
    """Other divisions than the kernels' own. A decode step stages one token in any case."""
    arrays = 3 if shape.kind == "kda" else 2
    own = Tiling.of(shape.keys, arrays=arrays)
    some = [(own.lanes * 2, 4, 8), (own.lanes // 2, 4, 8), (own.lanes, 2, 8), (own.lanes, 8, 8), (own.lanes * 2, 2, 8)]
    if not decode:
        some += [(own.lanes, 4, 4), (own.lanes, 4, 16), (own.lanes * 4, 4, 8)]
    fits = (Tiling(*one) for one in some if one[0] > 0 and shape.keys % (4 * one[0]) == 0)
    return [one for one in fits if one.block * arrays * shape.keys * 8 <= 40 * 1024]


def main() -> None:
    parser, kinds = argparse.ArgumentParser(), [shape.kind for shape in SHAPES]
    parser.add_argument("--small", action="store_true", help="few cases, in seconds")
    parser.add_argument("--tilings", action="store_true", help="time other divisions among threads, too")
    parser.add_argument("--kinds", nargs="+", choices=kinds, default=kinds)
    parser.add_argument("--no-times", action="store_true")
    options = parser.parse_args()
    shapes = [shape for shape in SHAPES if shape.kind in options.kinds]
    print(f"# {mx.device_info()}", flush=True)
    counts = (1, 37, 1, 5) if options.small else (1, 150, 1, 64, 1, 3)
    right = empty_concatenation() and check_convolution(counts)
    for shape in shapes:
        failed = attempt(shape.kind, partial(wrong, shape, counts))
        right = right and failed == 0.0
    if not options.no_times:
        began = time.perf_counter()
        batches = (1, 32) if options.small else (1, 8, 32, 128)
        prompts = [[256]] if options.small else [[2048], [512] * 4, [2048] * 4]
        convolution_times(batches, prompts[0][0])
        for shape in shapes:
            decode_times(shape, batches, 20, tilings_of(shape, decode=True) if options.tilings else [])
            prompt_times(shape, prompts, tilings_of(shape, decode=False) if options.tilings else [], 64)
            print(f"# {time.perf_counter() - began:.0f} s", flush=True)
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
