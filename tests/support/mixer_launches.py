"""Reference computations of the launches of mixers on the host, with their preconditions checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from tests.support.cuda_launches import Launch, _normed, _number, _turned
from treadle.runner.fused.quantization import AFFINE, MODES, Quantization


def _gate_heads(launch: Launch) -> list[Any]:
    """Norm and gate each head, of which a warp has one."""
    t, y, gates = launch.template, launch.values("y"), launch.values("gates")
    heads, dim, places = t["HEADS"], t["D"], launch.view("places")
    launch.covers(32 * len(y) * heads)
    assert y.shape[1] == heads * dim
    assert places.max() + dim <= gates.shape[1]
    y = y.reshape(-1, heads, dim)
    y = _normed(y, launch.values("weight"), _number(t["EPS"])) if t["NORM"] else y
    gate = gates[:, places[:, None] + np.arange(dim)]
    share = 1 / (1 + np.exp(-gate))
    return [(y * (gate * share if t["SILU"] else share)).reshape(len(y), -1)]


def _put_latents(launch: Launch) -> list[Any]:
    """Put normalized latents and rotated keys into pages, and normalize queries of a low rank."""
    t, x, slots = launch.template, launch.values("x"), launch.view("slots")
    first, dims, rotated, rank = t["FIRST"], t["LATENT"], t["R"], t["QUERIES"]
    assert launch.blocks == (len(x), 2 if rank else 1)
    assert x.shape[1] >= first + dims + rotated
    latent = _normed(x[:, first : first + dims], launch.values("weight"), _number(t["EPS"]))
    keys = x[:, None, first + dims : first + dims + rotated]
    keys = _turned(keys, launch.view("cos_sin"), interleaved=t["INTERLEAVED"]) if t["ROTATED"] else keys
    pool = launch.view("pool").reshape(-1, dims + rotated)
    pool[slots[slots >= 0]] = np.concatenate([latent, keys[:, 0]], axis=-1)[slots >= 0]
    if not rank:
        return [np.zeros(1)]
    return [_normed(x[:, :rank], launch.values("query_weight"), _number(t["QUERY_EPS"]))]


def _head_product(launch: Launch) -> list[Any]:
    """Multiply each head by its weight; a block has four warps, `PARTS` for 16 outputs."""
    t, x = launch.template, launch.values("x")
    weight = _weights(launch)
    heads, outputs, columns = weight.shape
    assert (heads, columns) == (t["HEADS"], t["K"])
    assert len(x) <= t["ROWS"]
    assert launch.blocks[0] * 4 // t["PARTS"] * 16 >= outputs
    assert {t["FIRST"] % 8, t["STEP"] % 8, x.shape[1] % 8, columns % 64} == {0}
    own = _of_heads(x, t["FIRST"], t["STEP"], heads, columns)
    return [np.einsum("mhk,hnk->mhn", own, weight)]


def _rotate_heads(launch: Launch) -> list[Any]:
    """Rotate a part of each head, and scale it."""
    t = launch.template
    own = _of_heads(launch.values("x"), t["ROTATED_FIRST"], t["STEP"], t["HEADS"], t["R"])
    if t["ROTATED"]:
        own = _turned(own, launch.view("cos_sin"), interleaved=t["INTERLEAVED"])
    return [own * _number(t["SCALE"])]


def _absorb_queries(launch: Launch) -> list[Any]:
    assert launch.blocks[1] > launch.template["HEADS"]
    return [*_head_product(launch), *_rotate_heads(launch)]


def _of_heads(x: Any, first: int, step: int, heads: int, count: int) -> Any:
    """Columns (T, heads, count) of each head."""
    places = first + np.arange(heads)[:, None] * step + np.arange(count)
    assert places.max() < x.shape[1]
    return x[:, places]


def _weights(launch: Launch) -> Any:
    weight, t = launch.arrays["w"], launch.template
    if t["BITS"] < 16:
        way = Quantization(t["BITS"], t["GROUP"], MODES[t["MODE"]])
        weight = way.dequantize(weight, launch.arrays["s"], launch.arrays["b"] if way.mode == AFFINE else None)
    return np.array(weight.astype(mx.float32))


MIXER_LAUNCHES: dict[str, Callable[[Launch], list[Any]]] = {
    "gate_heads": _gate_heads,
    "put_latents": _put_latents,
    "head_product": _head_product,
    "rotate_heads": _rotate_heads,
    "absorb_queries": _absorb_queries,
}
