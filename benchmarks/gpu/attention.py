"""Paged attention kernels on a GPU: correctness, and the share of the memory's bandwidth that they reach.

    python benchmarks/gpu/attention.py [--cases 60] [--no-times]

First random shapes, lengths, head counts, windows and types, prompts and decoding rows, in pages dealt out at random,
against attention in float32. Then times for 8 kv heads of 128 dimensions with 4 query heads each, in bfloat16:
decoding rows as a share of 4.3 TB/s, prompts in TFLOP/s, beside mx.fast.scaled_dot_product_attention over one dense
array, without a mask and with the one that rows of different lengths would need.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

from benchmarks.gpu.timing import seconds  # noqa: E402

from treadle.runner.device.staging import Staging  # noqa: E402
from treadle.runner.kv.paged.kernels import Kernels  # noqa: E402
from treadle.runner.kv.paged.pool import Pool  # noqa: E402
from treadle.runner.kv.paged.tiling import (  # noqa: E402
    COLUMNS,
    COUNT,
    COUNTERS,
    DECODE_ROWS,
    FIRST,
    PAGES,
    POSITION,
    Tiles,
)

BANDWIDTH = 4.3e12
PAGE = 32
TOLERANCE = 0.02
DECODE = ((1, 640), (8, 640), (32, 640), (128, 640), (8, 8192), (32, 8192), (1, 32768), (8, 32768))
PROMPTS = ((512, 0), (2048, 0), (8192, 0), (512, 8192), (96, 32768), (512, 32768))


@dataclass
class Case:
    """Rows of (tokens, position) each over one pool: all of few tokens, or all of many."""

    kernels: Kernels
    segments: npt.NDArray[np.int32]
    tables: npt.NDArray[np.int32]
    pages: Any
    pools: list[Any]
    queries: Any
    counters: Any
    sinks: Any | None = None

    @classmethod
    def of(cls, kernels: Kernels, rows: Sequence[tuple[int, int]], pools: int = 1) -> Case:
        counts, positions = (np.array(column) for column in zip(*rows, strict=True))
        held = -(-(counts + positions) // kernels.page)
        lines = np.zeros((len(counts), COLUMNS), np.int32)
        lines[:, FIRST], lines[:, COUNT], lines[:, POSITION] = np.cumsum(counts) - counts, counts, positions
        lines[:, PAGES] = np.cumsum(held) - held
        total = int(held.sum())
        tables = np.random.default_rng(0).permutation(total).astype(np.int32)
        heads, dim = kernels.heads, kernels.dim
        case = cls(
            kernels=kernels,
            segments=lines,
            tables=tables,
            pages=mx.array(tables),
            pools=[_pool(kernels, total) for _ in range(pools)],
            queries=_random((int(counts.sum()), heads * kernels.rep, 1, dim), kernels.dtype),
            counters=mx.zeros(COUNTERS, mx.int32),
            sinks=_random((heads * kernels.rep,), kernels.dtype) if kernels.sinks else None,
        )
        mx.eval(case.pages, case.queries, case.counters, case.sinks)
        return case

    @property
    def scale(self) -> float:
        return float(self.kernels.dim**-0.5)

    def tiles(self, window: int) -> Tiles:
        decode = int(self.segments[:, COUNT].max()) <= self.kernels.short
        tokens = int(self.segments[:, COUNT].sum())
        made = self.kernels.plan(self.segments, tokens, window=window, decode=decode)
        return replace(made, items=Staging().put(made.items)[0])

    def attend(self, tiles: Tiles, written: Any, pool: int = 0, window: int = 0) -> Any:
        return self.kernels.attend(
            self.parts[0],
            self.pools[pool],
            tiles,
            self.pages,
            self.counters,
            written,
            scale=self.scale,
            window=window,
            sinks=self.sinks,
            rotated=self.parts[1],
        )

    @cached_property
    def parts(self) -> tuple[Any, Any | None]:
        """Queries as the kernels take them: over latents in two arrays, the second one scaled."""
        if not self.kernels.latent:
            return self.queries, None
        border = self.kernels.value_dim
        parts = mx.contiguous(self.queries[..., :border]), mx.contiguous(self.queries[..., border:] * self.scale)
        mx.eval(parts)
        return parts

    def row(self, line: npt.NDArray[np.int32]) -> tuple[Any, Any]:
        """Return keys and values (kv heads, tokens, D or DV) of a segment's row, float32."""
        kernels, end = self.kernels, int(line[POSITION] + line[COUNT])
        pages = mx.array(self.tables[line[PAGES] : line[PAGES] + -(-end // kernels.page)])
        pool, border = self.pools[0], kernels.heads * kernels.page * kernels.dim
        stored = pool.data[pages].reshape(len(pages), -1).astype(mx.float32)
        planes = []
        for i, plane in enumerate((stored[:, :border], stored[:, border:])):
            if plane.size:
                plane = plane.reshape(len(pages), kernels.heads, kernels.page, -1)
                if pool.scales is not None:
                    plane = (plane - 128) * pool.scales[pages][:, i, ..., None]
                planes.append(plane.transpose(1, 0, 2, 3).reshape(kernels.heads, -1, plane.shape[-1])[:, :end])
        return planes[0], planes[1] if len(planes) == 2 else planes[0][..., : kernels.value_dim]


def _pool(kernels: Kernels, pages: int) -> Pool:
    """Return a full pool."""
    pool = kernels.new_pool(pages)
    if pool.scales is None:
        pool.data = _random(pool.data.shape, kernels.dtype)
    else:
        pool.data = mx.random.randint(0, 256, pool.data.shape).astype(mx.uint8)
        pool.scales = mx.random.uniform(1e-4, 2e-2, pool.scales.shape)
    mx.eval(pool.data, pool.scales)
    return pool


def _random(shape: tuple[int, ...], dtype: Any) -> Any:
    return mx.random.normal(shape).astype(dtype)


# Correctness ---------------------------------------------------------------------------------------------------------


def reference(case: Case, window: int) -> Any:
    """Compute the same attention in float32, row by row."""
    parts = []
    for line in case.segments:
        keys, values = (mx.repeat(array, case.kernels.rep, axis=0) for array in case.row(line))
        own = case.queries[int(line[FIRST]) : int(line[FIRST] + line[COUNT]), :, 0].astype(mx.float32)
        here = mx.arange(int(line[POSITION]), int(line[POSITION] + line[COUNT]))[:, None]
        seen = mx.arange(keys.shape[1])[None]
        sees = seen <= here
        sees = sees & (seen > here - window) if window else sees
        scores = own.transpose(1, 0, 2) @ keys.transpose(0, 2, 1) * case.scale
        if case.kernels.softcap:
            scores = mx.tanh(scores / case.kernels.softcap) * case.kernels.softcap
        scores = mx.where(sees, scores, -mx.inf)
        if case.sinks is not None:
            sinks = mx.broadcast_to(case.sinks.astype(mx.float32)[:, None, None], (*scores.shape[:2], 1))
            scores = mx.concatenate([scores, sinks], axis=-1)
        weights = mx.softmax(scores, axis=-1)[..., : keys.shape[1]]
        parts.append((weights @ values).transpose(1, 0, 2)[:, :, None])
    return mx.concatenate(parts)


def write(case: Case) -> tuple[Any, bool]:
    """Write new keys and values for all queries. Returns the array that `attend` depends on, and whether they are in
    the right slots."""
    total, heads, dim = case.queries.shape[0], case.kernels.heads, case.kernels.dim
    keys = _random((total, heads, 1, dim), case.kernels.dtype)
    values = _random((total, heads, 1, case.kernels.value_dim), case.kernels.dtype)
    border = case.kernels.value_dim
    values = keys[..., :border] if case.kernels.latent else values
    slots = []
    for line in case.segments:
        places = np.arange(line[POSITION], line[POSITION] + line[COUNT])
        slots.append(case.tables[line[PAGES] + places // PAGE] * PAGE + places % PAGE)
    where = mx.array(np.concatenate(slots).astype(np.int32))
    given = (keys, values)
    if case.kernels.latent:
        given = mx.contiguous(keys[..., :border]), mx.contiguous(keys[..., border:])
    written = case.kernels.write(case.pools[0], *given, where)
    mx.eval(written)
    right = True
    for line in case.segments:
        own = slice(int(line[FIRST]), int(line[FIRST] + line[COUNT]))
        for found, new in zip(case.row(line), (keys, values), strict=True):
            expected = new[own, :, 0].transpose(1, 0, 2).astype(mx.float32)
            slack = 0 if case.kernels.bits == 16 else mx.abs(expected).max(axis=-1, keepdims=True) / 240
            right = right and bool((mx.abs(found[:, int(line[POSITION]) :] - expected) <= slack).all())
    return written, right


def check(cases: int, new: type[Kernels] = Kernels, longest: int = 2500) -> bool:
    """Run random cases; print the wrong ones, and a summary."""
    rng, worst, wrong = random.Random(0), 0.0, 0
    for _ in range(cases):
        heads, rep = rng.choice([1, 2, 4, 8]), rng.choice([1, 2, 4, 5, 8, 16])
        dim, window = rng.choice([64, 80, 96, 128, 128, 256]), rng.choice([0, 0, 48, 512])
        most = 300 if rng.random() < 0.5 else DECODE_ROWS[-1] // rep
        least = 1 if most * rep <= DECODE_ROWS[-1] else DECODE_ROWS[-1] // rep + 1
        positions = (0, rng.randint(0, 100), rng.randint(0, longest))
        rows = [(rng.randint(least, most), rng.choice(positions)) for _ in range(rng.randint(1, 5))]
        case = Case.of(new(heads, dim, PAGE, rng.choice(new.dtypes), rng.choice([16, 16, 8]), rep=rep), rows)
        written, right = write(case)
        found = case.attend(case.tiles(window), written, window=window).astype(mx.float32)
        expected = reference(case, window)
        error = float(mx.abs(found - expected).max() / mx.abs(expected).max())
        clean = mx.abs(case.counters).max().item() == 0
        worst = max(worst, error)
        if not (right and clean and error < TOLERANCE):
            wrong += 1
            print(f"WRONG: {rows}, {case.kernels}, window {window}: error {error}, written {right}, counters {clean}")
    print(f"{cases} cases, {wrong} wrong, largest relative error {worst:.4f}", flush=True)
    return wrong == 0


# Speed ---------------------------------------------------------------------------------------------------------------


def decode_times(new: type[Kernels], lengths: Sequence[int], bits: int) -> None:
    """Time decode steps of one token a row: every byte of keys and values is read once. Several pools, so that no cache
    holds them."""
    kernels = new(8, 128, PAGE, mx.bfloat16, bits, rep=4)
    size = sum(lengths) * kernels.page_bytes // PAGE
    case = Case.of(kernels, [(1, length - 1) for length in lengths], pools=max(1, min(4, int(2e9 // size))))
    tiles, written = case.tiles(0), mx.zeros(1, mx.int32)
    mx.eval(tiles.items, written)
    times = {"paged": seconds(lambda i: case.attend(tiles, written, i % len(case.pools)), 40)}
    rows, longest = len(lengths), max(lengths)
    del case.pools[1:]
    dense = _random((rows, kernels.heads, longest, kernels.dim), kernels.dtype)
    queries = case.queries.reshape(rows, -1, 1, kernels.dim)
    mask = mx.arange(longest)[None] < mx.array(list(lengths))[:, None]
    mask = mask[:, None, None]
    mx.eval(dense, queries, mask)

    def attend(mask: Any, _: int) -> Any:
        return mx.fast.scaled_dot_product_attention(queries, dense, dense, scale=case.scale, mask=mask)

    for name, one in (("mx.fast", None), ("masked", mask)):
        times[name] = seconds(partial(attend, one), 20)
    name = f"decode {rows} x {longest}" if len(set(lengths)) == 1 else f"decode {longest} + {rows - 1} x {lengths[-1]}"
    shares = (f"{way} {t * 1e6:.0f} us = {size / t / BANDWIDTH:.0%}" for way, t in times.items())
    print(f"{name}: {'; '.join(shares)} ({tiles.blocks} blocks)", flush=True)


def prompt_times(new: type[Kernels], count: int, position: int, bits: int) -> None:
    kernels = new(8, 128, PAGE, mx.bfloat16, bits, rep=4)
    case = Case.of(kernels, [(count, position)])
    tiles, written = case.tiles(0), mx.zeros(1, mx.int32)
    mx.eval(tiles.items, written)
    times = {"paged": seconds(lambda _: case.attend(tiles, written), 10)}
    queries = case.queries[:, :, 0].transpose(1, 0, 2)[None]
    dense = _random((1, kernels.heads, position + count, kernels.dim), kernels.dtype)
    mx.eval(queries, dense)
    times["mx.fast"] = seconds(
        lambda _: mx.fast.scaled_dot_product_attention(queries, dense, dense, scale=case.scale, mask="causal"), 10
    )
    work = 4 * kernels.heads * kernels.rep * kernels.dim * (count * position + count * (count + 1) / 2)
    rates = (f"{way} {t * 1e6:.0f} us = {work / t / 1e12:.0f} TFLOP/s" for way, t in times.items())
    print(f"prompt {count} at {position}: {'; '.join(rates)} ({tiles.blocks} blocks)", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=60)
    parser.add_argument("--no-times", action="store_true")
    options = parser.parse_args()
    print(f"# {mx.device_info()}", flush=True)
    right = check(options.cases)
    if not options.no_times:
        for bits in (16, 8):
            print(f"# keys and values of {bits} bits", flush=True)
            for rows, length in DECODE:
                decode_times(Kernels, [length] * rows, bits)
            decode_times(Kernels, [32768, *[1024] * 7], bits)
            for count, position in PROMPTS:
                prompt_times(Kernels, count, position, bits)
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
