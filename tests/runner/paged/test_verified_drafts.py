"""Verified draft tokens in pages: what rows hold, and what others may reuse of them."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from tests.runner.paged.conftest import Paged
from tests.runner.paged.models import VOCABULARY, loaded, make
from tests.runner.paged.models import paged as paged_config
from tests.runner.speculated import Speculated
from tests.runner.speculation_requests import CALL, answers, made, mixed, same
from tests.support.scripted_drafter import ScriptedDrafter
from treadle.core.messages import Sampling, Submit
from treadle.core.plan import Admit, DecodeRow, PrefillChunk, StepPlan
from treadle.runner.forward import compiled
from treadle.runner.forward.batch_buckets import decode_bucket
from treadle.runner.kv.backend import WarmLimits
from treadle.runner.kv.paged.paged_pass import PAGE
from treadle.runner.kv.paged.warm_passes import verifying_passes

MODELS = ["llama", "llama windowed", "gemma3", "qwen3_next", "glm4_moe_lite", "gpt_neox"]
"""Full attention, windows, recurrent states, latents, and layers that are not fused."""


@pytest.mark.parametrize("name", MODELS)
def test_every_request_gains_what_it_gains_without_drafts(paged: Paged, name: str) -> None:
    model = paged(name)
    some = [one for one in mixed(2) if one.constraint is None or model.vocabulary > 260]
    wanted = Speculated(made(model), some, drafts=0)
    wanted.run()
    runner = made(model, ScriptedDrafter(answers(wanted), 0.7))
    free = runner.free_blocks()
    found = Speculated(runner, some, drafts=7)
    found.run()
    same(found, wanted)
    assert found.drafted > found.accepted > 100
    again = Speculated(runner, some, drafts=2, chunk=30)
    assert again.run(preempt=3) == answers(wanted)
    assert runner.free_blocks() == free
    assert runner.statistics().kv_bytes == 0


@pytest.mark.parametrize("name", MODELS)
def test_steps_take_the_pass_that_was_prepared_meanwhile(
    paged: Paged, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where as many tokens are verified as in the step before; alone, and where rows leave."""
    model = paged(name)
    some = [Submit(id=f"{i}", prompt=(i, *range(30 + i)), max_tokens=40 + 40 * i) for i in range(2)]
    wanted = Speculated(made(model), some, drafts=0).run()
    taken = []
    is_of = compiled._Call.is_of

    def noted(call: Any, *args: Any) -> bool:
        taken.append(is_of(call, *args))
        return taken[-1]

    monkeypatch.setattr(compiled._Call, "is_of", noted)
    runner = made(model, ScriptedDrafter(wanted, 0.6))
    run = Speculated(runner, some, drafts=3)
    assert run.run() == wanted
    assert sum(taken) > run.verifying // 3 > 10


def test_a_step_behind_plain_ones_takes_the_pass_that_was_prepared_for_it(
    paged: Paged, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, one = paged("llama"), Submit(id="one", prompt=tuple(range(30)), max_tokens=60)
    wanted = Speculated(made(model), [one], drafts=0).run()
    run = Speculated(made(model, ScriptedDrafter(wanted, 0.6)), [one])
    taken: list[bool] = []
    is_of = compiled._Call.is_of
    monkeypatch.setattr(compiled._Call, "is_of", lambda *args: taken.append(is_of(*args)) or taken[-1])
    while run.live:
        run.step(drafts=3 * (run.steps % 3 == 2))
    assert sum(taken) >= run.verifying - 2 > 5, "but the first one, and the last, which has fewer drafts"
    assert {row.id: row.tokens for row in run.rows.values()} == wanted


@pytest.mark.parametrize("name", MODELS[:4])
def test_rows_hold_the_pages_of_what_they_keep(paged: Paged, name: str) -> None:
    """After each step, also where rejected drafts had begun another page."""
    model = paged(name)
    some = [Submit(id=f"{i}", prompt=(i, *range(20 + 7 * i)), max_tokens=70) for i in range(3)]
    wanted = Speculated(made(model), some, drafts=0).run()
    runner = made(model, ScriptedDrafter(wanted, 0.5))
    free = runner.free_blocks()
    run = Speculated(runner, some, drafts=8)
    while run.live:
        run.step()
        assert free - runner.free_blocks() == sum(-(-row.cached // PAGE) for row in run.live)
    assert answers(run) == wanted


@pytest.mark.parametrize("name", MODELS[:4])
def test_no_rejected_token_reaches_the_prefix_cache(paged: Paged, name: str) -> None:
    """Prompts that go on as an answer did begin with it, and are answered as if it were not there."""
    model = paged(name)
    first = Submit(id="first", prompt=tuple(range(40)), max_tokens=50)
    wanted = Speculated(made(model), [first], drafts=0).run()["first"]
    runner = made(model, ScriptedDrafter({"first": wanted}, 0.5))
    run = Speculated(runner, [first], drafts=7)
    assert run.run()["first"] == wanted
    assert run.drafted > run.accepted > 0
    reused = 0
    for count in (49, 25, 24, 23, 1):
        later = Submit(id=f"{count}", prompt=(*first.prompt, *wanted[:count]), max_tokens=8)
        (alone,) = Speculated(made(model), [later], drafts=0).run().values()
        before = runner.statistics().prefix.reused
        assert Speculated(runner, [later], drafts=0).run() == {later.id: alone}
        reused += runner.statistics().prefix.reused - before
    assert reused > 0


def test_states_are_computed_again_beside_forced_tokens() -> None:
    """A row whose constraint forces tokens behind a rejected draft computes both in its next step."""
    module = make("qwen3_next", vocab_size=VOCABULARY)
    model = loaded(module, paged_config(module))
    some = [
        Submit(id=f"{i}", prompt=(i, 5, 6), max_tokens=60, constraint=CALL, sampling=Sampling(temperature=1.0, seed=i))
        for i in range(6)
    ]
    wanted = Speculated(made(model), some, drafts=0).run()
    assert all(b"-and-then-" in bytes(tokens) for tokens in wanted.values())
    for acceptance in (0.0, 0.5):
        run = Speculated(made(model, ScriptedDrafter(wanted, acceptance)), some, drafts=3)
        assert run.run() == wanted
        assert run.drafted > run.accepted


@pytest.mark.parametrize("in_graphs", [True, False])
@pytest.mark.parametrize(("layers", "pieces"), [(2, [4]), (6, [4, 4])])
def test_the_first_layers_of_a_step_that_verifies_are_evaluated_first(
    layers: int, pieces: list[int], in_graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With CUDA graphs, the first of which are short then, and without; not those of other steps."""
    module = make("llama", num_hidden_layers=layers)
    runner = made(loaded(module, paged_config(module)), ScriptedDrafter({"a": [0] * 99}))
    assert runner.verifies_in_graphs, "MLX has no switch here"
    runner.verifies_in_graphs = in_graphs
    first = Admit(Submit("a", prompt=(1, 2, 3), max_tokens=9))
    runner.execute(StepPlan(0, (first,), (PrefillChunk("a", 0, 2),), (DecodeRow("a", 0),)))
    evaluated, evaluate = [], mx.async_eval

    def noted(*arrays: Any) -> None:
        evaluated.append(arrays[0])
        evaluate(*arrays)

    monkeypatch.setattr(mx, "async_eval", noted)
    runner.execute(StepPlan(1, decode=(DecodeRow("a", 1),)))
    assert len(evaluated) == 1
    with runner.filled_drafts():
        result = runner.execute(StepPlan(2, decode=(DecodeRow("a", 2, drafts=3),)))
    assert result.rows[0].drafted == 3
    assert [one.shape[0] for one in evaluated[1:-1]] == pieces
    runner.close()


def test_batches_of_all_buckets_are_warmed_up_to_verify_drafts() -> None:
    passes = verifying_passes(4, PAGE, 100, WarmLimits(max_running=16, context=2048, prefill_tokens=0, draft_tokens=7))
    assert [one.drafts for one in passes if one.decoding == 1] == [1, 2, 3, 4, 5, 6, 7]

    def program(rows: int, drafts: int) -> tuple[int, bool, bool]:
        return decode_bucket(rows * (1 + drafts)), drafts > 1, drafts > 3

    programs = {program(one.decoding, one.drafts) for one in passes}
    some = [(rows, drafts) for rows in range(1, 17) for drafts in range(1, 8)]
    assert programs == {program(rows, drafts) for rows, drafts in some}
    several = [one for one in passes if one.decoding > 1]
    assert len(several) < len(programs), "each once"
    few = verifying_passes(4, PAGE, 3, WarmLimits(max_running=16, context=2048, prefill_tokens=0, draft_tokens=3))
    assert {one.decoding for one in few} == {1, 2, 3}
    assert {one.drafts for one in few} == {1, 2, 3}
    assert verifying_passes(4, PAGE, 100, WarmLimits(max_running=16, context=2048, prefill_tokens=0)) == []
    assert verifying_passes(4, PAGE, 0, WarmLimits(max_running=1, context=64, prefill_tokens=0, draft_tokens=3)) == []
