"""Correct backends pass their self-test at every precision, and wrong ones do not: judged by the model's own noise."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.runner.mutants import MUTANTS, WINDOW_MUTANTS, mutated
from tests.runner.paged.models import make as new_paged
from tests.runner.paged.models import paged
from tests.runner.self_tests import contiguous, faults, make, runs_here
from tests.support.architectures import config_of, new_module
from tests.support.cuda import ReferenceKernels, wrongly_bounded
from treadle.runner.kv.backend import Unsupported
from treadle.runner.loading import backend_self_test
from treadle.runner.loading.reference import TRIALS, Filling, Found, Measured, Reference, Trial, beyond_window, verdict
from treadle.runner.mlxlm import connect

PLAIN = ["llama", "gemma3_text", "qwen3_moe"]
HALF = ["float16", "bfloat16", "8 bits", "4 bits"]


def reference(architecture: str, precision: str = "float32", **changed: Any) -> Reference:
    return Reference(connect(), make(architecture, precision, **changed), 2048)


@pytest.mark.parametrize("precision", ["float32", *HALF])
@pytest.mark.parametrize("architecture", PLAIN)
def test_a_correct_backend_passes_and_each_fault_is_found(architecture: str, precision: str) -> None:
    if not runs_here(architecture, precision):
        pytest.skip("MLX has no experts in half precision on CPUs")
    judge = reference(architecture, precision)
    found = faults(judge, contiguous(judge))
    assert set(found) >= set(MUTANTS) | (set(WINDOW_MUTANTS) if architecture == "gemma3_text" else set())
    assert not [name for name, reason in found.items() if not reason]


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "4 bits"])
def test_one_wrong_layer_of_eight_is_found(precision: str) -> None:
    judge = reference("llama", precision, num_hidden_layers=8)
    config = contiguous(judge)
    for layer in (0, 4, 7):
        wrong: Any = mutated(config, "kv heads of values swapped", {layer})
        with pytest.raises(Unsupported, match="not the model's own"):
            backend_self_test.self_test(judge, wrong, TRIALS)


def test_sequences_beyond_a_window_are_tested_without_computing_its_tokens() -> None:
    """The window is longer than any prompt that is run."""
    judge = reference("gemma3_text", sliding_window=600)
    config = contiguous(judge)
    assert judge.tested_tokens == 600 + 8 + 4
    found = faults(judge, config)
    assert all(found[name] for name in WINDOW_MUTANTS)
    short = judge.trials(100)
    for name in WINDOW_MUTANTS:  # what the prompts alone would show
        wrong: Any = mutated(config, name)
        backend_self_test.self_test(judge, wrong, short)


def test_trials_fit_into_the_context_and_the_memory() -> None:
    judge = reference("gemma3_text")
    assert judge.trials() == [*TRIALS, beyond_window(32)]
    assert judge.trials(43) == list(TRIALS)
    assert Reference(connect(), judge.module, 40).trials() == list(TRIALS)


def test_a_backend_that_raises_or_asserts_is_refused() -> None:
    judge = reference("llama")
    config = contiguous(judge)
    for error in (AssertionError("cache is empty"), IndexError("no such layer")):
        wrong = Raising(config, error)
        with pytest.raises(Unsupported, match=f"{type(error).__name__}: {error}"):
            backend_self_test.self_test(judge, wrong, TRIALS)


def test_kernels_for_tokens_that_say_what_they_see_are_tested_where_they_are_asked_for() -> None:
    judge = Reference(connect(), new_paged("gemma3"), 2048)
    right, wrong = (paged(judge.module, kernels=kernels) for kernels in (ReferenceKernels, wrongly_bounded()))
    backend_self_test.self_test(judge, right, TRIALS, bounded=True)
    backend_self_test.self_test(judge, wrong, TRIALS)
    with pytest.raises(Unsupported, match="not the model's own"):
        backend_self_test.self_test(judge, wrong, TRIALS, bounded=True)


class Raising:
    """A backend that can't be built."""

    name, fused, selection, keep_prefixes = "contiguous", False, None, False

    def __init__(self, config: Any, error: Exception) -> None:
        self.least_memory, self.with_memory, self.for_rows = config.least_memory, config.with_memory, config.for_rows
        self._error = error

    def build(self, *_: Any) -> Any:
        raise self._error


def test_a_model_that_attends_to_another_layers_keys_is_refused() -> None:
    """It would silently attend to its own."""
    module = make("llama", "float32")
    first, second = module.layers[0].self_attn, module.layers[1].self_attn
    type_of = type(second)

    class Sharing(type_of):  # type: ignore[misc, valid-type]
        def __call__(self, x: Any, mask: Any = None, cache: Any = None) -> Any:
            from mlx_lm.models import llama

            keys, values = cache.update_and_fetch(*(first_kv(x, first) for _ in range(2)))
            queries = self.q_proj(x).reshape(*x.shape[:2], self.n_heads, -1).transpose(0, 2, 1, 3)
            attend = llama.scaled_dot_product_attention
            out = attend(queries, keys + 0, values, cache=cache, scale=self.scale, mask=mask)
            return self.o_proj(out.transpose(0, 2, 1, 3).reshape(*x.shape[:2], -1))

    second.__class__ = Sharing
    with pytest.raises(Unsupported, match="attends to other keys and values than its cache's"):
        contiguous(Reference(connect(), module, 2048))


def first_kv(x: Any, attention: Any) -> Any:
    return attention.k_proj(x).reshape(*x.shape[:2], attention.n_kv_heads, -1).transpose(0, 2, 1, 3)


@pytest.mark.parametrize("precision", HALF)
def test_the_limit_follows_the_models_own_noise(precision: str) -> None:
    """Errors of the type's rounding pass; three times as large, they do not."""
    judge = reference("llama", precision)
    expected = [judge.logits(trial) for trial in TRIALS]
    noise = [float(np.median(judge.noise(trial))) for trial in TRIALS]
    for times, passes in ((1.0, True), (3.0, False)):
        found = [
            Found(trial, logits + _errors(logits, times * size))
            for trial, logits, size in zip(TRIALS, expected, noise, strict=True)
        ]
        assert (judge.reason_against(found) == "") is passes


def _errors(logits: Any, size: float) -> Any:
    errors = mx.random.normal(logits.shape, key=mx.random.key(3))
    return errors / mx.mean(mx.abs(errors), axis=-1, keepdims=True) * mx.std(logits, axis=-1, keepdims=True) * size


def test_logits_of_another_shape_or_not_a_number_are_refused() -> None:
    judge = reference("llama")
    logits = judge.logits(TRIALS[1])
    assert "shape" in judge.reason_against([Found(TRIALS[1], logits[:, :-1])])
    assert "not a number of times" in judge.reason_against([Found(TRIALS[1], logits * float("nan"))])
    assert judge.reason_against([]) == ""


def test_single_logits_may_be_another_experts_but_not_half_of_them() -> None:
    noise = np.full((3, 6), 0.01, np.float32)
    for swapped, passes in ((2, True), (4, False)):
        found = [np.full(6, 0.01, np.float32) for _ in range(5)]
        found[0][:swapped] = 0.5
        assert (verdict([[Measured(one, noise) for one in found]], 2.0) == "") is passes


def test_where_rounding_swaps_experts_a_disagreement_is_judged_again_with_other_tokens() -> None:
    """Swaps in half of the first sequences are no fault; what is wrong each time is one. A model whose noise has no
    swaps gets no second trial."""
    judge = reference("llama", "4 bits")

    def compute(trials: Sequence[Trial], right: Sequence[Trial]) -> list[Found]:
        rounds.append(trials)
        sizes = [0.0 if trial in right else 0.5 for trial in trials]
        return [
            Found(trial, judge.logits(trial) + _errors(judge.logits(trial), size))
            for trial, size in zip(trials, sizes, strict=True)
        ]

    def judged(*right: Trial) -> bool:
        rounds.clear()
        return judge.judge(TRIALS, partial(compute, right=right)) == ""

    rounds: list[Sequence[Trial]] = []
    others = [trial.other() for trial in TRIALS]
    assert [trial.length for trial in others] == [trial.length for trial in TRIALS]
    assert not set(others) & set(TRIALS)
    assert judged(*TRIALS)
    assert not judged(TRIALS[0], *others)
    assert len(rounds) == 1
    for trial in (*TRIALS, *others):
        judge.noise(trial)[0, 0] *= 100
    assert not judged(TRIALS[0])
    assert len(rounds) == 2
    assert not judged(*others)  # one sequence is wrong throughout
    swapped = [mx.array(judge.logits(trial)) for trial in TRIALS[1:]]
    for logits in swapped:
        logits[0] = -logits[0]
    first = [Found(TRIALS[0], judge.logits(TRIALS[0])), *map(Found, TRIALS[1:], swapped)]
    assert judge.reason_against(first)
    assert not judge.reason_against(first, compute(others, others))


def test_a_fault_at_one_place_of_all_sequences_is_found() -> None:
    noise = np.full((3, 6), 0.01, np.float32)
    found = [np.full(6, 0.01, np.float32) for _ in range(5)]
    for one in found:
        one[2] = 0.1
    assert "10.0 times" in verdict([[Measured(one, noise) for one in found]], 2.0)


def test_made_up_keys_and_values_are_the_models_own_for_caches_that_hold_such() -> None:
    judge = reference("qwen3_next")
    filling = Filling.of(judge.library, judge._example, 100)
    kinds = [pair is not None for pair in filling.keys_and_values]
    assert any(kinds)
    assert not all(kinds)
    (keys, values) = next(pair for pair in filling.keys_and_values if pair is not None)
    assert keys.shape[2] == values.shape[2] == 100
    caches = judge.caches(beyond_window(108))
    assert {leaf.size() for leaf, kind in zip(judge.library.leaves(caches), kinds, strict=True) if kind} == {100}


def test_made_up_tokens_are_no_beginning_for_recurrent_layers() -> None:
    """RG-LRU takes a sequence's first token as it is. With decays as close to 1 as published ones a later token counts
    for far less, so a reference that began behind the made-up tokens would differ from every backend."""
    module = new_module(config_of("recurrent_gemma"))
    for layer in module.layers[:2]:
        layer.temporal_block.rg_lru.recurrent_param = mx.full((256,), -4.0)
    judge = Reference(connect(), module, 2048)
    contiguous(judge)
    (trial,) = judge.trials()[len(TRIALS) :]
    assert trial.filled
    states = [leaf.cache for leaf in judge.library.leaves(judge.caches(trial)) if hasattr(leaf, "cache")]
    assert len(states) == 2
    assert not any(mx.any(state).item() for pair in states for state in pair)


def test_made_up_keys_are_written_in_every_layer_before_the_trial_goes_on() -> None:
    """No layer's are computed from another's, so a pass that waits for the last layer does not write them all."""
    asked: list[int] = []

    class Layer:
        def __init__(self, number: int) -> None:
            self.number = number

        def update_and_fetch(self, keys: Any, values: Any) -> None:
            assert keys.shape == values.shape == (4, 2, 1, 8)

        @property
        def written(self) -> Any:
            asked.append(self.number)
            return mx.array(0)

    pair = mx.zeros((1, 2, 3, 8)), mx.zeros((1, 2, 3, 8))
    stand_in = backend_self_test._Fillable(None)
    stand_in.filling = Filling((pair, None, pair))
    assert stand_in(mx.zeros((4, 1)), [Layer(0), [Layer(1), Layer(2)]]).shape == (4, 1, 1)
    assert asked == [0, 2]
