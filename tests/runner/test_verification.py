"""Verified draft tokens: whatever is proposed, each request gains what it gains without."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from tests.runner.conftest import Tiny
from tests.runner.speculated import Speculated
from tests.runner.speculation_requests import CALL, answers, has_grammars, made, mixed, same
from tests.runner.test_lookahead import ahead
from tests.runner.test_numbers import NAN, POISON, overwrite
from tests.support import cuda, cuda_launches
from tests.support.scripted_drafter import ScriptedDrafter
from tests.support.tiny import make_tiny
from treadle.core.messages import Sampling, Submit
from treadle.core.plan import Admit, DecodeRow, DraftTrial, StepPlan
from treadle.runner.base import RunnerBroken
from treadle.runner.drafting.drafter import DraftedRow
from treadle.runner.kv.slot_allocator import SlotAllocator
from treadle.runner.loading.loader import load
from treadle.runner.loading.model import LoadedModel
from treadle.runner.model_runner import ModelRunner
from treadle.runner.sampling import sampler
from treadle.runner.sampling.sampling_kernel import SamplingKernel

ACCEPTANCES = (0.0, 0.3, 0.6, 0.9, 1.0)
Plain = Callable[[str], tuple[list[Submit], Speculated]]


@pytest.fixture(scope="module")
def plain(tiny: Tiny) -> Plain:
    """Requests, and what they gain without drafts."""

    @cache
    def get(name: str) -> tuple[list[Submit], Speculated]:
        some = [one for one in mixed(0) if one.constraint is None or has_grammars(tiny(name))]
        run = Speculated(made(tiny(name)), some, drafts=0)
        run.run()
        return some, run

    return get


MODELS = ("llama", "gemma3", "qwen3_next", "falcon_h1")
"""Full attention, windows, and recurrent states that are computed again."""


@pytest.mark.parametrize("acceptance", ACCEPTANCES)
@pytest.mark.parametrize("name", MODELS)
def test_every_request_gains_what_it_gains_without_drafts(
    tiny: Tiny, plain: Plain, name: str, acceptance: float
) -> None:
    """All together, with some that are preempted, and some that leave."""
    some, wanted = plain(name)
    drafter = ScriptedDrafter(answers(wanted), acceptance)
    runner = made(tiny(name), drafter)
    found = Speculated(runner, some, drafts=3)
    found.run()
    same(found, wanted)
    assert found.verifying > found.steps // 4
    assert found.accepted <= drafter.proposed
    assert (found.accepted > 0) == (acceptance > 0)
    again = Speculated(runner, some, drafts=8, chunk=16)
    left = ("r1", "r2")
    tokens = again.run(preempt=1, cancel=left)
    assert tokens == {id_: all_[: len(tokens[id_])] for id_, all_ in answers(wanted).items()}
    assert all(len(tokens[id_]) == len(row.tokens) for id_, row in wanted.rows.items() if id_ not in left)
    assert drafter.released >= again.rows.keys()
    assert runner.statistics().kv_bytes == 0


PATHS: dict[str, Callable[[LoadedModel], LoadedModel]] = {
    "kernel": lambda model: replace(model, draws=SamplingKernel(model.vocabulary, mx.float32, cuda.ReferenceKernel)),
    "beside the pass": lambda model: replace(model, device="cuda"),
}


@pytest.mark.parametrize("path", PATHS)
def test_every_way_of_drawing_gives_what_it_gives_without_drafts(
    tiny: Tiny, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a nucleus is wider than its candidates and is drawn again, and where masks wait for the pass."""
    monkeypatch.setattr(sampler, "CANDIDATES", 4)
    monkeypatch.setattr(cuda_launches, "SORTED", 2)
    model = PATHS[path](tiny("llama"))
    some = mixed(1)
    wanted = Speculated(made(model), some, drafts=0)
    wanted.run()
    found = Speculated(made(model, ScriptedDrafter(answers(wanted), 0.8)), some, drafts=5)
    found.run()
    same(found, wanted)
    assert found.accepted > 50


@pytest.mark.parametrize("spare", [True, False])
def test_recurrent_states_cost_no_step_after_a_rejection(
    tiny: Tiny, spare: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accepted drafts are computed again beside the next ones: where one was rejected, and where there was no slot for
    the states behind the last one."""
    model, request = tiny("qwen3_next"), Submit(id="a", prompt=(5, 6), max_tokens=40)
    wanted = Speculated(ModelRunner(model), [request], drafts=0).run()["a"]
    if not spare:
        monkeypatch.setattr(SlotAllocator, "available", property(lambda self: 0))
    wrong = [token ^ (place % 6 == 5) for place, token in enumerate(wanted)]
    runner = ModelRunner(model, drafter=ScriptedDrafter({"a": wrong}))
    run = Speculated(runner, [request], drafts=3)
    run.step()
    while len(run.rows["a"].tokens) < 30:
        (gained,) = run.step().rows
        assert gained.drafted == 3
        accepted = len(gained.tokens) - 1
        assert runner._rows["a"].again == (0 if spare and accepted == 3 else accepted)
    assert run.run()["a"] == wanted
    assert 0 < run.accepted < run.drafted


def test_rows_verify_what_their_constraint_takes(tiny: Tiny) -> None:
    """Drafts end before a token that it does not take, and where it forces those that follow."""
    model = tiny("llama")
    wanted = Speculated(made(model), [held("a")], drafts=0).run()["a"]
    for drafts in (wanted, [*wanted[:3], ord("x"), *wanted[4:]]):
        drafter = ScriptedDrafter({"a": drafts})
        run = Speculated(made(model, drafter), [held("a")], drafts=8)
        assert run.run()["a"] == wanted
        assert drafter.proposed > run.drafted == run.accepted + 1  # it ends with a draft, in whose place none is gained
        assert run.results[-1].rows[0].ends_drafted


def held(id_: str) -> Submit:
    return Submit(id=id_, prompt=(1, 2, 3), max_tokens=40, constraint=CALL, sampling=Sampling(temperature=1.0, seed=3))


def test_proposals_that_no_row_may_verify_are_not_asked_for(tiny: Tiny) -> None:
    """Of requests that opt out, and of the last token of an answer."""
    model = tiny("llama")
    some = [Submit(id="out", prompt=(1,), max_tokens=6, speculate=False), Submit(id="in", prompt=(2,), max_tokens=6)]
    wanted = Speculated(ModelRunner(model), some, drafts=0).run()
    drafter = ScriptedDrafter(wanted)
    run = Speculated(ModelRunner(model, drafter=drafter), some, drafts=8)
    assert run.run() == wanted
    assert run.drafted == run.accepted == 4
    assert {id_ for id_, _ in drafter.followed} == {"in"}
    assert all(row.ready == 0 for result in run.results for row in result.rows if row.id == "out")


def test_results_tell_what_is_ready_and_which_trials_are_over(tiny: Tiny) -> None:
    model, request = tiny("llama"), Submit(id="a", prompt=(5, 6), max_tokens=9)
    wanted = Speculated(ModelRunner(model), [request], drafts=0).run()["a"]
    drafter = ScriptedDrafter({"a": wanted})
    run = Speculated(ModelRunner(model, drafter=drafter), [request], drafts=0)
    drafter.trials, drafter.matches = [DraftTrial("a", 4, 2)], 5
    first, second = run.step(), run.step()
    assert (first.trials, second.trials) == ((DraftTrial("a", 4, 2),), ())
    assert [(result.rows[0].ready, result.rows[0].match) for result in (first, second)] == [(8, 5), (7, 5)]
    assert drafter.followed == [("a", 3), ("a", 4)]
    quiet = run.runner.execute(StepPlan(step=3, decode=(DecodeRow("a", 2),)))
    assert quiet.rows[0].ready == 0
    assert len(drafter.followed) == 2


class Failing:
    """Raises `error` at every call."""

    names = ("failing",)

    def __init__(self, error: Exception) -> None:
        self._error = error

    def _raise(self, *args: Any) -> Any:
        raise self._error

    propose = follow = ready = match = release = statistics = warm_up = reset = close = _raise


def test_a_drafter_that_fails_costs_its_drafts_alone(tiny: Tiny, caplog: pytest.LogCaptureFixture) -> None:
    model, request = tiny("llama"), Submit(id="a", prompt=(5, 6), max_tokens=9)
    wanted = Speculated(ModelRunner(model), [request], drafts=0).run()
    with caplog.at_level(logging.WARNING):
        run = Speculated(ModelRunner(model, drafter=Failing(ValueError("no idea"))), [request])
        assert run.run() == wanted
    assert run.drafted == 0
    assert [record.getMessage() for record in caplog.records] == [
        "the drafter failing failed, and its drafts are left out: no idea"
    ]
    broken = Speculated(ModelRunner(model, drafter=Failing(RunnerBroken("gone"))), [request])
    with pytest.raises(RunnerBroken, match="gone"):
        broken.run()


@pytest.mark.parametrize("wrong", [-1, 261, 1 << 40])
def test_drafts_outside_of_the_vocabulary_are_cut(tiny: Tiny, wrong: int) -> None:
    model, request = tiny("llama"), Submit(id="a", prompt=(5, 6), max_tokens=6)
    wanted = Speculated(ModelRunner(model), [request], drafts=0).run()["a"]
    drafter = ScriptedDrafter({"a": [*wanted[:3], wrong, *wanted[4:]]})
    run = Speculated(ModelRunner(model, drafter=drafter), [request], drafts=5)
    assert run.run()["a"] == wanted
    assert run.accepted == run.drafted > 0


class Counting(ScriptedDrafter):
    """Notes how many tokens each row is asked for."""

    def propose(self, rows: Sequence[DraftedRow], most: Sequence[int]) -> list[Sequence[int]]:
        self.most = list(most)
        return super().propose(rows, most)


def test_a_step_verifies_no_more_than_there_is_memory_for_logits(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treadle.runner.verification.MAX_SCORED_TOKENS", 8)
    model, some = tiny("llama"), [Submit(id=f"{i}", prompt=(i,), max_tokens=12) for i in range(3)]
    drafter = Counting({})
    drafter.answers = Speculated(ModelRunner(model), some, drafts=0).run()
    run = Speculated(ModelRunner(model, drafter=drafter), some, drafts=5)
    run.step()
    run.step()
    assert drafter.most == [1, 1, 1]
    assert run.run() == drafter.answers


def test_drafts_are_verified_in_lock_step(tiny: Tiny) -> None:
    runner = ModelRunner(ahead(tiny("llama")), drafter=ScriptedDrafter({"a": list(range(99))}))
    request = Submit(id="a", prompt=(5,), max_tokens=9)
    runner.start(StepPlan(step=1, admit=(Admit(request),), decode=(DecodeRow("a", 0),)))
    with pytest.raises(AssertionError, match="lock-step"):
        runner.start(StepPlan(step=2, decode=(DecodeRow("a", 1, 3),)))
    runner.finish()
    runner.start(StepPlan(step=2, decode=(DecodeRow("a", 1, 3),)))
    with pytest.raises(AssertionError, match="lock-step"):
        runner.start(StepPlan(step=3, decode=(DecodeRow("a", 5),)))
    assert runner.finish().rows[0].drafted == 3


def test_verifying_is_decoding_and_no_prefill(tiny: Tiny) -> None:
    for name in ("llama", "qwen3_next"):
        request = Submit(id="a", prompt=(5,), max_tokens=9)
        run = Speculated(ModelRunner(tiny(name), drafter=ScriptedDrafter({"a": [300 % 256] * 9})), [request], drafts=3)
        run.step()
        for _ in range(3):
            result = run.step()
            assert result.decode_s > 0
            assert result.prefill_s == result.mixed_s == 0.0


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_rows_that_leave_while_their_drafts_are_verified_are_left_alone(tiny: Tiny, name: str) -> None:
    """One leaves for good; one comes back at once, under the same id."""
    model = tiny(name)
    some = [Submit(id=id_, prompt=(i, 2, 3), max_tokens=12) for i, id_ in enumerate("abc")]
    wanted = Speculated(ModelRunner(model), some, drafts=0).run()
    drafter = ScriptedDrafter({id_: [*tokens[:3], 0, *tokens[4:]] for id_, tokens in wanted.items()})
    runner = ModelRunner(model, drafter=drafter)
    run = Speculated(runner, some, drafts=4)
    run.step()
    plan = run.plan(run.live, 4)
    runner.start(plan)
    runner.release("a")
    runner.release("b")
    result = runner.finish()
    assert {row.id for row in result.rows} == {"a", "b", "c"}
    assert ("a", 8) not in drafter.followed
    run.apply(plan, result)
    run.release(run.rows["a"], over=True)
    run.release(run.rows["b"])
    run.run()
    assert {id_: run.rows[id_].tokens for id_ in "bc"} == {id_: wanted[id_] for id_ in "bc"}
    assert runner.statistics().kv_bytes == 0


def test_a_row_with_nan_among_its_verified_logits_fails_alone(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "m")
    overwrite(folder, "model.embed_tokens.weight", NAN, slice(POISON, POISON + 1))
    model = load(folder)
    biased = Sampling(logit_bias=((POISON, 1000.0),))
    some = [Submit(id="bad", prompt=(1, 2), max_tokens=8, sampling=biased), Submit(id="b", prompt=(3,), max_tokens=8)]
    wanted = Speculated(ModelRunner(model), [some[1]], drafts=0).run()
    drafter = ScriptedDrafter({"bad": [1, POISON, 1, 1, 1, 1, 1, 1], **wanted})
    run = Speculated(ModelRunner(model, drafter=drafter), some, drafts=4)
    assert run.run()["b"] == wanted["b"]
    assert list(run.failures) == ["bad"]
    assert "NaN" in run.failures["bad"]
