"""Sampling on a GPU: correctness of the kernel, and its time beside MLX's operations.

    python benchmarks/gpu/sampling.py [--vocabulary 151936] [--draws 4096] [--no-times]

First many draws of one row of logits are counted and compared with the distribution that temperature, min_p, top_k and
top_p leave of it, computed in float64: chi-square over its degrees of freedom, which is about 1, and hardly a token
outside of it, as the kernel computes in float32. The same rows must get the same tokens again, and alone as batched.
Then times for B rows: by the kernel, and by MLX's operations.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

from benchmarks.gpu.timing import seconds  # noqa: E402
from tests.support.distribution import expected  # noqa: E402

from treadle.core.messages import Sampling, Submit  # noqa: E402
from treadle.runner.sampling.sampler import SamplingRow, draw  # noqa: E402
from treadle.runner.sampling.sampling_kernel import SamplingKernel  # noqa: E402

CASES = {
    "temperature": Sampling(temperature=1.0),
    "0.6, top_p 0.95, top_k 20": Sampling(temperature=0.6, top_p=0.95, top_k=20),
    "top_p 0.95": Sampling(temperature=1.0, top_p=0.95),
    "min_p 0.05": Sampling(temperature=1.0, min_p=0.05),
    "1.5, top_k 1000": Sampling(temperature=1.5, top_k=1000),
}


def make_logits(vocabulary: int, spread: float, seed: int) -> npt.NDArray[np.float32]:
    """Return logits (V,), a few of them far above the rest, with the ties that bfloat16 makes."""
    logits = np.random.default_rng(seed).normal(0, spread, vocabulary).astype(np.float32)
    logits[:: vocabulary // 30] += 4 * spread
    return np.array(mx.array(logits).astype(mx.bfloat16).astype(mx.float32))


def rows_of(sampling: Sampling, vocabulary: int, count: int) -> list[SamplingRow]:
    return [SamplingRow(Submit(id="", prompt=(0,), max_tokens=1, sampling=sampling), (), vocabulary)] * count


def check(kernel: SamplingKernel, vocabulary: int, draws: int, dtype: Any = mx.bfloat16) -> bool:
    """Whether the kernel's samples are right in every case; prints the findings."""
    all_logits = [make_logits(vocabulary, spread, 1) for spread in (1.0, 3.0)]
    found = [_check(kernel, name, logits, draws, dtype) for name in CASES for logits in all_logits]
    return all(found)


def _check(kernel: SamplingKernel, name: str, logits: npt.NDArray[np.float32], draws: int, dtype: Any) -> bool:
    sampling, batch = CASES[name], 64
    same = mx.repeat(mx.array(logits).astype(dtype)[None], batch, axis=0)
    rows, tokens, again = rows_of(sampling, len(logits), batch), [], False
    for start in range(0, draws, batch):
        found, redrawn = draw(same, rows, range(start, start + batch), kernel).resolve()
        again |= redrawn
        tokens += found
    repeated = draw(same, rows, range(batch), kernel).resolve()[0] == tokens[:batch]
    alone = [draw(same[:1], rows[:1], [i], kernel).resolve()[0][0] for i in range(4)] == tokens[:4]
    p, counts = expected(logits, sampling), np.bincount(tokens, minlength=len(logits))
    chi, most = chi_square(p * draws, counts)
    right = repeated and alone and chi < most and counts[p == 0].sum() <= draws / 1000
    print(
        f"{name:26} spread {logits.std():.1f}: {'right' if right else 'WRONG'}, chi-square {chi:.2f} (< {most:.2f}), "
        f"{counts[p == 0].sum()} outside, the same again {repeated}, alone {alone}, drawn again by sorting {again}",
        flush=True,
    )
    return right


def chi_square(expected_counts: npt.NDArray[np.float64], counts: npt.NDArray[np.int64]) -> tuple[float, float]:
    """Return chi-square over its degrees of freedom, and its bound by chance; rare tokens are counted as one."""
    likely = expected_counts >= 5
    expected_counts = np.append(expected_counts[likely], expected_counts[~likely].sum())
    counts = np.append(counts[likely], counts[~likely].sum())
    chi = ((counts - expected_counts) ** 2 / np.maximum(expected_counts, 1)).sum() / len(expected_counts)
    return float(chi), 1 + 5 * float(np.sqrt(2 / len(expected_counts)))


def time_ms(sampling: Sampling, kernel: SamplingKernel | None, vocabulary: int, count: int) -> float:
    logits = mx.array(np.stack([make_logits(vocabulary, 2.0, i) for i in range(count)])).astype(mx.bfloat16)
    rows, positions = rows_of(sampling, vocabulary, count), list(range(count))
    mx.eval(logits)

    def once(_: int) -> list[Any]:
        return draw(logits, rows, positions, kernel).arrays

    return seconds(once, 20) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--draws", type=int, default=4096)
    parser.add_argument("--no-times", action="store_true")
    options = parser.parse_args()
    kernel = SamplingKernel(options.vocabulary, mx.bfloat16)
    right = check(kernel, options.vocabulary, options.draws)
    if options.no_times or not right:
        sys.exit(not right)
    for name, sampling in CASES.items():
        for count in (1, 8, 32, 128):
            ours, theirs = (time_ms(sampling, one, options.vocabulary, count) for one in (kernel, None))
            print(f"{name:26} B {count:3}: kernel {ours:.3f} ms, operations {theirs:.3f} ms", flush=True)


if __name__ == "__main__":
    main()
