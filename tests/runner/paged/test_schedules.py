"""Rows in pages under the engine's own loop, a step ahead of itself, whatever arrives, leaves, fails or has to wait.

Each sequence is what mlx-lm's own single-sequence generation gives, or what the contiguous backend gives in lock-step.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import pytest

from tests.runner.backends import placed
from tests.runner.looped import Looped
from tests.runner.paged.checks import check
from tests.runner.paged.conftest import Paged
from tests.runner.parting import PARTING
from tests.runner.reference import reference, references
from tests.runner.test_lookahead import LateFault, assert_alike, requests
from treadle.core import block_budget
from treadle.core.messages import FinishReason, Sampling, Submit
from treadle.runner.forward.ragged import RaggedBatch
from treadle.runner.kv.contiguous.backend import ContiguousConfig
from treadle.runner.kv.paged.backend import PagedBackend
from treadle.runner.kv.paged.paged_pass import NOWHERE, PAGE
from treadle.runner.loading.model import LoadedModel
from treadle.runner.model_runner import ModelRunner
from treadle.runner.sampling import sampler

WAYS = [("llama", True), ("llama", False), ("qwen3", True), ("gemma3", False), ("qwen3_moe", False)]


class Watched(Looped):
    """Checks the pages after every step, and that no token goes to a page that anybody else may read."""

    def __init__(self, runner: ModelRunner, **limits: Any) -> None:
        super().__init__(runner, **limits)
        self.backend: PagedBackend = runner._backend  # type: ignore[assignment]
        self._begin = self.backend.begin
        self.backend.begin = self._watch  # type: ignore[method-assign]

    def _watch(self, batch: RaggedBatch, *, ids: bool = False) -> None:
        self._begin(batch, ids=ids)
        tables = {id_: sequence.kv.table for id_, sequence in self.runner._rows.items() if sequence.kv is not None}
        slots = self.backend._step.tables[0].slots.tolist()
        for segment, piece in zip(batch.segments, placed(batch), strict=True):
            if segment.padding:
                assert set(slots[piece.first : piece.first + piece.count]) == {NOWHERE}
                continue
            row = tables[piece.id]
            others = {page for id_, other in tables.items() if id_ != piece.id for page in other.pages.tolist()}
            for slot in slots[piece.first : piece.first + piece.count]:
                assert slot // PAGE in row.pages[row.shared :].tolist()
                assert slot // PAGE not in others

    def step(self) -> None:
        super().step()
        self.check()

    def check(self) -> None:
        live = self.runner._rows.values()
        check(self.backend._pages, [sequence.kv.table for sequence in live if sequence.kv is not None])


def at_random(loop: Looped, some: list[Submit], dice: random.Random, *, cancels: float = 0.04) -> set[str]:
    """Let them arrive, and some of them leave; which."""
    waiting, cancelled = list(some), set()
    while waiting or loop.has_work:
        while waiting and dice.random() < 0.5:
            loop.submit(waiting.pop(0))
        if dice.random() < cancels:
            victim = dice.choice(some).id
            loop.cancel(victim)
            cancelled.add(victim)
        loop.step()
    return cancelled


def greedy(dice: random.Random, count: int, most: int = 50) -> list[Submit]:
    """Half of them begin as another one does: up to a page's border, beside it, inside, or all of it."""
    some: list[Submit] = []
    for i in range(count):
        fresh = tuple(dice.randrange(256) for _ in range(dice.choice([1, 3, 20, 60, 120])))
        trunk = dice.choice(some).prompt if some and dice.random() < 0.6 else ()
        cut = dice.choice([len(trunk), 32, 33, 64, dice.randint(0, len(trunk))])
        prompt = (trunk[:cut] + fresh)[:150]
        some.append(Submit(id=f"r{i}", prompt=prompt, max_tokens=dice.randint(5, most), max_wait_s=1e9))
    return some


@pytest.mark.parametrize(("seed", "name", "fused"), [(i % 2, *way) for i, way in enumerate(WAYS)])
def test_greedy_is_mlx_lms_own_whatever_is_reused_or_preempted(
    paged: Paged, name: str, fused: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 pages are not enough for eight rows of up to nine, which are let in on what they bring."""
    monkeypatch.setattr(block_budget, "EXPECTED_TOKENS", 0)
    dice = random.Random(seed)
    model = paged(name, pages=16, fused=fused)
    loop = Watched(ModelRunner(model), max_running=8, prefill_tokens=64)
    assert model.choice.config.fused is fused
    assert loop.runner.capabilities().steps.lookahead == 1
    some = greedy(dice, 16, most=120)
    cancelled = at_random(loop, some, dice)
    for request in some:
        got = loop.tokens(request.id)
        wanted = reference(model, request, got)
        assert got == wanted[: len(got)]
        assert len(got) == len(wanted) or request.id in cancelled
    found = loop.runner.statistics()
    assert found.kv_bytes == 0
    assert found.prefix.reused > 0
    assert loop.scheduler.statistics(0.0, found).preempted > 0


def contiguous(model: LoadedModel) -> LoadedModel:
    model.library.route_attention(model.module)
    windows, selection = model.library.windows(model.module), model.library.selection(model.module)
    assert windows is not None
    config = ContiguousConfig(windows, selection, "cpu", model.kv, lookahead=0)
    return replace(model, choice=replace(model.choice, config=config))


@pytest.mark.parametrize(("name", "seed"), [("llama", 0), ("gemma3", 1)])
def test_every_kind_of_request_is_what_it_is_in_lock_step_in_buffers(paged: Paged, name: str, seed: int) -> None:
    """Drawn, penalised, with log-probabilities of what was picked and of the prompt."""
    model, some = paged(name), requests(random.Random(seed), count=10)
    step, run = Looped(ModelRunner(contiguous(model))), Watched(ModelRunner(model))
    assert (step.runner.capabilities().steps.lookahead, run.runner.capabilities().steps.lookahead) == (0, 1)
    step.run(*some)
    run.run(*some)
    for request in some:
        assert_alike(run.everything(request.id), step.everything(request.id))
    assert run.runner.statistics().kv_bytes == 0


def test_a_pick_that_changes_late_changes_what_was_built_on_it(paged: Paged, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step in flight is computed again, over what it wrote."""
    model, some = paged("qwen3"), requests(random.Random(7), ("nucleus", "greedy", "penalised", "drawn"), count=8)
    step = Looped(ModelRunner(contiguous(model)))
    step.run(*some)
    monkeypatch.setattr(sampler, "CANDIDATES", 4)
    run = Watched(ModelRunner(model))
    run.run(*some)
    for request in some:
        assert_alike(run.everything(request.id), step.everything(request.id))


@pytest.mark.parametrize("seed", range(2))
def test_steps_that_raise_change_nobodys_tokens(paged: Paged, seed: int) -> None:
    """B7: early and late faults, with a step in flight, cancels, prefixes and too few pages."""
    dice = random.Random(seed)
    model = paged("llama", pages=20)
    runner = LateFault(model, clock=partial(next, count(0.0, 0.01)))  # each time the same plans
    runner.dice = dice
    loop = Watched(runner, max_running=6, prefill_tokens=64)
    some = greedy(dice, 16)
    cancelled = at_random(loop, some, dice)
    ends = {request.id: loop.finish(request.id) for request in some}
    assert sum(end is FinishReason.ERROR for end in ends.values()) < 6
    for request in some:
        got = loop.tokens(request.id)
        wanted = reference(model, request, got)
        assert got == wanted[: len(got)]
        assert len(got) == len(wanted) or ends[request.id] is FinishReason.ERROR or request.id in cancelled
    assert runner.statistics().kv_bytes == 0
    assert not runner._rows


def test_prompts_are_reused_wherever_they_part(paged: Paged) -> None:
    """F6: the same again, one that goes on, and those that part inside a page, at a border, and near the end."""
    model = paged("gemma3")
    loop = Watched(ModelRunner(model), prefill_tokens=512)
    parts = PARTING | {"too early": (PARTING["too early"][0], 0)}  # not worth copying a page for
    for name, (prompt, reused) in parts.items():
        request = Submit(id=name, prompt=prompt, max_tokens=12)
        answer = loop.run(request)[name]
        assert answer == reference(model, request, answer), name
        assert loop.cached(name) == reused, name


def test_a_prompt_in_many_chunks_alone_is_what_it_is_in_one(paged: Paged) -> None:
    """Passes that nobody wants anything of."""
    model = paged("llama")
    request = Submit(id="long", prompt=tuple(i * i % 251 for i in range(700)), max_tokens=8, max_wait_s=1e9)
    for tokens in (7, 64, 512):
        loop = Watched(ModelRunner(model), prefill_tokens=tokens)
        assert loop.run(request)["long"] == reference(model, request)


def test_a_group_with_one_prompt_holds_its_pages_once(paged: Paged) -> None:
    """Rows of one request that share a long prompt, each drawing its own answer."""
    model = paged("llama")
    loop = Watched(ModelRunner(model), max_running=6, prefill_tokens=512)
    prompt = tuple(i % 200 for i in range(200))
    some = [
        Submit(id=f"n{i}", prompt=prompt, max_tokens=20, sampling=Sampling(temperature=1.0, seed=i), max_wait_s=1e9)
        for i in range(5)
    ]
    loop.submit(*some)
    most = 0
    loop.step()
    while loop.has_work:
        loop.step()
        most = max(most, loop.backend._pages.held)
    assert most <= 6 + 5 * 2
    assert len({tuple(loop.tokens(request.id)) for request in some}) == 5


def test_rows_are_let_in_on_the_pages_that_they_do_not_share(paged: Paged) -> None:
    """Eight of nine are another row's: four rows have room where each alone would take half of it."""
    model = paged("llama", pages=20)
    loop = Watched(ModelRunner(model), max_running=6, prefill_tokens=512)
    trunk = tuple(i % 200 for i in range(256))
    some = [Submit(id=f"r{i}", prompt=(*trunk, *range(i, i + 10)), max_tokens=20, max_wait_s=1e9) for i in range(4)]
    loop.submit(some[0])
    while not loop.tokens("r0"):
        loop.step()
    loop.submit(*some[1:])
    loop.step()
    assert loop.scheduler.statistics(0.0, loop.runner.statistics()).running == 4
    found = loop.run()
    assert found == {request.id: reference(model, request) for request in some}
    assert loop.scheduler.statistics(0.0, loop.runner.statistics()).preempted == 0


def test_those_of_another_salt_find_nothing(paged: Paged) -> None:
    loop = Watched(ModelRunner(paged("llama")), prefill_tokens=512)
    prompt = tuple(range(97))
    for id_, salt, cached in [("a", "x", 0), ("b", "y", 0), ("c", "", 0), ("d", "x", 96), ("e", "y", 96)]:
        loop.run(Submit(id=id_, prompt=prompt, max_tokens=3, salt=salt))
        assert loop.cached(id_) == cached, id_


def test_a_reset_between_steps_changes_nobodys_tokens(paged: Paged) -> None:
    model = paged("llama")
    loop = Watched(ModelRunner(model), prefill_tokens=64)
    some = [Submit(id=str(i), prompt=(5, 6, 7) * 30, max_tokens=30, max_wait_s=1e9) for i in range(2)]
    loop.submit(*some)
    for _ in range(12):
        loop.step()
    loop.runner.forget_prefixes()
    loop.check()
    found = loop.run()
    assert found == references(model, some, found)
    assert loop.backend.statistics().held == 0
