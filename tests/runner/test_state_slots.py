"""F6 for recurrent and hybrid models in backends of their own: prompts go on from states in slots, and end the same."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from tests.runner.conftest import Tiny
from tests.runner.looped import Looped
from tests.runner.paged.conftest import paged as paged_fixture
from tests.runner.reference import reference, references
from tests.runner.test_snapshots import request, some_tokens
from treadle.core.messages import FinishReason, Sampling, Submit
from treadle.runner.loading.model import LoadedModel
from treadle.runner.model_runner import ModelRunner

paged = paged_fixture
WAYS = [("contiguous", "qwen3_next"), ("paged", "mamba2")]
Get = Callable[[str, str], LoadedModel]


@pytest.fixture
def get(tiny: Tiny, paged: Callable[..., LoadedModel]) -> Get:
    """A model by its backend and family."""
    return lambda backend, family: tiny(family) if backend == "contiguous" else paged(family, fused=False)


def slots_of(runner: ModelRunner) -> Any:
    return runner._backend._recurrent.slots  # type: ignore[attr-defined]


@pytest.mark.parametrize(("backend", "family"), WAYS)
def test_a_prompt_goes_on_from_the_last_state_on_its_way(get: Get, backend: str, family: str) -> None:
    """The same again, one that goes on, and those that part: the first that does leaves a state to the next."""
    model = get(backend, family)
    assert model.choice.config.name == backend
    loop = Looped(ModelRunner(model), prefill_tokens=512)
    trunk, other = some_tokens(1, 200), some_tokens(2, 200)
    answer = loop.run(request("first", trunk, max_tokens=40))["first"]
    turns = {
        "again": (trunk, 192),
        "longer": (trunk + other[:60], 192),
        "next turn": ((*trunk, *answer, *other[:9]), 239),
        "parts": (trunk[:150] + other[:50], 0),
        "parts as well": (trunk[:150] + other[100:170], 128),
        "parts there too": (trunk[:130] + other[70:90], 128),
        "earlier": (trunk[:70] + other[:20], 0),
        "earlier again": (trunk[:80] + other[20:40], 64),
        "short": (trunk[:40], 0),
        "else": (other, 0),
    }
    for name, (prompt, reused) in turns.items():
        asked = request(name, prompt)
        got = loop.run(asked)[name]
        assert got == reference(model, asked, got), name
        assert loop.cached(name) == reused, name
    assert slots_of(loop.runner).held == 0


@pytest.mark.parametrize(("backend", "family"), WAYS)
def test_a_conversation_goes_on_where_its_last_turn_ended(get: Get, backend: str, family: str) -> None:
    model = get(backend, family)
    loop = Looped(ModelRunner(model), prefill_tokens=512)
    prompt, known = some_tokens(3, 50), 0
    for turn in range(4):
        asked = request(f"turn {turn}", prompt, max_tokens=37)
        answer = loop.run(asked)[asked.id]
        assert answer == reference(model, asked, answer)
        assert loop.cached(asked.id) == known
        known = len(prompt) + len(answer) - 1
        prompt = (*prompt, *answer, *some_tokens(turn, 9))


@pytest.mark.parametrize(("backend", "family"), WAYS)
def test_sequences_that_come_together_compute_their_prefix_once(get: Get, backend: str, family: str) -> None:
    """P9: they wait for the first, which keeps a state where they part."""
    model = get(backend, family)
    loop = Looped(ModelRunner(model), prefill_tokens=90)
    trunk = some_tokens(4, 310)
    some = [request(f"r{i}", trunk + some_tokens(10 + i, 60)) for i in range(4)]
    answers = loop.run(*some)
    assert [answers[one.id] for one in some] == [reference(model, one, answers[one.id]) for one in some]
    assert [loop.cached(one.id) for one in some] == [0, 288, 288, 288]


@pytest.mark.parametrize(("backend", "family"), WAYS)
def test_salts_are_kept_apart(get: Get, backend: str, family: str) -> None:
    loop = Looped(ModelRunner(get(backend, family)), prefill_tokens=512)
    prompt = some_tokens(5, 129)
    for id_, salt, cached in [("a", "x", 0), ("b", "y", 0), ("c", "", 0), ("d", "x", 128), ("e", "y", 128)]:
        loop.run(request(id_, prompt, max_tokens=3, salt=salt))
        assert loop.cached(id_) == cached, id_


@pytest.mark.parametrize(("backend", "family"), WAYS)
def test_whatever_happens_each_sequence_is_mlx_lms_own(get: Get, backend: str, family: str) -> None:
    """Prompts in chunks beside rows that decode and leave, that begin as others do, with few slots for cached ones."""
    dice, model = random.Random(1), get(backend, family)
    loop = Looped(ModelRunner(model), max_running=4, prefill_tokens=50)
    waiting: list[Submit] = []
    for i in range(14):
        trunk = dice.choice(waiting).prompt if waiting and dice.random() < 0.6 else ()
        fresh = some_tokens(100 + i, dice.choice([1, 20, 70, 130]))
        prompt = (trunk[: dice.choice([32, 64, len(trunk)])] + fresh)[:200]
        drawn = Sampling(temperature=1.0, seed=i, repetition_penalty=1.1 if i % 2 else 1.0)
        sampling = drawn if i % 3 == 0 else Sampling()
        waiting.append(request(f"r{i}", prompt, max_tokens=dice.randint(3, 40), sampling=sampling))
    some, cancelled = list(waiting), set()
    while waiting or loop.has_work:
        while waiting and dice.random() < 0.5:
            loop.submit(waiting.pop(0))
        if dice.random() < 0.04:
            cancelled.add(victim := dice.choice(some).id)
            loop.cancel(victim)
        loop.step()
    for one in some:
        got = loop.tokens(one.id)
        if one.sampling == Sampling():
            wanted = reference(model, one, got)
            assert got == wanted[: len(got)], one.id
        assert len(got) == one.max_tokens or one.id in cancelled
    assert loop.runner.statistics().prefix.reused > 0
    assert slots_of(loop.runner).held == 0
    assert loop.runner.statistics().kv_bytes == 0


def test_a_scored_prompt_is_computed_whole(get: Get) -> None:
    model = get("contiguous", "qwen3_next")
    loop = Looped(ModelRunner(model), prefill_tokens=512)
    prompt = some_tokens(6, 150)
    loop.run(request("plain", prompt))
    scored = loop.run(request("scored", prompt, prompt_logprobs=0))
    assert scored["scored"] == scored["plain"]
    assert len([one for output in loop.outputs["scored"] for one in output.prompt_logprobs]) == 149


def test_states_that_are_kept_hold_no_others(get: Get) -> None:
    """An array of a batch's states is as large as all of them."""
    model = get("contiguous", "mamba")
    runner = ModelRunner(model)
    loop = Looped(runner, prefill_tokens=512)
    some = [request(f"r{i}", some_tokens(i, 40), max_tokens=20) for i in range(4)]
    answers = loop.run(*some)
    assert answers == references(model, some, answers)
    for layer in runner._backend._recurrent.layers:  # type: ignore[attr-defined]
        for entry in layer.entries:
            mx.eval(entry.pool.arrays())
            assert all(array.shape[0] == 1 for array in entry.pool.arrays())


def test_slots_are_free_where_there_is_no_memory_for_what_a_row_leaves(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They leaked, until none was left and the engine ended."""
    runner = ModelRunner(tiny("qwen3_next", max_running=4))
    backend: Any = runner._backend
    release, evaluate = backend.release, backend._store._evaluate

    def fails(arrays: Any) -> None:
        raise RuntimeError("[malloc] Unable to allocate 123 bytes.")

    def without_memory(sequence: Any) -> None:
        backend._store._evaluate = fails
        try:
            release(sequence)
        finally:
            backend._store._evaluate = evaluate

    monkeypatch.setattr(backend, "release", without_memory)
    loop = Looped(runner, prefill_tokens=64)
    for turn in range(12):
        loop.run(Submit(f"{turn}", prompt=tuple(range(turn, turn + 40)), max_tokens=5))
        assert loop.finish(f"{turn}") is FinishReason.LENGTH
        assert (backend._recurrent.slots.held, runner.statistics().kv_bytes) == (0, 0)
