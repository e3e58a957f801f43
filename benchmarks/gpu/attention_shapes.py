"""Attention kernels on a GPU at the shapes of model families: correctness, and times beside the floor and MLX.

    python benchmarks/gpu/attention_shapes.py [KIND ...] [--small] [--no-times]

Each kind of attention is first compared with float32: tokens that decode and prompts, in pages dealt out at random.
Then times in bfloat16: decode steps with their share of 4.3 TB/s for the keys and values that they see, and a prompt
with its share of 790 TFLOP/s, beside MLX's own attention over dense arrays of one length, which mlx-lm would call. A
kind with several ways to compute it has a line for each. A way that fails is shown, and the next one runs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

from benchmarks.gpu.attention import BANDWIDTH, PAGE, TOLERANCE, Case, reference, write  # noqa: E402
from benchmarks.gpu.timing import seconds  # noqa: E402

from treadle.runner.device.properties import DeviceProperties  # noqa: E402
from treadle.runner.kv.paged.kernels import AttentionShape, Kernels  # noqa: E402

FLOPS = 7.9e14
DECODE = ((1, 640), (8, 640), (32, 640), (128, 640), (8, 8192))
PROMPT = 2048
CHECKED = (
    [(1, 639), (1, 2500), (1, 0), (1, 131), (1, 4095)],
    [(300, 500), (70, 0), (40, 3000)],
)
"""Rows of (tokens, position): those that decode, and prompts."""
SMALL = ([(1, 90), (1, 0)], [(40, 50), (70, 0)])


@dataclass(frozen=True)
class Kind:
    """A family's attention. `ways` are fields of `Kernels` for each way to compute it, by name: of the wide kernel the
    blocks on a multiprocessor, the cached tokens of a tile, and the tiles of a ring."""

    shape: AttentionShape
    window: int = 0
    ways: dict[str, dict[str, Any]] = field(default_factory=lambda: {"": {}})

    def kernels(self, way: str, new: type[Kernels] = Kernels, bits: int = 16) -> Kernels:
        made = new.of(self.shape, PAGE, bits, DeviceProperties.of(mx.device_info()))
        for name, value in self.ways[way].items():
            setattr(made, name, value)
        return made


def _kind(heads: int, query_heads: int, dim: int, window: int = 0, *, ways: Any = None, **more: Any) -> Kind:
    shape = AttentionShape(heads, query_heads, dim, mx.bfloat16, **more)
    return Kind(shape, window, {"": {}} if ways is None else ways)


KINDS = {
    "128 (Qwen3 8B)": _kind(8, 32, 128),
    "gpt-oss, windowed": _kind(8, 64, 64, 128, sinks=True),
    "gpt-oss": _kind(8, 64, 64, sinks=True),
    "Gemma 2 9B": _kind(8, 16, 256, softcap=50.0),
    "Gemma 4 26B, full layers": _kind(
        2,
        16,
        512,
        ways={
            "2 x 16 x 2": {"wide_way": (16, 4, 2)},
            "1 x 32 x 2": {"wide_way": (32, 8, 2)},
            "1 x 32 x 3": {"wide_way": (32, 8, 3)},
        },
    ),
    "MLA, 128 heads": _kind(
        1,
        128,
        576,
        value_dim=512,
        latent=True,
        ways={"1 x 64 x 2": {"wide_way": (64, 8, 2)}, "1 x 32 x 3": {"wide_way": (32, 8, 3)}},
    ),
    "MLA, 20 heads": _kind(
        1,
        20,
        576,
        value_dim=512,
        latent=True,
        ways={
            "2 x 32 x 2": {"wide_way": (32, 4, 2)},
            "2 x 16 x 4": {"wide_way": (16, 4, 4)},
            "1 x 64 x 2": {"wide_way": (64, 8, 2)},
            "1 x 32 x 4": {"wide_way": (32, 8, 4)},
        },
    ),
    "192 and 128 (MiMo)": _kind(4, 64, 192, value_dim=128),
    "192 and 128 (DeepSeek-V2-Lite)": _kind(16, 16, 192, value_dim=128),
    "MQA 48 (StarCoder)": _kind(1, 48, 128, ways={"prefill kernel": {}, "wide kernel": {"wide": True}}),
}


def check(kind: Kind, way: str, rows: Sequence[Sequence[tuple[int, int]]], new: type[Kernels] = Kernels) -> str:
    """Compare with float32; return the largest relative error of each group of rows, or what is wrong."""
    found = []
    for some in rows:
        case = Case.of(kind.kernels(way, new), some)
        written, right = write(case)
        got = case.attend(case.tiles(kind.window), written, window=kind.window).astype(mx.float32)
        expected = reference(case, kind.window)
        error = float(mx.abs(got - expected).max() / mx.abs(expected).max())
        clean = mx.abs(case.counters).max().item() == 0
        fine = error < TOLERANCE and right and clean
        found.append(f"{error:.4f}" if fine else f"WRONG: {error:.4f}, written {right}, counters {clean}")
    return ", ".join(found)


def mlx_attention(kind: Kind, rows: int, queries: int, length: int) -> Callable[[int], Any]:
    """MLX's attention of so many rows at one length, as mlx-lm calls it, over one dense array."""
    shape = kind.shape
    keys_dim, values_dim = shape.widest
    length = min(length, kind.window) if kind.window and queries == 1 else length
    q = mx.random.normal((rows, shape.query_heads, queries, keys_dim)).astype(shape.dtype)
    keys = mx.random.normal((rows, shape.heads, length, keys_dim)).astype(shape.dtype)
    values = mx.random.normal((rows, shape.heads, length, values_dim)).astype(shape.dtype)
    scale, sinks = keys_dim**-0.5, mx.zeros(shape.query_heads, shape.dtype) if shape.sinks else None
    mx.eval(q, keys, values, sinks)
    if shape.latent:
        parts = [q[..., :values_dim], q[..., values_dim:], keys[..., :values_dim], keys[..., values_dim:]]
        parts = [mx.contiguous(part) for part in parts]
        mx.eval(parts)

        def latent(_: int) -> Any:
            scores = (parts[1] * scale) @ parts[3].swapaxes(-1, -2)
            if queries > 1:
                sees = mx.arange(length)[None] <= mx.arange(queries)[:, None]
                scores = mx.where(sees, scores, mx.array(mx.finfo(scores.dtype).min, scores.dtype))
            return mx.fast.scaled_dot_product_attention(parts[0], parts[2], parts[2], scale=scale, mask=scores)

        return latent
    if shape.softcap:

        def capped(_: int) -> Any:
            grouped = (q * scale).reshape(rows, shape.heads, -1, queries, keys_dim)
            scores = mx.tanh(grouped @ keys[:, :, None].swapaxes(-1, -2) / shape.softcap) * shape.softcap
            return mx.softmax(scores, precise=True, axis=-1) @ values[:, :, None]

        return capped
    mask = "causal" if queries > 1 else None
    return lambda _: mx.fast.scaled_dot_product_attention(q, keys, values, scale=scale, mask=mask, sinks=sinks)


def decode_time(kind: Kind, way: str, rows: int, length: int) -> tuple[float, float]:
    """Seconds of a decode step's attention of one layer, and those of the bytes that it must read. Several pools, so
    that no cache holds them."""
    kernels = kind.kernels(way)
    seen = min(length, kind.window) if kind.window else length
    size = rows * length * kernels.page_bytes // PAGE
    case = Case.of(kernels, [(1, length - 1)] * rows, pools=max(1, min(4, int(1.5e9 // size))))
    tiles, written = case.tiles(kind.window), mx.zeros(1, mx.int32)
    mx.eval(tiles.items, written)
    took = seconds(lambda i: case.attend(tiles, written, i % len(case.pools), kind.window), 40)
    return took, rows * seen * kernels.page_bytes / PAGE / BANDWIDTH


def prompt_time(kind: Kind, way: str, count: int) -> tuple[float, float]:
    """Seconds of a prompt's attention of one layer, and those of its arithmetic."""
    kernels = kind.kernels(way)
    case = Case.of(kernels, [(count, 0)])
    tiles, written = case.tiles(kind.window), mx.zeros(1, mx.int32)
    mx.eval(tiles.items, written)
    took = seconds(lambda _: case.attend(tiles, written, 0, kind.window), 10)
    seen = sum(min(i + 1, kind.window or count) for i in range(count))
    return took, 2 * seen * kind.shape.query_heads * sum(kind.shape.widest) / FLOPS


def _tried(run: Callable[[], str]) -> str:
    """Return what `run` says, or why it failed: the next way runs in any case."""
    try:
        return run()
    except Exception as error:
        return f"FAILED: {type(error).__name__}: {str(error)[:300]}"


def _shown(kind: Kind, way: str, size: tuple[int, int, int], beside: float | None) -> str:
    rows, queries, length = size
    took, floor = decode_time(kind, way, rows, length) if queries == 1 else prompt_time(kind, way, queries)
    ratio = f", {took / beside:.2f} of MLX's {beside * 1e6:.0f}" if beside else ""
    return f"{took * 1e6:7.1f} us = {floor / took:4.0%}{ratio}"


def lines(kind: Kind, decode: Sequence[tuple[int, int]], prompt: int) -> Iterator[str]:
    """Times of all ways at each size, as lines."""
    sizes = [*((rows, 1, length) for rows, length in decode), (1, prompt, prompt)]
    for rows, queries, length in sizes:
        try:
            beside = seconds(mlx_attention(kind, rows, queries, length), 20)
        except Exception:
            beside = None
        for way in kind.ways:
            run = partial(_shown, kind, way, (rows, queries, length), beside)
            name = f"decode {rows} x {length}" if queries == 1 else f"prompt {queries}"
            yield f"  {name:16} {way:20} {_tried(run)}"
        mx.clear_cache()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kinds", nargs="*", help="beginnings of kinds' names; all by default")
    parser.add_argument("--small", action="store_true", help="few tokens: runs in seconds once kernels are compiled")
    parser.add_argument("--no-times", action="store_true")
    options = parser.parse_args()
    print(f"# {mx.device_info()}", flush=True)
    failed, began = False, time.perf_counter()
    for name, kind in KINDS.items():
        if options.kinds and not name.startswith(tuple(options.kinds)):
            continue
        print(name, flush=True)
        for way in kind.ways:
            found = _tried(partial(check, kind, way, SMALL if options.small else CHECKED))
            failed = failed or not found[0].isdigit() or "WRONG" in found
            print(f"  errors {way:20} {found} ({time.perf_counter() - began:.0f} s)", flush=True)
        if not options.no_times:
            for line in lines(kind, ((2, 128),) if options.small else DECODE, 256 if options.small else PROMPT):
                print(line, flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
