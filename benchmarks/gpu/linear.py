"""Matrix products of few rows with quantized weights on a GPU: correctness, and times beside MLX and the floor.

    python benchmarks/gpu/linear.py [--ways 4 8 3 mxfp4 ...] [--rows 1 4 8 32 64] [--shape 4096x11008 ...] [--no-times]

First random shapes, rows, types and ways of quantizing against a product in float32. Then times for layers of real
shapes in bfloat16, weights in turn from several arrays so that no cache holds them: the skinny and the packed kernel
where they take the weight, weights dequantized for MLX's product, and MLX's own product with x as (T, K), (1, T, K),
(T, 1, K) and padded to eight rows. The floor is the weights' bytes at 4.3 TB/s. Calls faster than the host's own work
show the host's time, so a call that computes next to nothing is measured first; a decoder's compiled pass has no such
work. A way that fails is printed, and the next one runs.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

from benchmarks.gpu.timing import seconds  # noqa: E402

from treadle.runner.device.cuda import CudaKernel, NewKernel  # noqa: E402
from treadle.runner.fused.dequantize import Dequantizer  # noqa: E402
from treadle.runner.fused.packed_gemm import PackedGemm  # noqa: E402
from treadle.runner.fused.quantization import Quantization  # noqa: E402
from treadle.runner.fused.skinny_gemm import SkinnyGemm  # noqa: E402

BANDWIDTH = 4.3e12
TOLERANCE = 0.02
MOST_ROWS = 64
WAYS = {
    "4": Quantization(4, 64),
    "8": Quantization(8, 64),
    "4-32": Quantization(4, 32),
    "8-32": Quantization(8, 32),
    "2": Quantization(2, 64),
    "3": Quantization(3, 64),
    "5": Quantization(5, 64),
    "6": Quantization(6, 64),
    "mxfp4": Quantization(4, 32, "mxfp4"),
    "mxfp8": Quantization(8, 32, "mxfp8"),
    "nvfp4": Quantization(4, 16, "nvfp4"),
}
SHAPES = ((4096, 4096), (24576, 4096), (4096, 11008))
"""Outputs and inputs: the out layer, and gate and up, of an 8B shape; Olmo 2's down layer."""
Weights = tuple[Any, Any, Any]
Product = Callable[[Any], Any]


def weights(outputs: int, inputs: int, way: Quantization, dtype: Any) -> Weights:
    """Return random weights, with their scales, and biases where they have any."""
    found = way.quantize((mx.random.normal((outputs, inputs)) * 0.05).astype(dtype))
    mx.eval([part for part in found if part is not None])
    return found


def exact(x: Any, quantized: Weights, way: Quantization) -> Any:
    """Compute the product in float32."""
    return x.astype(mx.float32) @ way.dequantize(*quantized).astype(mx.float32).T


def check(
    cases: int,
    kernel: NewKernel = CudaKernel,
    dtypes: Sequence[Any] = (mx.bfloat16, mx.float16),
    *,
    most_outputs: int = 6000,
) -> bool:
    """Run random cases of both kernels, each twice, as a launch leaves its counters for the next; print the wrong
    ones."""
    rng, worst, wrong = random.Random(0), 0.0, 0
    for case in range(cases):
        dtype, rows, outputs = rng.choice(dtypes), rng.randint(1, MOST_ROWS), rng.randint(16, most_outputs)
        way = Quantization(rng.choice([8, 4]), rng.choice([64, 128])) if case % 2 else rng.choice([*WAYS.values()])
        inputs = (8 * way.group if case % 2 else 128) * rng.randint(1, 9)
        quantized = weights(outputs, inputs, way, dtype)
        if case % 2:
            few: Product = SkinnyGemm(*quantized, way.bits, way.group, kernel)
        else:
            few = PackedGemm(*quantized, way, dtype, kernel)
        for _ in range(2):
            x = mx.random.normal((rows, inputs)).astype(dtype)
            expected = exact(x, quantized, way)
            error = float(mx.abs(few(x).astype(mx.float32) - expected).max() / mx.abs(expected).max())
            worst = max(worst, error)
            if not error < TOLERANCE:
                wrong += 1
                print(f"WRONG: {rows} rows, {outputs} x {inputs}, {way}, {dtype}: error {error}")
    print(f"{cases} cases, {wrong} products wrong, largest relative error {worst:.4f}", flush=True)
    return wrong == 0


def products(quantized: Weights, way: Quantization, kernel: NewKernel, dequantizer: Dequantizer) -> dict[str, Product]:
    """Ways to compute x W^T, by their names."""
    found: dict[str, Product] = {}
    if way.mode == "affine":
        found |= _supported("skinny", lambda: SkinnyGemm(*quantized, way.bits, way.group, kernel))
    found |= _supported("packed", lambda: PackedGemm(*quantized, way, mx.bfloat16, kernel))

    def dequantized(x: Any) -> Any:
        x, weight = dequantizer(x, *quantized, way)
        return x @ weight.T

    found["dequantized"] = dequantized
    found["mlx (T, K)"] = lambda x: way.multiply(x, *quantized)
    found["(1, T, K)"] = lambda x: way.multiply(x[None], *quantized)
    found["(T, 1, K)"] = lambda x: way.multiply(x[:, None], *quantized)
    found["to 8"] = lambda x: way.multiply(mx.pad(x, [(0, 8 - x.shape[0]), (0, 0)]), *quantized)[: x.shape[0]]
    return found


def _supported(name: str, make: Callable[[], Product]) -> dict[str, Product]:
    try:
        return {name: make()}
    except NotImplementedError:
        return {}


def times(outputs: int, inputs: int, way: Quantization, rows: Sequence[int], kernel: NewKernel = CudaKernel) -> None:
    """Print a line for each number of rows."""
    one = weights(outputs, inputs, way, mx.bfloat16)
    size = sum(part.nbytes for part in one if part is not None)
    copies = max(2, min(12, int(3e8 // size)))
    quantized = [one, *(weights(outputs, inputs, way, mx.bfloat16) for _ in range(copies - 1))]
    dequantizer = Dequantizer(kernel)
    dequantizer.takes(one[0], way, mx.bfloat16)
    ours = [products(weight, way, kernel, dequantizer) for weight in quantized]
    floor = size / BANDWIDTH
    for count in rows:
        x = mx.random.normal((count, inputs)).astype(mx.bfloat16)
        mx.eval(x)
        shares = "; ".join(_timed(ours, x, floor))
        print(f"{outputs} x {inputs}, {way}, {count} rows: floor {floor * 1e6:.0f} us; {shares}", flush=True)


def _timed(ours: Sequence[dict[str, Product]], x: Any, floor: float) -> Iterator[str]:
    for name in ours[0]:
        most = getattr(ours[0][name], "most_rows", MOST_ROWS)
        if x.shape[0] > most or (name == "to 8" and not 1 < x.shape[0] < 8) or (name == "(T, 1, K)" and x.shape[0] > 8):
            continue
        try:
            took = seconds(partial(_turn, ours, name, x))
            yield f"{name} {took * 1e6:.0f} us = {floor / took:.0%}"
        except Exception as error:
            yield f"{name} FAILED {type(error).__name__}: {str(error)[:80]}"


def _turn(ours: Sequence[dict[str, Product]], name: str, x: Any, i: int) -> Any:
    return ours[i % len(ours)][name](x)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["4", "8", "4-32", "3", "6", "mxfp4", "nvfp4"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 32, 64])
    parser.add_argument("--shape", nargs="+", help="such as 4096x11008: outputs and inputs")
    parser.add_argument("--cases", type=int, default=60)
    parser.add_argument("--no-times", action="store_true")
    parser.add_argument("--small", action="store_true", help="in seconds: one shape and three ways")
    options = parser.parse_args()
    if not all(0 < count <= MOST_ROWS for count in options.rows):
        parser.error(f"--rows are 1 to {MOST_ROWS}: the kernel's range")
    print(f"# {mx.device_info()}", flush=True)
    right = check(8 if options.small else options.cases)
    if not options.no_times:
        times(16, 512, WAYS["4"], [1])
        shapes = [tuple(map(int, shape.split("x"))) for shape in options.shape or ()] or list(SHAPES)
        ways = ["4", "3", "mxfp4"] if options.small else options.ways
        for shape, way in itertools.product(shapes[:1] if options.small else shapes, ways):
            times(shape[0], shape[1], WAYS[way], options.rows)
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
