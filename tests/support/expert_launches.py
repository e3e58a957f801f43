"""Reference computations of the launches for mixtures of experts on the host, with their preconditions checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np

from tests.support.cuda_launches import Launch
from treadle.runner.fused.mixture_kernels import Choice, Rounds, Score
from treadle.runner.layers.grouped_product import Activation, Mode


def _route(launch: Launch) -> list[Any]:
    """Sort pairs by expert, and cut each expert's into chunks."""
    chosen, t = launch.view("indices"), launch.template
    assert launch.threads == t["THREADS"] >= t["EXPERTS"]
    order = np.argsort(chosen, kind="stable")
    chunks = np.full(launch.shapes[0], 1 << 20)
    starts = np.searchsorted(chosen[order], np.arange(t["EXPERTS"] + 1))
    found = [
        (expert, begin, min(t["ROWS"], end - begin), 0)
        for expert, (first, end) in enumerate(pairwise(starts))
        for begin in range(first, end, t["ROWS"])
    ]
    chunks[0], chunks[1 : 1 + len(found)] = (len(found), 0, 0, 0), found
    return [chunks, order]


def _multiply(launch: Launch) -> list[Any]:
    """Multiply each pair's row of x with its expert's weights."""
    t, x, order = launch.template, launch.values("x"), launch.view("order")
    weights, biases = (
        [_weights(launch, i) for i in range(1 + t["PAIRED"])],
        [launch.values(f"b{i}") for i in range(2)],
    )
    out = np.full(launch.shapes[0], np.nan, np.float32)
    assert weights[0].shape[2] == x.shape[1]
    for place, (pair, expert) in enumerate(_pairs(launch)):
        row = x[pair * len(x) // len(order)] if t["TOKENS"] else x[place]
        sums = [row @ weight[expert].T for weight in weights]
        if t["BIASED"]:
            sums = [one + bias[expert] for one, bias in zip(sums, biases, strict=False)]
        gate, up = sums if t["PAIRED"] else (sums[0], np.float32(1))
        out[place if t["TOKENS"] else pair] = _activated(Activation(t["KIND"]), gate, up)
    return [out]


def _pairs(launch: Launch) -> list[tuple[int, int]]:
    """Return pairs and their experts in the order of the chunks."""
    routing, order = launch.view("routing"), launch.view("order")
    if routing.shape[1] == 1:
        return list(enumerate(routing[:, 0].tolist()))
    return [
        (int(order[place]), int(expert))
        for expert, begin, count, _ in routing[1 : 1 + routing[0, 0]]
        for place in range(begin, begin + count)
    ]


def _weights(launch: Launch, i: int) -> Any:
    t, weight, scales = launch.template, launch.arrays[f"w{i}"], launch.arrays[f"s{i}"]
    mode = Mode(t["MODE"])
    if mode is Mode.PLAIN:
        return np.array(weight.astype(mx.float32))
    parts = [scales[..., j].swapaxes(1, 2) for j in range(2)] if mode is Mode.AFFINE else [scales.swapaxes(1, 2)]
    biases = parts[1] if mode is Mode.AFFINE else None
    dense = mx.dequantize(weight, parts[0], biases, t["GROUP"], t["BITS"], mode.name.lower())
    return np.array(dense.astype(mx.float32))


def _activated(kind: Activation, gate: Any, up: Any) -> Any:
    if kind is Activation.SILU:
        return gate / (1 + np.exp(-gate)) * up
    if kind is Activation.GELU_TANH:
        return gate / 2 * (1 + np.tanh((2 / np.pi) ** 0.5 * (gate + 0.044715 * gate**3))) * up
    if kind is Activation.RELU2:
        return np.maximum(gate, 0) ** 2 * up
    assert kind is Activation.NONE, "the emulator computes the others"
    return gate * up


def _choose(launch: Launch) -> list[Any]:
    """Choose each token's experts, the best ones first."""
    t, logits = launch.template, launch.arrays["logits"]
    bias, scales = launch.arrays["bias"], launch.arrays["scales"]
    choice = Choice(
        t["TOP"],
        Score(t["SCORE"]),
        bias if t["BIASED"] else None,
        t["GROUPS"],
        t["KEPT"],
        scales=scales if t["SCALED"] else None,
        rounds=Rounds(t["ROUNDS"]),
    )
    logits = logits[:, : t["EXPERTS"]]
    keys = choice.kept_keys(logits)
    chosen = np.argsort(-keys, axis=-1, kind="stable")[:, : t["TOP"]]
    scores = np.take_along_axis(choice.scores(logits), chosen, axis=-1)
    if choice.score is Score.CHOSEN_SOFTMAX:
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        scores /= scores.sum(axis=-1, keepdims=True)
    if t["NORMALIZED"]:
        scores /= scores.sum(axis=-1, keepdims=True) + _number(t["EPSILON"])
    scores = scores * _number(t["FACTOR"])
    scores = scores * _wide(launch, "scales")[chosen] if t["SCALED"] else scores
    if not t["SHARED"]:
        return [chosen, scores]
    weight = 1 / (1 + np.exp(-_wide(launch, "logits")[:, t["EXPERTS"] :])) if t["GATED"] else np.ones((len(scores), 1))
    return [np.pad(chosen, [(0, 0), (0, 1)], constant_values=t["EXPERTS"]), np.concatenate([scores, weight], axis=-1)]


def _choose_and_route(launch: Launch) -> list[Any]:
    """Choose experts by the warps of one block, and route them."""
    assert launch.blocks == (1, 1)
    assert launch.threads % 32 == 0
    chosen, weights = _choose(launch)
    t = {**launch.template, "EXPERTS": launch.template["EXPERTS"] + launch.template["SHARED"]}
    routed = replace(launch, arrays={"indices": mx.array(chosen.reshape(-1))}, template=t, shapes=launch.shapes[2:])
    return [chosen, weights, *_route(routed)]


def _wide(launch: Launch, name: str) -> Any:
    return np.array(launch.arrays[name].astype(mx.float32))


def _number(bits: int) -> Any:
    return np.int32(bits).view(np.float32)


def _combine(launch: Launch) -> list[Any]:
    """Add up experts' outputs, and those of shared experts."""
    t, total = launch.template, (_wide(launch, "y") * _wide(launch, "weights")[..., None]).sum(axis=1)
    if not t["SHARED"]:
        return [total]
    gate = 1 / (1 + np.exp(-_wide(launch, "gate"))) if t["GATED"] else 1
    return [total + gate * _wide(launch, "shared")]


EXPERT_LAUNCHES: dict[str, Callable[[Launch], list[Any]]] = {
    "choose_experts": _choose,
    "choose_and_route": _choose_and_route,
    "combine_experts": _combine,
    "route_experts": _route,
    "few_rows": _multiply,
    "many_rows": _multiply,
}
