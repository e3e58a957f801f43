"""The text of the kernels for mixtures of experts, with random choices of experts, against float64."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from tests.support.emulated import EmulatedKernel, host, shuffled
from treadle.runner.device.properties import DeviceProperties
from treadle.runner.layers.grouped_product import (
    Activation,
    Between,
    ExpertWeights,
    Format,
    GroupedProduct,
    Mode,
    Tuning,
)

EXPERTS, TOP = 5, 2
TOLERANCE = {mx.bfloat16: 0.012, mx.float16: 0.002}
"""Of the largest result: weights and what stands between the products are rounded."""
FORMATS = [
    (Format(), mx.bfloat16),
    (Format(Mode.AFFINE, 4, 64), mx.bfloat16),
    (Format(Mode.AFFINE, 4, 32), mx.float16),
    (Format(Mode.AFFINE, 8, 128), mx.bfloat16),
    (Format(Mode.AFFINE, 2, 64), mx.float16),
    (Format(Mode.AFFINE, 3, 32), mx.bfloat16),
    (Format(Mode.AFFINE, 5, 128), mx.float16),
    (Format(Mode.AFFINE, 6, 64), mx.bfloat16),
    (Format(Mode.MXFP4, 4, 32), mx.bfloat16),
    (Format(Mode.NVFP4, 4, 16), mx.float16),
    (Format(Mode.MXFP8, 8, 32), mx.bfloat16),
]
CHIP = DeviceProperties(processors=2)
MANY = Tuning(many_pairs=0, tall_pairs=1 << 20)
Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Linear:
    """Weights with their numbers in float64."""

    weights: ExpertWeights
    exact: Numbers

    def __call__(self, x: Numbers, expert: int) -> Numbers:
        bias = self.weights.bias
        y: Numbers = self.exact[expert] @ x
        return y if bias is None else y + exactly(bias)[expert]


def exactly(array: Any) -> Numbers:
    return np.array(array.astype(mx.float32), np.float64)


def random(seed: int, *shape: int, scale: float = 1.0) -> Any:
    return mx.array(np.random.default_rng(seed).normal(0, scale, shape).astype(np.float32))


@cache
def linear(seed: int, rows: int, columns: int, form: Format, dtype: Any, *, biased: bool = False) -> Linear:
    weight = random(seed, EXPERTS, rows, columns, scale=columns**-0.5).astype(dtype)
    bias = random(seed + 100, EXPERTS, rows).astype(dtype) if biased else None
    if form.mode is Mode.PLAIN:
        return Linear(ExpertWeights(form, weight, None, bias), exactly(weight))
    options: dict[str, Any] = {"group_size": form.group, "bits": form.bits, "mode": form.mode.name.lower()}
    codes, scales, *biases = mx.quantize(weight, **options)
    laid_out = (mx.stack([scales, *biases], axis=-1) if biases else scales).swapaxes(1, 2)
    if biases:  # in float32, as they are exact there
        scales, biases = scales.astype(mx.float32), [biases[0].astype(mx.float32)]
    exact = exactly(mx.dequantize(codes, scales, biases[0] if biases else None, **options))
    return Linear(ExpertWeights(form, codes, mx.contiguous(laid_out), bias), exact)


def choices(seed: int, tokens: int) -> npt.NDArray[np.uint32]:
    """Different experts of each token (T, k)."""
    dice = np.random.default_rng(seed)
    return np.stack([dice.permutation(EXPERTS)[:TOP] for _ in range(tokens)]).astype(np.uint32)


def silu(gate: Numbers, up: Numbers | float) -> Numbers:
    return gate / (1 + np.exp(-gate)) * up


SWIGLU = Between(Activation.SILU)


class Layer:
    """Gate, up and down, and what they should give."""

    def __init__(self, form: Format, dtype: Any, tuning: Tuning | None = None, *, biased: bool = False) -> None:
        deep = 256 if form.group == 128 or form.span == 2 else 192
        self.gate, self.up = (linear(i, deep, deep + 64 * (deep < 256), form, dtype, biased=biased) for i in (1, 2))
        self.down = linear(3, 80, deep, form, dtype, biased=biased)
        self.product = GroupedProduct(shuffled(EmulatedKernel, 1), CHIP, tuning)
        self.dtype, self.columns = dtype, self.gate.exact.shape[2]

    def __call__(self, x: Any, chosen: npt.NDArray[np.uint32], between: Between) -> Any:
        routing = self.product.route(mx.array(chosen.reshape(-1)), EXPERTS, len(chosen))
        both = [self.gate.weights, self.up.weights]
        h = self.product(x, both, routing, between, tokens=True)
        return self.product(h, [self.down.weights], routing, Between(), tokens=False)

    def check(self, chosen: npt.NDArray[np.uint32], between: Between = SWIGLU, act: Any = silu) -> Any:
        x = random(len(chosen), len(chosen), self.columns).astype(self.dtype)
        found, wide = self(x, chosen, between), exactly(x)
        wanted = np.stack([self._token(wide[token], e, act) for token, own in enumerate(chosen) for e in own])
        np.testing.assert_allclose(
            exactly(found), wanted, rtol=0, atol=TOLERANCE[self.dtype] * max(1.0, np.abs(wanted).max())
        )
        return found

    def _token(self, x: Numbers, expert: int, act: Any) -> Numbers:
        h = act(self.gate(x, expert), self.up(x, expert))
        return self.down(exactly(mx.array(h.astype(np.float32)).astype(self.dtype)), expert)


def check_product(form: Format, dtype: Any, tuning: Tuning | None, tokens: int) -> None:
    """Compare one product, of tokens with the experts that they chose."""
    columns = 256 if form.group == 128 or form.span == 2 else 320
    layer, chosen = linear(1, 80, columns, form, dtype), choices(tokens, tokens)
    product = GroupedProduct(shuffled(EmulatedKernel, 1), CHIP, tuning)
    routing = product.route(mx.array(chosen.reshape(-1)), EXPERTS, tokens)
    x = random(tokens, tokens, columns).astype(dtype)
    found, order = exactly(product(x, [layer.weights], routing, Between(), tokens=True)), host(routing.order)
    wide = exactly(x)
    wanted = np.stack([layer(wide[pair // TOP], chosen.reshape(-1)[pair]) for pair in order])
    np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE[dtype] * np.abs(wanted).max())


@pytest.mark.parametrize(("form", "dtype"), FORMATS)
def test_few_tokens_meet_the_experts_that_they_chose(form: Format, dtype: Any) -> None:
    check_product(form, dtype, None, 7)


@pytest.mark.parametrize(("form", "dtype"), [FORMATS[i] for i in (0, 2, 3, 5, 6, 7, 8)])
def test_many_tokens_meet_the_experts_that_they_chose(form: Format, dtype: Any) -> None:
    """In chunks of 64 rows, which 5 experts with 140 choices don't fill."""
    check_product(form, dtype, MANY, 70)


@pytest.mark.parametrize("tuning", [None, MANY])
def test_both_products_of_a_layer_with_biases(tuning: Tuning | None) -> None:
    Layer(Format(Mode.MXFP4, 4, 32), mx.bfloat16, tuning, biased=True).check(choices(0, 9))


@pytest.mark.parametrize("parts", [1, 4])
def test_one_token_needs_no_routing(parts: int) -> None:
    Layer(Format(Mode.AFFINE, 4, 64), mx.bfloat16, Tuning(parts=parts)).check(choices(2, 1))


@pytest.mark.parametrize("parts", [1, 4])
def test_experts_have_chunks_of_several_heights(parts: int) -> None:
    """All tokens at one expert, none at others, one at another."""
    layer = Layer(Format(), mx.bfloat16, Tuning(parts=parts, many_pairs=1000))
    layer.check(np.array([[3, 1]] + [[3, 0]] * 41, np.uint32))
    layer.check(np.array([[4, 2]] * 9 + [[2, 3]] * 5, np.uint32))


def test_chunks_of_many_rows_may_have_128() -> None:
    layer = Layer(Format(), mx.bfloat16, Tuning(many_pairs=0, tall_pairs=0))
    layer.check(np.array([[3, 1]] * 130 + [[1, 0]], np.uint32))


def test_a_token_s_result_does_not_depend_on_the_others() -> None:
    """Bit for bit, among the kernels for few rows, in whatever order threads come."""
    layer, chosen = Layer(Format(Mode.AFFINE, 4, 64), mx.bfloat16), choices(3, 30)
    x = random(5, 30, layer.columns).astype(mx.bfloat16)
    whole = host(layer(x, chosen, SWIGLU)).reshape(30, TOP, -1)
    for tokens in (slice(0, 1), slice(4, 9), slice(2, 20)):
        part = host(layer(x[tokens], chosen[tokens], SWIGLU)).reshape(-1, TOP, whole.shape[-1])
        np.testing.assert_array_equal(part, whole[tokens])


@pytest.mark.parametrize("tokens", [2, 33, 700])
def test_routing_sorts_every_pair_into_a_chunk_of_its_expert(tokens: int) -> None:
    product, chosen = GroupedProduct(shuffled(EmulatedKernel, 2), CHIP), choices(4, tokens).reshape(-1)
    routing = product.route(mx.array(chosen), EXPERTS, tokens)
    chunks, order = host(routing.chunks), host(routing.order)
    assert sorted(order) == list(range(len(chosen)))
    used = chunks[1 : 1 + chunks[0, 0]]
    assert used[:, 2].sum() == len(chosen)
    assert 0 < used[:, 2].min() <= used[:, 2].max() <= routing.rows
    for expert, begin, count, _ in used:
        assert set(chosen[order[begin : begin + count]]) == {expert}


def clamped(gate: Numbers, up: Numbers) -> Numbers:
    low = np.minimum(gate, 1.5)
    return (np.clip(up, -1.5, 1.5) + 1) * low / (1 + np.exp(-1.702 * low))


def tanh_gelu(gate: Numbers, up: Numbers) -> Numbers:
    return 0.5 * gate * (1 + np.tanh(0.7978845608 * (gate + 0.044715 * gate**3))) * up


@pytest.mark.parametrize(
    ("between", "act"),
    [
        (Between(Activation.CLAMPED_OAI, 1.702, 1.5), clamped),
        (Between(Activation.GELU_TANH), tanh_gelu),
        (
            Between(Activation.SILU_CLAMPED, limit=0.5),
            lambda g, u: np.minimum(silu(g, 1.0), 0.5) * np.clip(u, -0.5, 0.5),
        ),
        (Between(Activation.CLAMPED_SILU, limit=0.5), lambda g, u: silu(np.minimum(g, 0.5), np.clip(u, -0.5, 0.5))),
    ],
)
def test_activations(between: Between, act: Any) -> None:
    Layer(Format(), mx.float16).check(choices(6, 3), between, act)
