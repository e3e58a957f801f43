"""Prompts that a runner with a scorer prefills in part: what their requests gain, beside all kinds of others."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
import pytest

from tests.runner.backends import configured
from tests.runner.columns import logits_of
from tests.runner.conftest import Tiny
from tests.runner.drafting.headed import maker
from tests.runner.paged.models import loaded, make, paged
from tests.runner.scoring.prompts import LEAST, assert_nothing_is_held, kept, looped, mixed, scorer_of, told
from tests.runner.test_lookahead import ahead, in_lock_step
from tests.support.tiny import make_tiny
from treadle.core.messages import Submit
from treadle.core.plan import Admit, RowKept
from treadle.core.sparse_prompt import kept_tokens
from treadle.errors import ConfigError
from treadle.runner.base import RunnerBroken
from treadle.runner.drafting.head import HeadDrafter
from treadle.runner.drafting.lookup import LookupDrafter
from treadle.runner.drafting.model import ModelDrafter
from treadle.runner.loading.loader import load
from treadle.runner.loading.model import LoadedModel
from treadle.runner.scoring.scorer import Scorer

LONG = tuple(random.Random(3).choices(range(256), k=500))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(make_tiny(tmp_path_factory.mktemp("scorer") / "small", layers=2, seed=5))


def everything(one: Any, some: list[Submit]) -> dict[str, list[Any]]:
    one.run(*some)
    return {request.id: one.everything(request.id) for request in some}


# Keep 1.0 equals plain prefill -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_next", "qwen3_moe"])
def test_all_kept_is_plain_prefill_for_every_request(name: str, tiny: Tiny, small: LoadedModel) -> None:
    """Alone, and in batches with short prompts, opt-outs, grammars and requests that speculate."""
    model = ahead(tiny(name))
    some = mixed(model, 1)
    plain = looped(model, None)
    wanted = everything(plain, some)
    found = looped(model, scorer_of(small, 1.0), LookupDrafter())
    assert everything(found, some) == wanted
    assert told(found).prompts >= 4
    assert kept(found, "greedy") == (480, 480)
    alone = looped(model, scorer_of(small, 1.0))
    assert {one.id: everything(alone, [one])[one.id] for one in some} == wanted
    assert_nothing_is_held(found)


def test_all_kept_is_plain_prefill_over_pages() -> None:
    model = loaded(make("qwen3"), paged(make("qwen3")))
    some = mixed(model, 2, tokens=10)
    plain = looped(model, None)
    wanted = plain.run(*some)
    found = looped(model, scorer_of(model, 1.0))
    assert found.run(*some) == wanted
    assert told(found).prompts >= 4
    assert_nothing_is_held(found)


# In part -----------------------------------------------------------------------------------------------------------


def kept_of(one: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[int, ...]]:
    """What its scorer chooses, by request."""
    found: dict[str, tuple[int, ...]] = {}
    read = Scorer.read

    def noted(self: Scorer, step: Any) -> list[RowKept]:
        outcome = read(self, step)
        found.update({row.id: row.positions for row in outcome})
        return outcome

    monkeypatch.setattr(Scorer, "read", noted)
    return found


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_tokens_are_those_of_the_kept_part_at_its_positions(
    name: str, tiny: Tiny, small: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By mlx-lm's module with positions and masks written by hand."""
    model = tiny(name)
    one = looped(model, scorer_of(small, 0.3))
    chosen = kept_of(one, monkeypatch)
    tokens = one.run(Submit("a", LONG, 6))["a"]
    places = [*chosen["a"], *range(len(LONG), len(LONG) + 5)]
    assert 0 < len(chosen["a"]) == kept_tokens(len(LONG), 0.3) < len(LONG)
    line = [*LONG, *tokens]
    logits = logits_of(model, [line[place] for place in places], np.array(places, np.int32))
    assert logits[len(chosen["a"]) - 1 :].argmax(axis=-1).tolist() == tokens


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_next"])
def test_a_request_gains_the_same_alone_and_beside_all_others(name: str, tiny: Tiny, small: LoadedModel) -> None:
    """Also where others speculate, and with little memory, where some are preempted and go on."""
    model = ahead(tiny(name))
    some = mixed(model, 3)
    alone = looped(model, scorer_of(small))
    wanted = {one.id: everything(alone, [one])[one.id] for one in some}
    together = looped(model, scorer_of(small), LookupDrafter())
    assert everything(together, some) == wanted
    assert together.scheduler.statistics(0.0, together.runner.statistics()).spec_prefill.prompts >= 4
    assert_nothing_is_held(together)


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_next"])
def test_sequences_that_are_preempted_go_on_with_what_was_chosen(name: str, tiny: Tiny, small: LoadedModel) -> None:
    model, dice = in_lock_step(tiny(name)), random.Random(5)
    some = mixed(model, 3)
    wanted = everything(looped(model, scorer_of(small)), some)
    found = looped(model, scorer_of(small))
    found.submit(*some)
    found.step()
    while found.has_work:
        found.step()
        running = [seq for seq in found.scheduler._running.values() if seq.joined and not found.scheduler.in_flight]
        if running and dice.random() < 0.1:
            found.scheduler._preempt([dice.choice(running)], found.now)
    assert {one.id: found.everything(one.id) for one in some} == wanted
    assert found.scheduler.statistics(0.0, found.runner.statistics()).preempted > 4
    assert_nothing_is_held(found)


def at_once() -> float:
    """A clock for drafters, by which they take no time: how busy the machine is does not decide what they draft."""
    return 0.0


@pytest.mark.parametrize("kind", ["draft", "mtp"])
def test_drafters_with_caches_of_their_own_change_nothing(
    kind: str, tiny: Tiny, small: LoadedModel, tmp_path: Path
) -> None:
    headed = maker(tmp_path)("mimo")
    model = headed.model.target if kind == "mtp" else tiny("llama")
    some = mixed(model, 4)
    wanted = everything(looped(model, scorer_of(small)), some)
    drafter = HeadDrafter(headed.model, at_once) if kind == "mtp" else ModelDrafter(model, model.vocabulary, at_once)
    found = looped(model, scorer_of(small), drafter)
    assert everything(found, some) == wanted
    assert found.scheduler.statistics(0.0, found.runner.statistics()).speculation.drafted


@pytest.mark.parametrize("kind", ["llama", "gemma3", "pages"])
def test_a_draft_model_computes_the_kept_tokens_at_their_positions(kind: str, tiny: Tiny, small: LoadedModel) -> None:
    """So the same model drafts what is sampled. Beside a prompt that is whole, and one that it has drafted for before,
    whose prefix it must not take for that of the part."""
    model = loaded(make("qwen3"), paged(make("qwen3"))) if kind == "pages" else tiny(kind)
    whole = Submit("whole", LONG, 24, sparse_prefill=False)
    some = [Submit("part", LONG, 24), Submit("other", LONG[:4] + LONG[8:], 24)]
    plain = looped(model, scorer_of(small, 0.3))
    plain.run(whole)
    wanted = plain.run(*some)
    drafter = ModelDrafter(model, model.vocabulary, at_once)
    found = looped(model, scorer_of(small, 0.3), drafter)
    found.run(whole)
    assert found.run(*some) == wanted
    speculation = found.scheduler.statistics(0.0, found.runner.statistics()).speculation
    assert speculation.accepted == speculation.drafted > 30
    assert drafter.statistics().kv_bytes == 0
    assert_nothing_is_held(found)


def test_what_is_prefilled_in_part_is_never_reused(tiny: Tiny, small: LoadedModel) -> None:
    """Neither by the same prompt whole, nor in part, while it runs or later; a whole prefix is reused in front."""
    model = tiny("llama")
    whole = Submit("whole", LONG, 5, sparse_prefill=False)
    wanted = looped(model, None).run(whole)["whole"]
    one = looped(model, scorer_of(small, 0.3))
    one.submit(Submit("first", LONG, 30))
    while not one.tokens("first"):
        one.step()
    again = Submit("again", LONG, 5)
    found = one.run(whole, again)
    assert found["whole"] == wanted
    assert (one.cached("whole"), one.cached("again")) == (0, 0)
    assert found["again"] == found["first"][:5]
    assert one.runner.match_prefix(Admit(msgspec.structs.replace(whole, id="x"))) == 499
    longer = (*LONG, *random.Random(1).choices(range(256), k=400))
    one.run(Submit("behind", longer, 5))
    assert one.cached("behind") == 500
    scored = 900 - one.cached("behind")
    assert kept(one, "behind") == (scored, one.cached("behind") + kept_tokens(scored, 0.3))


def test_choices_of_a_prompt_are_scored_once(tiny: Tiny, small: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    one = looped(tiny("llama"), scorer_of(small, 0.3))
    chosen = kept_of(one, monkeypatch)
    found = one.run(*(Submit(f"{i}", LONG, 5) for i in range(4)))
    assert len(chosen) == 1
    assert found["0"] == found["1"] == found["2"] == found["3"]
    assert {kept(one, id_) for id_ in found} == {(500, kept_tokens(500, 0.3))}
    assert_nothing_is_held(one)


def test_a_scorer_computes_a_common_prefix_once(tiny: Tiny, small: LoadedModel) -> None:
    scorer = scorer_of(small, 0.3)
    one = looped(tiny("llama"), scorer)
    one.run(Submit("a", LONG, 3))
    assert scorer.match(Submit("b", LONG, 3)) > 400
    before = scorer.statistics().prefix.reused
    tokens = one.run(Submit("b", LONG, 3))
    assert tokens["a"] == tokens["b"]
    assert scorer.statistics().prefix.reused - before > 400
    one.runner.forget_prefixes()
    assert scorer.match(Submit("b", LONG, 3)) == 0


# The same weights, whatever computes them ----------------------------------------------------------------------------


def weights_of(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The importance of LONG's tokens, as a scorer with `model` reads it."""
    found = []
    monkeypatch.setattr(
        "treadle.runner.scoring.scorer.kept_positions",
        lambda weights, start, count: (found.append(weights), tuple(range(start, start + count)))[1],
    )
    one = looped(model, scorer_of(model, 1.0))
    one.run(Submit("a", LONG, 2))
    return found[0]


def by_hand(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The same by mlx-lm's own attention over the whole prompt, and each of the tokens behind it at once."""
    library, module, line = model.library, model.module, [*LONG]
    for _ in range(7):
        logits = module(mx.array([line]), cache=library.new_caches(module))
        line.append(int(logits[0, -1].argmax().item()))
    calls: list[Any] = []
    fused = mx.fast.scaled_dot_product_attention

    def spied(queries: Any, keys: Any, values: Any, **named: Any) -> Any:
        calls.append((queries[0, :, -8:], keys[0], named["scale"]))
        return fused(queries, keys, values, **named)

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", spied)
    mx.eval(module(mx.array([line]), cache=library.new_caches(module)))
    largest = np.zeros((8, len(LONG)), np.float32)
    for queries, keys, scale in calls:
        keys = mx.repeat(keys, queries.shape[0] // keys.shape[0], axis=0)[:, : len(LONG)]
        weights = mx.softmax((queries * scale) @ keys.swapaxes(-1, -2), axis=-1)
        largest = np.maximum(largest, np.array(weights).max(axis=0))
    return largest.mean(axis=0)


def test_importance_is_the_attention_of_mlx_lm(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("qwen3_moe")
    np.testing.assert_allclose(weights_of(model, monkeypatch), by_hand(model, monkeypatch), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "gpt_neox"])
def test_every_path_sees_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused layers, the model's own, and those compiled: where the queries come out of programs."""
    module = make(name)
    wanted = weights_of(loaded(module, paged(module), fused=False), monkeypatch)
    found = weights_of(loaded(module, paged(module)), monkeypatch)
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-6)
    assert wanted.std() > 0


# Ends and troubles ---------------------------------------------------------------------------------------------------


def test_500_that_leave_in_scoring_and_prefill_hold_nothing(tiny: Tiny, small: LoadedModel) -> None:
    one, dice = looped(ahead(tiny("llama")), scorer_of(small, 0.3), LookupDrafter(), max_running=8), random.Random(1)
    stays = Submit("stays", LONG, 10)
    wanted = looped(tiny("llama"), scorer_of(small, 0.3)).run(stays)["stays"]
    live: list[str] = []
    for number in range(500):
        prompt = tuple(dice.choices(range(256), k=dice.choice([350, 400])))
        one.submit(Submit(f"{number}", prompt, 40))
        live.append(f"{number}")
        if number == 250:
            one.submit(stays)
        if len(live) > dice.randrange(8):
            one.cancel(live.pop(dice.randrange(len(live))))
        if dice.random() < 0.7:
            one.step()
    for id_ in live:
        one.cancel(id_)
    while one.has_work:
        one.step()
    assert one.tokens("stays") == wanted
    assert_nothing_is_held(one)


def test_a_prompt_that_the_scorer_fails_on_is_prefilled_whole(
    tiny: Tiny, small: LoadedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In its chunks, its look-ahead, or with the result: told once in the log, and in the statistics each time."""
    model = ahead(tiny("llama"))
    some = [Submit(f"{i}", LONG, 6) for i in range(3)]
    wanted = looped(model, None).run(*some)
    for name, after in (("_compute", 1), ("_pass_ahead", 5), ("_compare", 2), ("_outcome", 0)):
        scorer = scorer_of(small, 0.3)
        own, calls = getattr(scorer, name), []
        if name == "_outcome":
            monkeypatch.setattr("treadle.runner.scoring.scorer.kept_positions", lambda *_: 1 / 0)
        else:

            def fails(*args: Any, own: Any = own, after: int = after, calls: list[int] = calls) -> Any:
                calls.append(1)
                if len(calls) > after:
                    raise ValueError("it does not work")
                return own(*args)

            monkeypatch.setattr(scorer, name, fails)
        caplog.clear()
        one = looped(model, scorer)
        with caplog.at_level(logging.WARNING):
            assert one.run(*some) == wanted, name
        assert told(one).failed == 3
        assert kept(one, "0") == (0, 0)
        assert sum("prefilled whole" in line.message for line in caplog.records) == 1
        assert_nothing_is_held(one)
        monkeypatch.undo()


def test_a_fault_of_the_runtime_is_no_failure_of_a_prompt(
    tiny: Tiny, small: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    scorer = scorer_of(small)

    def broken(*_: object) -> None:
        raise RuntimeError("a stream is gone")

    monkeypatch.setattr(scorer, "_compute", broken)
    one = looped(tiny("llama"), scorer)
    one.submit(Submit("a", LONG, 3))
    with pytest.raises(RunnerBroken, match="a stream is gone"):
        one.run()


def test_cached_tokens_that_the_scorer_has_lost_are_computed_again(
    tiny: Tiny, small: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    scorer = scorer_of(small, 0.3)
    one = looped(ahead(tiny("llama")), scorer)
    monkeypatch.setattr(scorer, "match", lambda request: 64)
    found = one.run(Submit("a", LONG, 5))
    monkeypatch.undo()
    assert found["a"] == looped(tiny("llama"), scorer_of(small, 0.3)).run(Submit("a", LONG, 5))["a"]
    assert_nothing_is_held(one)


def test_a_scorer_is_warmed_up_and_leaves_nothing(small: LoadedModel, tiny: Tiny) -> None:
    for model in (small, loaded(make("qwen3"), paged(make("qwen3")))):
        scorer = scorer_of(model)
        scorer.warm_up()
        held = scorer.statistics()
        assert (held.prompts, held.kv_bytes, held.prefix.held) == (0, 0, 0)
        scorer.close()


@pytest.mark.parametrize(("token_s", "longest"), [(1e-5, 1024), (1e-3, 256), (2e-3, 64)])
def test_the_warm_up_times_chunks_until_one_tells(small: LoadedModel, token_s: float, longest: int) -> None:
    """Of those that a step may score."""
    now = 0.0
    scorer = Scorer(replace(small, choice=replace(small.choice, prefill_tokens=2048)), 256, keep=0.3, min_tokens=LEAST)
    compute = scorer._wait_for_chunks

    def computed(sequence: Any, chunks: Sequence[int]) -> None:
        nonlocal now
        compute(sequence, chunks)
        now += 0.001 + token_s * sum(chunks)

    scorer._clock, scorer._wait_for_chunks = lambda: now, computed  # type: ignore[method-assign]
    scorer.warm_up()
    found = scorer.capabilities().chunks
    assert [cost.tokens for cost in found] == [size for size in (64, 256, 1024) if size <= longest]
    assert [cost.seconds for cost in found] == [pytest.approx(0.001 + token_s * cost.tokens) for cost in found]
    scorer.close()


def test_a_short_context_is_warmed_up_in_what_fits(tmp_path: Path) -> None:
    scorer = scorer_of(load(make_tiny(tmp_path / "short", context=64)))
    assert scorer.capabilities().longest == 56
    scorer.warm_up()
    scorer.close()


# Refused -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("llama", {"padded": True}, "its padded KV backend does not show what it attends to"),
        ("mamba", {}, "it has no layer with attention to all tokens"),
        ("deepseek_v3", {}, "it has no layer with attention to all tokens"),
    ],
)
def test_models_whose_attention_cannot_be_seen_are_refused(
    name: str, options: dict[str, Any], reason: str, tiny: Tiny
) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        scorer_of(tiny(name, **options))
    assert caught.value.param == "spec_prefill"


def test_capabilities_name_the_limits(small: LoadedModel) -> None:
    can = scorer_of(replace(configured(small, blocks=7), name="small")).capabilities()
    assert (can.scorer, can.keep, can.min_tokens, can.rows) == ("small", 0.5, LEAST, 4)
    assert (can.block, can.blocks, can.longest) == (256, 7, 7 * 256 - 8)
