"""Vectors of sequences that are pooled: equal to the hidden states of the model alone, in all KV backends."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from tests.runner.conftest import Tiny
from tests.runner.looped import Looped
from tests.runner.test_fast_forward import model_of
from treadle.core.messages import FinishReason, Pooling, Sampling, Submit
from treadle.core.plan import Admit, PrefillChunk, StepPlan
from treadle.runner.kv.backend import Unsupported
from treadle.runner.loading.hidden_states import hidden_size
from treadle.runner.loading.model import LoadedModel
from treadle.runner.model_runner import ModelRunner
from treadle.runner.pooling import Dense, Embedding
from treadle.runner.sampling import sampler

BACKENDS = ("contiguous", "ahead", "padded", "serial", "paged", "recurrent", "windows")
LENGTHS = {"a": 90, "b": 1, "c": 33}
PROMPTS = {name: tuple(random.Random(name).choices(range(250), k=count)) for name, count in LENGTHS.items()}
Vector = npt.NDArray[np.float32]


def pooled(prompt: tuple[int, ...], pooling: Pooling = Pooling.LAST, id_: str = "pooled", **fields: Any) -> Submit:
    return Submit(id=id_, prompt=prompt, max_tokens=0, pooling=pooling, max_wait_s=1e9, **fields)


def alone(model: LoadedModel, prompt: tuple[int, ...], pooling: Pooling) -> Vector:
    """The pooled hidden states of the prompt by itself, in mlx-lm's caches."""
    states = model.module.model(mx.array([prompt]), cache=model.library.new_caches(model.module))
    whole = np.array(states[0].astype(mx.float32))
    return {Pooling.LAST: whole[-1], Pooling.CLS: whole[0], Pooling.MEAN: whole.mean(axis=0)}[pooling]


def vector(loop: Looped, id_: str) -> Vector:
    (finish,) = [output.finish for output in loop.outputs[id_] if output.finish is not None]
    assert finish.reason is FinishReason.STOP
    return np.frombuffer(finish.vector, np.float32)


def with_embedding(model: LoadedModel, **fields: Any) -> LoadedModel:
    size = hidden_size(model.library, model.module, model.library.selection(model.module))
    config: Any = model.choice.config
    if config.selection is None:
        config = replace(config, selection=model.library.selection(model.module))
    embedding = Embedding(dimensions=size, **fields)
    return replace(model, embedding=embedding, choice=replace(model.choice, config=config))


def close(found: Vector, expected: Vector) -> bool:
    return bool(np.abs(found - expected).max() < 2e-5 * np.abs(expected).max())


@pytest.mark.parametrize("backend", BACKENDS)
def test_it_is_the_model_s_own_beside_rows_that_generate(tiny: Tiny, backend: str) -> None:
    """In chunks, beside others that are pooled in another way, and with a prompt that others begin with."""
    model = with_embedding(model_of(backend, tiny))
    answers = [Submit(id=f"answer {i}", prompt=PROMPTS["a"][: 9 + i], max_tokens=12, max_wait_s=1e9) for i in range(2)]
    quiet, busy = Looped(ModelRunner(model)), Looped(ModelRunner(model), max_running=8, prefill_tokens=16)
    some = [pooled(prompt, p, f"{name} {p}") for name, prompt in PROMPTS.items() for p in Pooling]
    busy.submit(*answers)
    busy.step()
    busy.run(*some)
    quiet.run(*answers)
    for one in some:
        assert close(vector(busy, one.id), alone(model, one.prompt, one.pooling or Pooling.LAST)), one.id
    for one in answers:
        assert busy.tokens(one.id) == quiet.tokens(one.id)
    assert busy.runner.statistics().kv_bytes == 0


@pytest.mark.parametrize("backend", ["contiguous", "padded", "paged"])
def test_a_cached_prefix_is_reused_for_the_last_token_s_state_alone(tiny: Tiny, backend: str) -> None:
    model = with_embedding(model_of(backend, tiny))
    loop = Looped(ModelRunner(model))
    loop.run(Submit(id="before", prompt=PROMPTS["a"], max_tokens=3, max_wait_s=1e9))
    loop.run(*(pooled(PROMPTS["a"], pooling, f"{pooling}") for pooling in Pooling))
    assert [loop.cached(f"{pooling}") > 0 for pooling in Pooling] == [True, False, False]
    for pooling in Pooling:
        assert close(vector(loop, f"{pooling}"), alone(model, PROMPTS["a"], pooling))


def test_a_prompt_that_was_pooled_is_reused(tiny: Tiny) -> None:
    model = tiny("llama")
    loop = Looped(ModelRunner(model))
    loop.run(pooled(PROMPTS["a"]))
    answer = Submit(id="answer", prompt=(*PROMPTS["a"], 7), max_tokens=5, max_wait_s=1e9)
    tokens = loop.run(answer)["answer"]
    assert loop.cached("answer") == 90
    assert tokens == Looped(ModelRunner(model)).run(answer)["answer"]


def test_a_row_that_waits_for_the_same_prompt_goes_on_from_its_checkpoint(tiny: Tiny) -> None:
    """In mlx-lm's caches a leader keeps its state where another one goes on."""
    loop = Looped(ModelRunner(tiny("llama", padded=True)), prefill_tokens=512)
    trunk = PROMPTS["a"] * 2
    loop.run(pooled((*trunk, 1, 2, 3), id_="first"), pooled((*trunk, 4), id_="second"))
    assert loop.cached("second") >= 96
    assert close(vector(loop, "second"), alone(loop.runner._model, (*trunk, 4), Pooling.LAST))


def test_a_step_that_is_computed_again_counts_no_state_twice(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token that is drawn again repeats the pass of the step behind, in which a prompt is pooled."""
    monkeypatch.setattr(sampler, "CANDIDATES", 4)
    launched: list[Any] = []
    real = ModelRunner._launch

    def launch(self: ModelRunner, step: Any, before: Any) -> None:
        launched.extend([step] if step.pooled else [])
        real(self, step, before)

    monkeypatch.setattr(ModelRunner, "_launch", launch)
    model = with_embedding(model_of("ahead", tiny))
    loop = Looped(ModelRunner(model), prefill_tokens=4)
    warm = Sampling(temperature=2.0, top_p=0.99, seed=1)
    loop.submit(*(Submit(id=f"{i}", prompt=(i, 5), max_tokens=60, sampling=warm, max_wait_s=1e9) for i in range(3)))
    loop.step()
    loop.run(pooled(PROMPTS["a"], Pooling.MEAN))
    assert len(launched) > len({id(step) for step in launched}) > 5, "some of its steps were computed again"
    assert close(vector(loop, "pooled"), alone(model, PROMPTS["a"], Pooling.MEAN))


def test_layers_behind_the_pooling_are_applied(tiny: Tiny) -> None:
    dice = np.random.default_rng(0)
    weight, bias = dice.standard_normal((3, 64)).astype(np.float32), np.ones(3, np.float32)
    dense = (Dense(mx.array(weight), mx.array(bias), mx.tanh), Dense(mx.array(weight[:, :3])))
    model = with_embedding(tiny("llama"), dense=dense)
    loop = Looped(ModelRunner(model))
    loop.run(pooled(PROMPTS["a"], Pooling.MEAN))
    expected = weight[:, :3] @ np.tanh(weight @ alone(model, PROMPTS["a"], Pooling.MEAN) + bias)
    assert np.allclose(vector(loop, "pooled"), expected, rtol=1e-4, atol=1e-5)


def step_of(runner: ModelRunner, request: Submit) -> Any:
    chunk = PrefillChunk(id=request.id, start=0, count=len(request.prompt))
    return runner.execute(StepPlan(step=0, admit=(Admit(request=request),), prefill=(chunk,)))


def test_a_vector_that_is_not_finite_fails_its_row_alone(tiny: Tiny) -> None:
    dense = (Dense(mx.full((2, 64), float("nan"))),)
    runner = ModelRunner(with_embedding(tiny("llama"), dense=dense))
    result = step_of(runner, pooled((1, 2, 3)))
    assert result.vectors == ()
    assert [(one.id, "not finite" in one.message) for one in result.failures] == [("pooled", True)]


@pytest.mark.parametrize(
    ("embedding", "message"),
    [
        (Embedding(unavailable="its last norm is not known"), "gives no embeddings: its last norm is not known"),
        (Embedding(dimensions=64, poolings=(Pooling.MEAN,)), "pooled by mean, not last"),
    ],
)
def test_a_pooling_that_the_model_does_not_have_fails_its_row(tiny: Tiny, embedding: Embedding, message: str) -> None:
    runner = ModelRunner(replace(tiny("llama"), embedding=embedding))
    (failure,) = step_of(runner, pooled((1, 2, 3))).failures
    assert message in failure.message


def test_what_it_can_do_is_among_its_capabilities(tiny: Tiny) -> None:
    can = ModelRunner(tiny("llama")).capabilities().embedding
    assert (can.dimensions, can.poolings, can.only, can.unavailable) == (64, tuple(Pooling), False, "")


class Odd:
    """A module whose norm is computed as often as `times` says, or that raises."""

    def __init__(self, selection: Any, times: int, shape: tuple[int, ...] = (4, 8)) -> None:
        self._selection, self._times, self._shape = selection, times, shape

    def __call__(self, tokens: Any, cache: Any) -> Any:
        self._selection.states += [mx.zeros(self._shape)] * self._times


@pytest.mark.parametrize(
    ("times", "shape", "reason"),
    [(0, (4, 8), "can't be read"), (2, (4, 8), "can't be read"), (1, (4, 8, 1), "shape"), (1, (3, 8), "shape")],
)
def test_a_model_whose_hidden_states_are_not_known_has_no_embeddings(
    tiny: Tiny, times: int, shape: tuple[int, ...], reason: str
) -> None:
    model = tiny("llama")
    selection = model.library.selection(model.module)

    class Library:
        def new_caches(self, module: Any) -> list[Any]:
            return []

    with pytest.raises(Unsupported, match=reason):
        hidden_size(Library(), Odd(selection, times, shape), selection)  # type: ignore[arg-type]
    with pytest.raises(Unsupported, match="output head is not known"):
        hidden_size(model.library, model.module, None)
