"""Mixtures of experts on a GPU: correctness at real shapes, and times beside MLX's gather operations and the floor.

    python benchmarks/gpu/experts.py [--small] [--forms] [--no-checks] [--no-times]

Layers are mlx-lm's own with random weights. The floor is the bytes of the experts that a batch chooses, at 4.3 TB/s.
Times are of a compiled graph of 12 calls with different experts each, per call.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.activations import SwigluOAI
from mlx_lm.models.switch_layers import SwiGLU, SwitchGLU

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

from treadle.runner.device.cuda import CudaKernel, NewKernel  # noqa: E402
from treadle.runner.layers.experts import ExpertMakers  # noqa: E402
from treadle.runner.layers.grouped_product import Tuning  # noqa: E402

BANDWIDTH = 4.3e12
CALLS, MANY, SORTED = 12, 512, 64
TOLERANCE = 0.02


@dataclass(frozen=True)
class Shape:
    """Experts of a layer: `experts` of (`inputs`, `hidden`), of which each token chooses `top`."""

    name: str
    experts: int
    inputs: int
    hidden: int
    top: int
    biased: bool = False


QWEN = Shape("qwen3_moe", 128, 2048, 768, 8)
SHAPES = (
    QWEN,
    Shape("mixtral", 8, 4096, 14336, 2),
    Shape("gpt_oss", 32, 2880, 2880, 4, biased=True),
    Shape("glm4_moe", 40, 5120, 1536, 8),
)
FORMS: dict[str, dict[str, Any] | None] = {
    "16": None,
    "4": {"group_size": 64, "bits": 4},
    "8": {"group_size": 64, "bits": 8},
    "mxfp4": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    "nvfp4": {"group_size": 16, "bits": 4, "mode": "nvfp4"},
    "mxfp8": {"group_size": 32, "bits": 8, "mode": "mxfp8"},
    "4 in 32": {"group_size": 32, "bits": 4},
    "4 in 128": {"group_size": 128, "bits": 4},
    "2": {"group_size": 64, "bits": 2},
    "3": {"group_size": 64, "bits": 3},
    "5": {"group_size": 64, "bits": 5},
    "6": {"group_size": 64, "bits": 6},
}


def layer_of(shape: Shape, form: str, dtype: Any = mx.bfloat16) -> Any:
    """Return a SwitchGLU with random weights."""
    layer = SwitchGLU(8, 8, 1, activation=SwigluOAI() if shape.biased else SwiGLU(), bias=shape.biased)
    for name, (rows, columns) in {
        "gate_proj": (shape.hidden, shape.inputs),
        "up_proj": (shape.hidden, shape.inputs),
        "down_proj": (shape.inputs, shape.hidden),
    }.items():
        one = getattr(layer, name)
        one.weight = (mx.random.normal((shape.experts, rows, columns), dtype=mx.bfloat16) * columns**-0.5).astype(dtype)
        if shape.biased:
            one.bias = mx.random.normal((shape.experts, rows)).astype(dtype)
        mx.eval(one.parameters())
        if (options := FORMS[form]) is not None:
            setattr(layer, name, one.to_quantized(**options))
            mx.eval(getattr(layer, name).parameters())
    return layer


def exact(layer: Any) -> Any:
    """Return the layer with its weights in float32."""
    made = SwitchGLU(8, 8, 1, activation=layer.activation, bias="bias" in layer.down_proj)
    for name in ("gate_proj", "up_proj", "down_proj"):
        one, to = getattr(layer, name), getattr(made, name)
        to.weight = (one.weight if "scales" not in one else _dequantized(one)).astype(mx.float32)
        if "bias" in one:
            to.bias = one.bias.astype(mx.float32)
    return made


def computed(layer: Any, x: Any, indices: Any) -> Any:
    """Return what a layer in float32 gives, expert by expert: without MLX's gather operations."""
    chosen = np.array(indices).reshape(-1)
    flat, out = x.astype(mx.float32).reshape(-1, x.shape[-1]), np.empty((chosen.size, x.shape[-1]), np.float32)

    def product(one: Any, rows: Any, expert: int) -> Any:
        y = rows @ one.weight[expert].T
        return y + one.bias[expert] if "bias" in one else y

    for expert in np.unique(chosen).tolist():
        pairs = np.nonzero(chosen == expert)[0]
        rows = flat[mx.array(pairs // indices.shape[-1])]
        h = layer.activation(product(layer.up_proj, rows, expert), product(layer.gate_proj, rows, expert))
        out[pairs] = np.array(product(layer.down_proj, h, expert))
    return mx.array(out).reshape(*indices.shape, -1)


def _dequantized(one: Any) -> Any:
    scales = one.scales if one.mode != "affine" else one.scales.astype(mx.float32)
    biases = None if one.get("biases") is None else one.biases.astype(mx.float32)
    options = {"group_size": one.group_size, "bits": one.bits, "mode": one.mode}
    return mx.dequantize(one.weight, scales, biases, **options)


def chosen(shape: Shape, tokens: int, seed: int) -> Any:
    """Return (tokens, 1, top) different experts of each token."""
    dice = mx.random.uniform(shape=(tokens, 1, shape.experts), key=mx.random.key(seed))
    return mx.argsort(dice, axis=-1)[..., : shape.top].astype(mx.uint32)


def size_of(layer: Any) -> int:
    """Return the bytes of one expert."""
    parts = (layer.gate_proj, layer.up_proj, layer.down_proj)
    return sum(
        one[name].nbytes // one.weight.shape[0]
        for one in parts
        for name in ("weight", "scales", "biases", "bias")
        if one.get(name) is not None
    )


def ours(
    layer: Any, tuning: Tuning | None = None, kernel: NewKernel = CudaKernel, dtype: Any = mx.bfloat16
) -> Callable[..., Any]:
    """Return the layer's faster call."""
    found = ExpertMakers(dtype, kernel, tuning=tuning).switch_glu(layer)
    assert found is not None, "the kernels don't take this layer"
    return found.methods["__call__"]


def survive(run: Callable[[], None], what: str) -> bool:
    """Run; print a failure and go on."""
    try:
        run()
    except Exception as error:
        print(f"FAILED: {what}: {type(error).__name__}: {str(error)[:1500]}", flush=True)
        return False
    return True


def check(shape: Shape, form: str, dtype: Any, tokens: Sequence[int], kernel: NewKernel = CudaKernel) -> None:
    """Compare with the layer in float32. Raises ValueError where they differ."""
    mx.random.seed(1)
    layer = layer_of(shape, form, dtype)
    whole = exact(layer)
    made = ours(layer, kernel=kernel, dtype=dtype)
    worst, slowest = 0.0, 0.0
    for count in tokens:
        x = mx.random.normal((count, 1, shape.inputs)).astype(dtype)
        experts = chosen(shape, count, count)
        own = computed(whole, x, experts)
        began = time.perf_counter()
        found = made(x, experts).astype(mx.float32)
        mx.eval(found)
        slowest = max(slowest, time.perf_counter() - began)
        error = float(mx.abs(own - found).max() / mx.abs(own).max())
        worst = max(worst, error) if error == error else float("nan")
        if not error < TOLERANCE:
            raise ValueError(f"{count} tokens: error {error:.4f}")
        again = made(x, experts).astype(mx.float32)
        if not mx.array_equal(found, again).item():
            raise ValueError(f"{count} tokens: not the same result twice")
    print(
        f"right: {shape.name}, {form} bits, {dtype}: largest error {worst:.4f}, slowest first call {slowest:.1f} s",
        flush=True,
    )


def seconds(call: Callable[..., Any], x: Any, indices: Sequence[Any]) -> float:
    """Return the seconds of a call, the best of four compiled graphs."""
    graph = mx.compile(lambda x, *indices: [call(x, one) for one in indices])
    mx.eval(graph(x, *indices))
    tries = []
    for _ in range(4):
        began = time.perf_counter()
        mx.eval(graph(x, *indices), graph(x, *indices))
        tries.append((time.perf_counter() - began) / (2 * len(indices)))
    return min(tries)


def sorted_call(layer: Any) -> Callable[..., Any]:
    """Return MLX's operations over sorted tokens, whatever their number."""

    def call(x: Any, indices: Any) -> Any:
        flat = indices.flatten()
        order = mx.argsort(flat)
        back, at = mx.argsort(order), flat[order]
        x = x.reshape(-1, 1, x.shape[-1])[order // indices.shape[-1]]
        up, gate = (one(x, at, sorted_indices=True) for one in (layer.up_proj, layer.gate_proj))
        y = layer.down_proj(layer.activation(up, gate), at, sorted_indices=True)
        return y[back].reshape(*indices.shape, -1)

    return call


@dataclass(frozen=True)
class Batch:
    """A number of tokens with several choices of experts."""

    x: Any
    indices: Sequence[Any]

    @classmethod
    def of(cls, shape: Shape, tokens: int) -> Batch:
        x = mx.random.normal((tokens, 1, shape.inputs)).astype(mx.bfloat16)
        indices = [chosen(shape, tokens, seed) for seed in range(CALLS if tokens < MANY else 3)]
        mx.eval(x, indices)
        return cls(x, indices)

    @property
    def tokens(self) -> int:
        return int(self.x.shape[0])

    @cached_property
    def touched(self) -> float:
        """Different experts that are chosen, on average."""
        return sum(len(set(one.flatten().tolist())) for one in self.indices) / len(self.indices)


def times(
    shape: Shape, form: str, counts: Sequence[int], variants: Mapping[str, Tuning | None], *, mlx: bool = True
) -> None:
    """Print a line for each way and number of tokens. MLX comes first: scales are laid out anew for the kernels."""
    mx.random.seed(2)
    layer = layer_of(shape, form)
    size, batches = size_of(layer), [Batch.of(shape, count) for count in counts]
    ways: dict[str, Callable[[], Callable[..., Any]]] = {}
    if mlx:
        ways = {"mlx": lambda: layer, "mlx sorted": lambda: sorted_call(layer)}
    ways |= {name: partial(ours, layer, tuning) for name, tuning in variants.items()}
    for name, way in ways.items():
        call = way()
        for batch in batches:
            if name != "mlx sorted" or batch.tokens * shape.top < SORTED:
                run = partial(measure, f"{shape.name}, {form} bits, {name}", shape, size, call, batch)
                survive(run, f"{name} of {batch.tokens} tokens")


def measure(name: str, shape: Shape, size: int, call: Callable[..., Any], batch: Batch) -> None:
    took, floor = seconds(call, batch.x, batch.indices), batch.touched * size / BANDWIDTH
    work = 6 * batch.tokens * shape.top * shape.inputs * shape.hidden
    flops = f", {work / took / 1e12:.0f} TFLOP/s" if batch.tokens >= MANY else ""
    print(
        f"{name}, {batch.tokens} tokens of {batch.touched:.0f} experts: {took * 1e6:.0f} us = {floor / took:.0%} of "
        f"the floor of {floor * 1e6:.0f} us{flops}",
        flush=True,
    )


VARIANTS = {
    "4 parts, 4 deep": Tuning(parts=4, depth=4),
    "1 part, 3 deep": Tuning(parts=1, depth=3),
    "1 part, 4 deep": Tuning(parts=1, depth=4),
}
MANY_VARIANTS = {
    "few rows": Tuning(many_pairs=1 << 20),
    "64 rows, 3 deep": Tuning(many_pairs=1, tall_pairs=1 << 20),
    "128 rows, 3 deep": Tuning(many_pairs=1, tall_pairs=1),
    "64 rows, 4 deep": Tuning(many_pairs=1, tall_pairs=1 << 20, many_depth=4),
    "128 rows, 4 deep": Tuning(many_pairs=1, tall_pairs=1, many_depth=4),
}


def checks(*, every: bool) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield comparisons: the forms that are timed, or every form."""
    narrow = Shape("narrow", 8, 320, 256, 2)
    yield "mxfp4, biased", partial(check, replace(narrow, biased=True), "mxfp4", mx.bfloat16, (1, 7, 60, 220, 500))
    for form in FORMS if every else ("16", "4"):
        shape = replace(narrow, inputs=384) if form in ("4 in 128", "3", "5") else narrow
        counts = (1, 7, 60, 220, 500) if form in ("16", "4") else (7, 500)
        yield f"{form} bfloat16", partial(check, shape, form, mx.bfloat16, counts)
        if every:
            yield f"{form} float16", partial(check, shape, form, mx.float16, (7,))


def timings(*, small: bool) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield measurements, the most telling first: to compile a kernel takes one to two seconds."""
    counts = (1, 8, 32) if small else (1, 8, 32, 128, 2048)
    for form in ("16", "4"):
        yield form, partial(times, QWEN, form, counts, {"ours": None})
    if small:
        return
    for form in ("16", "4"):
        yield f"variants {form}", partial(times, QWEN, form, (1, 8, 32, 128), VARIANTS, mlx=False)
    for shape in SHAPES[1:]:
        for form in ("mxfp4",) if shape.biased else ("16", "4"):
            yield f"{shape.name} {form}", partial(times, shape, form, counts, {"ours": None})
    for form in ("16", "4"):
        yield f"many {form}", partial(times, QWEN, form, (256, 512, 1024, 2048), MANY_VARIANTS, mlx=False)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--small", action="store_true", help="one shape of few tokens")
    parser.add_argument("--forms", action="store_true", help="check every form of weights: three minutes")
    parser.add_argument("--no-checks", action="store_true")
    parser.add_argument("--no-times", action="store_true")
    options = parser.parse_args()
    print(f"# {mx.device_info()}", flush=True)
    began, right = time.perf_counter(), True
    todo = [] if options.no_checks else list(checks(every=options.forms))
    for what, run in todo + ([] if options.no_times else list(timings(small=options.small))):
        right &= survive(run, what)
        mx.clear_cache()
        print(f"# {time.perf_counter() - began:.0f} s", flush=True)
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
