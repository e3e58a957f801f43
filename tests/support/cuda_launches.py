"""Reference computations of the CUDA kernels' launches on the host, in NumPy, with their preconditions checked.

A launch runs when it is called. Arrays that a kernel writes in place (pools, counters) are written in place here too,
so MLX knows as little of these writes as of the real kernels'.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from treadle.runner.fused.quantization import AFFINE, MODES, Quantization

LOWEST = -1e30


@dataclass(frozen=True)
class Launch:
    """Arrays by name, arguments of the template, the grid, and the outputs' shapes."""

    arrays: Mapping[str, Any]
    template: Mapping[str, Any]
    blocks: tuple[int, int]
    threads: int
    shapes: Sequence[Sequence[int]]

    def view(self, name: str) -> Any:
        """Return the array's own memory: writes to it are writes to MLX's array."""
        mx.eval(self.arrays[name])
        return np.array(self.arrays[name], copy=False)

    def values(self, name: str) -> Any:
        """Return the array as float32."""
        return self.view(name).astype(np.float32)

    def covers(self, work: int) -> None:
        """Check that there are enough threads for the work."""
        assert self.blocks[0] * self.threads >= work


def _write(launch: Launch) -> list[Any]:
    """Write as the kernel does, 16 bytes a thread; two tokens in one slot would race."""
    t, keys = launch.template, launch.view("k")
    values = launch.view("v")[:, :, 0]
    launch.covers(keys.size // 8 if t["WIDTH"] == 2 * t["D"] else len(keys) * t["HEADS"] * t["WIDTH"] // 8)
    if t["WIDTH"] == t["D"]:  # latents, and rotated keys
        assert keys.shape[-1] == t["DV"]
        _put(launch, np.concatenate([keys[:, :, 0], values], axis=-1), values)
    else:
        _put(launch, keys[:, :, 0], values)
    return [np.zeros(1)]


def _write_int8(launch: Launch) -> list[Any]:
    """Write with a warp for each token, head, and of keys and values."""
    launch.covers(launch.view("k").size // launch.template["D"] * 64)
    _put(launch, launch.values("k")[:, :, 0], launch.values("v")[:, :, 0])
    return [np.zeros(1)]


def _put(launch: Launch, keys: Any, values: Any) -> None:
    """Store at the slots, as whole numbers if the pool has them."""
    slots, page = launch.view("slots"), launch.template["PAGE"]
    keys, values, slots = keys[slots != -1], values[slots != -1], slots[slots != -1]
    assert len(set(slots.tolist())) == len(slots), "two tokens in one slot"
    assert ((slots >= 0) & (slots < launch.view("pool").shape[0] * page)).all(), "a slot outside the pool"
    for i, (pool, new) in enumerate(zip(_planes(launch, launch.view("pool")), (keys, values), strict=False)):
        if pool.dtype == np.uint8:
            factor = np.abs(new).max(axis=-1) / 127
            factor[factor == 0] = 1
            launch.view("kv_scales")[slots // page, i, :, slots % page] = factor
            new = np.rint(new / factor[..., None]) + 128
        pool[slots // page, :, slots % page] = new


def _planes(launch: Launch, pages: Any) -> list[Any]:
    """Return views (pages, kv heads, page, D) of the keys of some pages, and of the values where they are stored."""
    t = launch.template
    keys = t["D"]
    width = t.get("WIDTH") or keys + (0 if t.get("LATENT") else t.get("DV", keys))
    lines, flat = t.get("HEADS", t.get("HKV")) * t["PAGE"], pages.reshape(len(pages), -1)
    assert flat.shape[1] == lines * width
    parts = [(flat[:, : lines * keys], keys), (flat[:, lines * keys :], width - keys)]
    return [part.reshape(len(pages), -1, t["PAGE"], dim) for part, dim in parts if dim]


def _copy_pages(launch: Launch) -> list[Any]:
    """Copy pages; all are read before one is written, in any order, so no written page may be in another pair."""
    pairs = launch.view("pairs")
    sources, targets = pairs.T
    apart = [(i, j) for i in range(len(pairs)) for j in range(len(pairs)) if i != j]
    assert not any(targets[i] in pairs[j] for i, j in apart), "a page is written to that another pair has"
    layers = [name for name in launch.arrays if name.startswith("pool")]
    assert launch.blocks[1] == len(layers)
    for name in layers:
        pool = launch.view(name)
        launch.covers(len(pairs) * pool[0].nbytes // 16)
        pool[targets] = pool[sources]
        if pool.dtype == np.uint8:
            kv_scales = launch.view(name.replace("pool", "kv_scales"))
            kv_scales[targets] = kv_scales[sources]
    return [np.zeros(1)]


def _dequantize_kv(launch: Launch) -> list[Any]:
    pages, plain = launch.view("pages"), launch.view("plain")
    launch.covers(pages.size * launch.view("pool")[0].size // 8)
    for to, contents in zip(_planes(launch, plain[: len(pages)]), _contents(launch, pages), strict=True):
        to[...] = contents
    return [np.zeros(1)]


def _contents(launch: Launch, pages: Any) -> list[Any]:
    """Return keys and maybe values of pages of a pool, float32."""
    planes = _planes(launch, launch.view("pool")[pages])
    if planes[0].dtype != np.uint8:
        return [plane.astype(np.float32) for plane in planes]
    kv_scales = launch.view("kv_scales")[pages]
    return [(plane.astype(np.float32) - 128) * kv_scales[:, i, ..., None] for i, plane in enumerate(planes)]


@dataclass(frozen=True)
class _Part:
    """Attention of a tile's rows over some of the cached tokens: largest score, sum of weights and weighted values."""

    most: Any  # (heads, rows)
    total: Any
    values: Any  # (heads, rows, D)

    def and_(self, other: _Part) -> _Part:
        most = np.maximum(self.most, other.most)
        mine, theirs = np.exp2(self.most - most), np.exp2(other.most - most)
        total = self.total * mine + other.total * theirs
        return _Part(most, total, self.values * mine[..., None] + other.values * theirs[..., None])


def _attend_decode(launch: Launch) -> list[Any]:
    """Attend with blocks, each with the items from its start to the next one's; every item belongs to a block."""
    blocks = launch.blocks[0]
    lines = (blocks + 8) // 8
    items = launch.view("items")
    starts = items[:lines].ravel()[: blocks + 1]
    assert starts[0] == 0
    assert (np.diff(starts) >= 0).all()
    items = items[lines:]
    assert not items[starts[-1] :].any()
    items = items[: starts[-1]].copy()
    split = items[:, 7] & 0xFFFF > 1
    positions = (items[:, 2] + (items[:, 7] >> 16))[split].tolist()
    assert len(set(positions)) == len(positions), "two partial results in one place"
    _check_room(launch, max(positions, default=-1) + 1, *(launch.view(name).size for name in ("partial", "scales")))
    items[:, 2] = 0
    return [_attended(launch, items)]


def _attend_prefill(launch: Launch) -> list[Any]:
    items = launch.view("items")[: launch.blocks[0]]
    assert len(items) == launch.blocks[0]
    if (items[:, 7] & 0xFFFF > 1).any():
        parts = int(items[:, 1].nonzero()[0].max()) + 1
        _check_room(launch, parts, *(launch.view(name).size for name in ("partial", "scales")))
    return [_attended(launch, items)]


def _check_room(launch: Launch, parts: int, partial: int, scales: int) -> None:
    t, counters = launch.template, launch.view("counters")
    assert not counters.any()
    parts *= t["HEADS"]
    assert len(counters) >= parts
    assert partial >= parts * t["ROWS"] * t["DV"]
    assert scales >= parts * t["ROWS"] * 2


def _attended(launch: Launch, items: Any) -> Any:
    """Return the attention; NaN for rows that no tile computes."""
    t, heads = launch.template, launch.template["HEADS"]
    assert launch.blocks[1] == heads
    q = launch.values("q").reshape(-1, heads, t["REP"], t["DV"] if t.get("LATENT") else t["D"])
    if t.get("LATENT"):
        rotated = launch.values("rotated").reshape(*q.shape[:-1], -1)
        assert q.shape[-1] + rotated.shape[-1] == t["D"]
        q = np.concatenate([q * _number(t["SCALE"]), rotated], axis=-1)
    out = np.full((*q.shape[:-1], t["DV"]), np.nan, np.float32)
    parts: list[_Part] = []
    for first, rows, row0, position, lo, hi, at, split in items.tolist():
        index, splits = split >> 16, split & 0xFFFF
        if rows == 0:
            continue
        assert rows <= t["ROWS"]
        assert lo % 16 == 0 <= lo < hi, "an empty piece of work, or one that begins inside a fragment"
        assert index == len(parts), "a tile's parts lie side by side"
        packed = np.arange(row0, row0 + rows)
        part = _part(launch, q, packed, first, position, (lo, hi), at)
        if t["SINKS"] and index == 0:
            part = part.and_(_sink(launch, packed))
        parts.append(part)
        if index == splits - 1:
            for one in parts[:-1]:
                part = part.and_(one)
            out[first + packed // t["REP"], :, packed % t["REP"]] = _rows(part)
            parts = []
    assert not parts
    if "leading" in launch.arrays:
        out = np.concatenate([launch.values("leading").reshape(-1, *out.shape[1:]), out])
    return out.reshape(launch.shapes[0])


def _rows(part: _Part) -> Any:
    return (part.values / part.total[..., None]).transpose(1, 0, 2)


def _sink(launch: Launch, packed: Any) -> _Part:
    """Return the part of a token without a value, with the logit that its head has learned."""
    t, sinks = launch.template, launch.values("sinks").reshape(launch.template["HEADS"], -1)
    most = sinks[:, packed % t["REP"]] * np.log2(np.e)
    return _Part(most, np.ones_like(most), np.zeros((*most.shape, t["DV"])))


def _part(launch: Launch, q: Any, packed: Any, first: int, position: int, span: tuple[int, int], at: int) -> _Part:
    t, pages = launch.template, launch.view("pages")
    positions = np.arange(*span)
    assert at + positions[-1] // t["PAGE"] < len(pages)
    table = pages[at + positions[0] // t["PAGE"] : at + positions[-1] // t["PAGE"] + 1]
    own = positions - positions[0] // t["PAGE"] * t["PAGE"]
    keys, *stored = (
        plane.transpose(1, 0, 2, 3).reshape(t["HEADS"], -1, plane.shape[-1])[:, own]
        for plane in _contents(launch, table)
    )
    values = stored[0] if stored else keys[..., : t["DV"]]
    queries = q[first + packed // t["REP"], :, packed % t["REP"]].transpose(1, 0, 2)
    scores = queries @ keys.transpose(0, 2, 1) * (np.log2(np.e) if t.get("LATENT") else _number(t["SCALE"]))
    if t["CAP"]:
        scores = _number(t["CAP"]) * np.tanh(scores)
    sees = _sees(launch, first + packed // t["REP"], position + packed // t["REP"], positions)
    most = np.where(sees, scores, LOWEST).max(axis=-1)
    weights = np.where(sees, np.exp2(np.minimum(scores - most[..., None], 0)), 0)
    return _Part(most, weights.sum(axis=-1), weights @ values)


def _sees(launch: Launch, tokens: Any, own: Any, positions: Any) -> Any:
    """Which of the cached `positions` each of the `tokens` at its `own` position sees."""
    window = launch.template["WINDOW"]
    if "visible" in launch.arrays:
        assert not window, "a window is in what tokens see"
        first, last = launch.view("visible")[tokens].T
        return (positions >= first[:, None]) & (positions <= last[:, None])
    sees = positions <= own[:, None]
    return sees & (positions > own[:, None] - window) if window else sees


def _rotate(launch: Launch) -> list[Any]:
    t, dim = launch.template, launch.template["D"]
    queries, kv = t["HQ"], t["HKV"]
    qkv = launch.values("qkv").reshape(-1, queries * t["STEP"] + (1 if t["SHARED"] else 2) * kv, dim)
    launch.covers(32 * qkv.shape[0] * (queries + 2 * kv))
    q, k, v = np.split(qkv, [queries * t["STEP"], queries * t["STEP"] + kv], axis=1)
    q = q[:, :: t["STEP"]]
    v = k if t["SHARED"] else v
    eps = _number(t["EPS"])
    if t["NORM"] == 1:
        q, k = _normed(q, launch.values("q_norm"), eps), _normed(k, launch.values("k_norm"), eps)
    if t["NORM"] == 2:
        scales = launch.view("scales")
        q = q * scales[:, :1, None] * launch.values("q_norm").reshape(queries, dim)
        k = k * scales[:, 1:, None] * launch.values("k_norm").reshape(kv, dim)
    if t["VALUE_NORM"]:
        v = _normed(v, 1, eps)
    if t["ROTATED"]:
        q, k = (_turned(x, launch.view("cos_sin"), interleaved=t["INTERLEAVED"]) for x in (q, k))
    _put(launch, k, v)
    return [q[:, :, None]]


def _qk_scales(launch: Launch) -> list[Any]:
    t = launch.template
    qkv = launch.values("qkv")
    assert launch.blocks == (len(qkv), 2)
    q, k, _ = np.split(qkv, [t["HQ"] * t["D"], (t["HQ"] + t["HKV"]) * t["D"]], axis=1)
    squares = np.stack([(x * x).mean(axis=-1) for x in (q, k)], axis=-1)
    return [1 / np.sqrt(squares + _number(t["EPS"]))]


def _cos_sin(launch: Launch) -> list[Any]:
    cos_sin = launch.view("positions")[:, None] * launch.values("inv_freq")
    launch.covers(cos_sin.size)
    return [np.stack([np.cos(cos_sin), np.sin(cos_sin)], axis=-1) * _number(launch.template["SCALE"])]


def _embed(launch: Launch) -> list[Any]:
    t, table = launch.template, launch.arrays["table"]
    tokens = launch.view("tokens")
    assert launch.blocks[0] == len(tokens)
    if t["BITS"] < 16:
        table = mx.dequantize(table, launch.arrays["scales"], launch.arrays["biases"], t["GROUP"], t["BITS"])
    return [np.array(table[mx.array(tokens)].astype(mx.float32)) * (_number(t["SCALE"]) if t["SCALED"] else 1)]


def _number(bits: int) -> float:
    return float(np.int32(bits).view(np.float32))


def _turned(x: Any, cos_sin: Any, *, interleaved: bool) -> Any:
    half = cos_sin.shape[1]
    x, rest = x[..., : 2 * half], x[..., 2 * half :]
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else np.split(x, 2, axis=-1)
    cosine, sine = cos_sin[:, None, :, 0], cos_sin[:, None, :, 1]
    a, b = a * cosine - b * sine, a * sine + b * cosine
    turned = np.stack([a, b], axis=-1).reshape(x.shape) if interleaved else np.concatenate([a, b], axis=-1)
    return np.concatenate([turned, rest], axis=-1)


def _normed(x: Any, weight: Any, eps: float) -> Any:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight


def _add_norm(launch: Launch) -> list[Any]:
    t = launch.template
    assert t["WIDTH"] % 8 == 0
    assert launch.blocks[0] == launch.view("x").shape[0]
    assert t["THREADS"] == launch.threads
    assert launch.threads % 32 == 0
    branch = _branch(launch, "r", "shares", t["LINES"])
    if t["NORMED"]:
        branch = _normed(branch, launch.values("branch_weight"), _number(t["BRANCH_EPS"]))
    if t["PARALLEL"]:
        other = _branch(launch, "other", "other_shares", t["OTHER_LINES"])
        if t["OTHER_NORMED"]:
            other = _normed(other, launch.values("other_weight"), _number(t["OTHER_EPS"]))
        branch = branch + other
    branch = branch * _number(t["MULTIPLIER"]) if t["SCALED"] else branch
    if t["POST"]:
        branch = _norm(launch, branch, "post_", t["POST"], t["POST_EPS"], t["POST_BIASED"])
    h = (launch.values("x") + branch) * (_number(t["OUTPUT"]) if t["RESCALED"] else 1)
    h = np.clip(h, -65504, 65504) if t["CLIPPED"] else h
    if not t["NORM"]:
        return [h]
    more = [_normed(h, launch.values(f"weight{i}"), _number(t["EPS"])) for i in range(t["MORE"])]
    assert not (more and (t["NORM"] == 2 or t["BIASED"]))
    return [h, _norm(launch, h, "", t["NORM"], t["EPS"], t["BIASED"]), *more]


def _branch(launch: Launch, name: str, shares: str, lines: int) -> Any:
    """A branch (T, W), or the weighted sum of its experts' lines."""
    if not lines:
        return launch.values(name)
    rows = launch.values(name).reshape(-1, lines, launch.template["WIDTH"])
    return (rows * launch.view(shares)[..., None]).sum(axis=1)


def _norm(launch: Launch, x: Any, prefix: str, kind: int, eps: int, biased: bool) -> Any:
    x = x - x.mean(axis=-1, keepdims=True) if kind == 2 else x
    return _normed(x, launch.values(f"{prefix}weight"), _number(eps)) + (
        launch.values(f"{prefix}bias") if biased else 0
    )


_ACTIVATIONS: tuple[Callable[[Any], Any], ...] = (
    lambda x: x / (1 + np.exp(-x)),
    lambda x: np.array(mx.array(x) * (1 + mx.erf(mx.array(x) / 2**0.5)) / 2),
    lambda x: x / 2 * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3))),
    lambda x: np.maximum(x, 0) ** 2,
)


def _activate(launch: Launch) -> list[Any]:
    x, t = launch.values("x"), launch.template
    assert x.shape[1] == (2 if t["GATED"] else 1) * t["WIDTH"]
    launch.covers(len(x) * t["WIDTH"] // 8)
    gate = _ACTIVATIONS[t["ACTIVATION"]](x[:, : t["WIDTH"]])
    return [gate * x[:, t["WIDTH"] :] if t["GATED"] else gate]


def _weights(launch: Launch) -> Any:
    """Return the dequantized weights of a launch."""
    codes, scales, biases = (launch.arrays[name] for name in "wsb")
    t = launch.template
    way = Quantization(t["BITS"], t["GROUP"], MODES[t.get("MODE", 0)])
    return way.dequantize(codes, scales, biases if way.mode == AFFINE else None)


def _skinny_gemm(launch: Launch) -> list[Any]:
    t, x = launch.template, launch.values("x")
    weight = launch.arrays["w"]
    if t["BITS"] < 16:
        weight = _weights(launch)
    weight = np.array(weight.astype(mx.float32))
    (rows, columns), tiles, (across, splits) = x.shape, -(-weight.shape[0] // 16), launch.blocks
    assert rows <= t["ROWS"]
    parts, counters = len(launch.view("counters")), launch.view("counters").reshape(-1)
    assert splits * parts <= columns // (8 * t["GROUP"])
    assert columns % (8 * t["GROUP"]) == 0
    assert launch.threads % (32 * parts) == 0
    assert 0 < across <= tiles
    assert len(counters) >= tiles
    assert not counters.any()
    assert splits == 1 or launch.view("partial").size >= splits * tiles * t["ROWS"] // 8 * 128
    return [x @ weight.T + _added(launch)]


def _packed_gemm(launch: Launch) -> list[Any]:
    t, x, outputs = launch.template, launch.values("x"), launch.shapes[0][1]
    weight = np.array(_weights(launch).astype(mx.float32))
    assert len(x) <= t["ROWS"]
    assert x.shape[1] % 64 == 0
    assert launch.threads == t["TILES"] * 128
    assert launch.blocks == (-(-outputs // (16 * t["TILES"])), 1)
    return [x @ weight.T + _added(launch)]


def _added(launch: Launch) -> Any:
    """The bias (N,) of a product; 0 where it has none."""
    assert launch.template["BIASED"] == ("added" in launch.arrays)
    return launch.values("added") if launch.template["BIASED"] else 0


def _small_gemm(launch: Launch) -> list[Any]:
    x, weight = launch.values("x"), launch.values("w")
    assert x.shape[1] == weight.shape[1]
    assert x.shape[1] % 64 == 0
    assert launch.blocks == (-(-len(x) // 64), -(-len(weight) // 64))
    assert launch.threads == 128
    return [x @ weight.T + _added(launch)]


def _dequantize(launch: Launch) -> list[Any]:
    x = launch.arrays["x"]
    weight = _weights(launch)
    assert weight.shape == launch.arrays["plain"].shape
    launch.covers(max(weight.size, x.size) // 8)
    launch.view("plain")[...] = np.array(weight.astype(launch.arrays["plain"].dtype), copy=False)
    return [launch.values("x")]


def _land(launch: Launch) -> list[Any]:
    first, second = launch.view("first"), launch.view("second")
    position = launch.view("place").reshape(2, -1)
    size = position.shape[1]
    launch.covers(size)
    position[0, : len(first)], position[1, : len(first)] = first, second
    return [np.pad(first, (0, size - len(first)))]


SORTED = 2048


def _draw(launch: Launch) -> list[Any]:
    """Sample one row at a time, by sorting all of it."""
    logits, parameters = launch.values("logits"), launch.view("asked")
    assert launch.blocks == (len(parameters), 1)
    assert logits.shape == (len(parameters), launch.template["V"])
    assert launch.template["V"] % launch.template["PER"] == 0
    drawn = [_drawn(x, row) for x, row in zip(logits, parameters, strict=True)]
    return [np.array([token for token, _ in drawn]), np.array([spilled for _, spilled in drawn])]


def _drawn(logits: Any, parameters: Any) -> tuple[int, bool]:
    inverse, min_p, top_p = (_number(parameters[i]) for i in (0, 1, 3))
    best = int(np.argmax(logits))
    if not inverse > 0 or not np.isfinite(logits[best]):
        return best, False
    distance = (logits[best] - logits) * np.float32(inverse)
    powers = np.exp2(distance * np.float32(-1.44269504))
    order = np.lexsort((np.arange(len(logits)), distance))
    order = order[(distance < 32)[order] & (powers >= min_p)[order]]
    weights = np.where(distance < 32, np.floor(powers.astype(np.float64) * 2**40), 0).astype(np.uint64)
    if 0 < parameters[2] < len(order):
        if _crowded(distance[order], parameters[2] - 1):
            return best, True
        order = order[: parameters[2]]
    total = int(weights[order].sum())
    if top_p <= 1:
        sums = np.cumsum(weights[order])
        count = max(1, int((sums - weights[order] < top_p * total).sum()))
        if count < len(order) and _crowded(distance[order], count - 1):
            return best, True
        order = order[:count]
    contents = np.sort(order)
    sums = np.cumsum(weights[contents])
    target = int(sums[-1]) * (int(parameters[4]) << 24 | int(parameters[5])) >> 48
    return int(contents[np.searchsorted(sums, np.uint64(target), side="right")]), False


def _crowded(distances: Any, position: int) -> bool:
    """Whether the bucket of that position has too many tokens to be sorted."""
    bucket = np.floor(distances * 64)
    return bool((bucket == bucket[position]).sum() > SORTED)


def _mask(launch: Launch) -> list[Any]:
    """Mask as many tokens a thread as have their bits in one word."""
    per, logits = launch.template["PER"], np.array(launch.arrays["logits"].astype(mx.float32))
    launch.covers(-(-logits.shape[1] // per))
    assert logits.shape[1] == launch.template["V"]
    assert logits.shape[1] % per == 0
    assert launch.blocks[1] == len(logits)
    bits = np.unpackbits(launch.view("words").view(np.uint8), axis=1, bitorder="little")[:, : logits.shape[1]]
    return [np.where(bits, logits, -np.inf)]


LAUNCHES: dict[str, Callable[[Launch], list[Any]]] = {
    "write": _write,
    "write_int8": _write_int8,
    "copy_pages": _copy_pages,
    "dequantize_kv": _dequantize_kv,
    "embed": _embed,
    "cos_sin": _cos_sin,
    "draw": _draw,
    "mask": _mask,
    "attend_decode": _attend_decode,
    "attend_prefill": _attend_prefill,
    "attend_wide": _attend_prefill,
    "rotate": _rotate,
    "qk_scales": _qk_scales,
    "add_norm": _add_norm,
    "activate": _activate,
    "skinny_gemm": _skinny_gemm,
    "packed_gemm": _packed_gemm,
    "small_gemm": _small_gemm,
    "dequantize": _dequantize,
    "land": _land,
}
