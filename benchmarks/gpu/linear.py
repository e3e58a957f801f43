"""Matrix products of few rows with quantized weights on a GPU: correctness, and times beside MLX and the floor.

    python benchmarks/gpu/linear.py [--bits 4 8] [--rows 1 8 16 32 64] [--no-times]

First random shapes, rows, types and ways of quantizing against a product in float32. Then times for the layers of an
8B shape in bfloat16, weights in turn from several arrays so that no cache holds them. The floor is the weights' bytes
at 4.3 TB/s. Calls faster than the host's own work show the host's time, so a call that computes next to nothing is
measured first; a decoder's compiled pass has no such work.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

from benchmarks.gpu.timing import seconds  # noqa: E402

from treadle.runner.device.cuda import CudaKernel, NewKernel  # noqa: E402
from treadle.runner.fused.skinny_gemm import SkinnyGemm  # noqa: E402

BANDWIDTH = 4.3e12
GROUP = 64
TOLERANCE = 0.02
MOST_ROWS = 64
SHAPES = ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (151936, 4096))
"""Outputs and inputs of an 8B shape's layers: q, k and v; out; gate and up; down; the head."""
Weights = tuple[Any, Any, Any]


def weights(outputs: int, inputs: int, bits: int, dtype: Any, group: int = GROUP) -> Weights:
    """Return random weights, with their scales and biases."""
    dense = (mx.random.normal((outputs, inputs)) * 0.05).astype(dtype)
    weight, scales, biases = mx.quantize(dense, group_size=group, bits=bits)
    mx.eval(weight, scales, biases)
    return weight, scales, biases


def exact(x: Any, quantized: Weights, bits: int, group: int = GROUP) -> Any:
    """Compute the product in float32."""
    weight = mx.dequantize(*quantized, group_size=group, bits=bits)
    return x.astype(mx.float32) @ weight.astype(mx.float32).T


def check(
    cases: int,
    kernel: NewKernel = CudaKernel,
    dtypes: Sequence[Any] = (mx.bfloat16, mx.float16),
    *,
    most_outputs: int = 6000,
) -> bool:
    """Run random cases, each twice, as a launch leaves its counters for the next; print the wrong ones."""
    rng, worst, wrong = random.Random(0), 0.0, 0
    for _ in range(cases):
        bits, group, dtype = rng.choice([8, 4]), rng.choice([64, 128]), rng.choice(dtypes)
        outputs, inputs, rows = rng.randint(16, most_outputs), 8 * group * rng.randint(1, 9), rng.randint(1, MOST_ROWS)
        quantized = weights(outputs, inputs, bits, dtype, group)
        few = SkinnyGemm(*quantized, bits, group, kernel)
        for _ in range(2):
            x = mx.random.normal((rows, inputs)).astype(dtype)
            expected = exact(x, quantized, bits, group)
            error = float(mx.abs(few(x).astype(mx.float32) - expected).max() / mx.abs(expected).max())
            worst = max(worst, error)
            if not error < TOLERANCE:
                wrong += 1
                print(f"WRONG: {rows} rows, {outputs} x {inputs}, {bits} bits in {group}, {dtype}: error {error}")
    print(f"{cases} cases, {wrong} products wrong, largest relative error {worst:.4f}", flush=True)
    return wrong == 0


def times(outputs: int, inputs: int, bits: int, rows: Sequence[int], kernel: NewKernel = CudaKernel) -> None:
    """Print a line for each number of rows."""
    size = outputs * inputs * (bits / 8 + 4 / GROUP)
    copies = max(2, min(12, int(3e8 // size)))
    quantized = [weights(outputs, inputs, bits, mx.bfloat16) for _ in range(copies)]
    ours = [SkinnyGemm(*one, bits, GROUP, kernel) for one in quantized]

    def our_product(x: Any, i: int) -> Any:
        return ours[i % copies](x)

    def their_product(x: Any, i: int) -> Any:
        return mx.quantized_matmul(x, *quantized[i % copies], transpose=True, group_size=GROUP, bits=bits)

    floor = size / BANDWIDTH
    for count in rows:
        x = mx.random.normal((count, inputs)).astype(mx.bfloat16)
        mx.eval(x)
        call_s = {
            "few rows": seconds(partial(our_product, x)),
            "mlx": seconds(partial(their_product, x)),
        }
        shares = (f"{way} {t * 1e6:.0f} us = {floor / t:.0%}" for way, t in call_s.items())
        print(f"{outputs} x {inputs}, {bits} bits, {count} rows: floor {floor * 1e6:.0f} us; {'; '.join(shares)}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bits", type=int, nargs="+", choices=(8, 4), default=[4, 8])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16, 32, 64])
    parser.add_argument("--cases", type=int, default=60)
    parser.add_argument("--no-times", action="store_true")
    options = parser.parse_args()
    if not all(0 < count <= MOST_ROWS for count in options.rows):
        parser.error(f"--rows are 1 to {MOST_ROWS}: the kernel's range")
    print(f"# {mx.device_info()}", flush=True)
    right = check(options.cases)
    if not options.no_times:
        times(16, 512, 4, [1])
        for bits, (outputs, inputs) in itertools.product(options.bits, SHAPES):
            times(outputs, inputs, bits, options.rows)
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
