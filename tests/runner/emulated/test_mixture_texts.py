"""The text of the kernels around a mixture's experts, against the reference on the host."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.support.cuda import ReferenceKernel
from tests.support.emulated import EmulatedKernel, shuffled
from treadle.runner.fused.mixture_kernels import Choice, MixtureKernels, Rounds, Score
from treadle.runner.layers.grouped_product import GroupedProduct

EMULATED, REFERENCE = MixtureKernels(EmulatedKernel), MixtureKernels(ReferenceKernel)


def normal(seed: int, *shape: int, dtype: Any = mx.float32) -> Any:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


CHOICES = [
    (128, Choice(8, Score.SOFTMAX, normalized=True), mx.bfloat16),
    (60, Choice(4, Score.SOFTMAX), mx.float16),
    (8, Choice(2, Score.CHOSEN_SOFTMAX), mx.bfloat16),
    (128, Choice(8, Score.CHOSEN_SOFTMAX, scales=normal(7, 128, dtype=mx.bfloat16)), mx.bfloat16),
    (256, Choice(8, Score.SIGMOID, normal(8, 256), 8, 4, True, 1e-20, 2.5), mx.float32),
    (33, Choice(32, Score.SIGMOID, normal(9, 33, dtype=mx.bfloat16), normalized=True, epsilon=1e-6), mx.bfloat16),
    (4, Choice(4, Score.SIGMOID, factor=1.5), mx.float16),
    (64, Choice(6, Score.SIGMOID, normal(9, 64), rounds=Rounds.SCORES), mx.bfloat16),
    (64, Choice(6, Score.SIGMOID, normal(9, 64), 4, 2, rounds=Rounds.KEYS), mx.bfloat16),
    (64, Choice(6, Score.SIGMOID, normal(9, 64), factor=2.5, shared=True), mx.bfloat16),
    (40, Choice(31, Score.SOFTMAX, normalized=True, shared=True, gated=True), mx.float16),
]


@pytest.mark.parametrize(("experts", "choice", "dtype"), CHOICES)
def test_the_best_experts_are_chosen(experts: int, choice: Choice, dtype: Any) -> None:
    for tokens in (1, 6):
        logits = normal(tokens, tokens, experts + choice.gated, dtype=dtype)
        chosen, weights = EMULATED.choose(logits, choice)
        wanted, exact = REFERENCE.choose(logits, choice)
        assert chosen.dtype == mx.uint32
        ordered, order = (mx.argsort(one, axis=-1) for one in (chosen, wanted))
        clear = np.array(choice.margins(logits[:, :experts])) > 1e-5
        same = mx.take_along_axis(chosen, ordered, axis=-1) == mx.take_along_axis(wanted, order, axis=-1)
        assert np.array(same.all(axis=-1))[clear].all()
        assert clear.any()
        found, want = (mx.take_along_axis(*pair, axis=-1) for pair in ((weights, ordered), (exact, order)))
        assert (np.abs(np.array(found - want))[clear] < 1e-5).all()


def test_among_equal_experts_the_first_are_chosen_and_what_is_not_a_number_stays_inside() -> None:
    chosen, weights = EMULATED.choose(mx.zeros((1, 40)), Choice(3, Score.SOFTMAX), mx.bfloat16)
    assert chosen.tolist() == [[0, 1, 2]]
    assert weights.dtype == mx.bfloat16
    chosen, _ = EMULATED.choose(mx.full((1, 40), float("nan")), Choice(3, Score.SIGMOID))
    assert chosen.max().item() < 40


@pytest.mark.parametrize("rounds", Rounds)
def test_rounded_scores_are_equal_where_the_models_own_are(rounds: Rounds) -> None:
    """Logits above 6 have a sigmoid of 1 in bfloat16, and biases of less than half a last place are lost there."""
    logits, bias = mx.arange(40, dtype=mx.float32)[None].astype(mx.bfloat16), mx.arange(40) / 20000
    chosen, _ = EMULATED.choose(logits, Choice(3, Score.SIGMOID, bias, rounds=rounds))
    wanted = [7, 8, 9] if rounds is Rounds.KEYS else [39, 38, 37]
    assert chosen.tolist() == [wanted]
    quiet = mx.zeros((40,))
    chosen, _ = EMULATED.choose(logits, Choice(3, Score.SIGMOID, quiet, rounds=rounds))
    assert chosen.tolist() == [[7, 8, 9] if rounds is not Rounds.NOTHING else [17, 18, 19]]


@pytest.mark.parametrize("tokens", [2, 5, 40, 64])
@pytest.mark.parametrize(
    ("experts", "choice"),
    [
        (128, Choice(8, Score.SOFTMAX, normalized=True)),
        (300, Choice(4, Score.SIGMOID, normal(8, 300), shared=True)),
        (6, Choice(2, Score.CHOSEN_SOFTMAX, shared=True, gated=True)),
    ],
)
def test_few_tokens_are_routed_by_the_block_that_chooses(tokens: int, experts: int, choice: Choice) -> None:
    logits = normal(tokens, tokens, experts + choice.gated, dtype=mx.bfloat16)
    weights, routing = GroupedProduct(shuffled(EmulatedKernel, tokens)).choose(logits, choice)
    chosen, wanted = EMULATED.choose(logits, choice)
    assert mx.array_equal(weights, wanted).item()
    of_pairs, order, chunks = np.array(chosen).reshape(-1), np.array(routing.order), np.array(routing.chunks)
    assert sorted(order) == list(range(tokens * choice.all))
    places = [
        (expert, place)
        for expert, begin, rows, _ in chunks[1 : 1 + chunks[0, 0]]
        for place in range(begin, begin + rows)
    ]
    assert [place for _, place in places] == list(range(len(order)))
    assert all(of_pairs[order[place]] == expert for expert, place in places)
    assert chunks[1 : 1 + chunks[0, 0], 2].max() <= routing.rows


@pytest.mark.parametrize("shared", ["", "shared", "gated"])
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_outputs_are_weighted_and_added(shared: str, dtype: Any) -> None:
    for tokens, top, width in ((1, 8, 2048), (5, 2, 72)):
        y, weights = normal(1, tokens, top, width, dtype=dtype), mx.random.uniform(shape=(tokens, top))
        others = [normal(2, tokens, width, dtype=dtype)] if shared else []
        others += [normal(3, tokens, 1, dtype=dtype)] if shared == "gated" else []
        found, wanted = (one.combine(y, weights, *others).astype(mx.float32) for one in (EMULATED, REFERENCE))
        tolerance = 0.012 if dtype == mx.bfloat16 else 0.0015
        assert (mx.abs(found - wanted).max() < tolerance * mx.abs(wanted).max()).item()
