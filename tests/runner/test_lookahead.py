"""Steps that are started before the one before them is finished: the same for every request as in lock-step."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import count
from typing import Any

import mlx.core as mx
import msgspec
import pytest

from tests.runner.backends import configured
from tests.runner.conftest import Tiny
from tests.runner.looped import Looped
from tests.runner.reference import reference
from tests.support import cuda, cuda_launches
from treadle.core.messages import FinishReason, Sampling, Submit, TokenLogprob
from treadle.core.plan import Admit, DecodeRow, PrefillChunk, StepPlan
from treadle.runner.loading.model import LoadedModel
from treadle.runner.model_runner import ModelRunner
from treadle.runner.sampling import sampler
from treadle.runner.sampling.sampling_kernel import SamplingKernel
from treadle.runner.step_sampler import StepSampler


def ahead(model: LoadedModel) -> LoadedModel:
    """The same model, one step ahead, as on a device that is not the CPU."""
    return configured(model, device="metal")


def in_lock_step(model: LoadedModel) -> LoadedModel:
    """The same model on the CPU, each of whose steps is finished before the next one is started."""
    return configured(model, lookahead=0) if model.choice.config.name == "contiguous" else model


PADDED = ("llama", "gemma3", "qwen3_next", "mamba", "falcon_h1", "deepseek_v3", "llama4")
MODELS: dict[str, dict[str, Any]] = {name: {} for name in ("llama", "gemma3", "qwen3_next", "deepseek_v3")}
MODELS |= {f"padded {name}": {"padded": True} for name in PADDED}
"""What to load: contiguous, padded and serial backends; windows, recurrent states, lists of caches."""


def named(tiny: Tiny, name: str) -> LoadedModel:
    """The model of this name in `MODELS`."""
    return tiny(name.removeprefix("padded "), **MODELS[name])


KINDS = {
    "greedy": Sampling(),
    "drawn": Sampling(temperature=1.0, seed=1),
    "nucleus": Sampling(temperature=2.0, top_p=0.95, seed=2),
    "narrow": Sampling(temperature=1.2, top_k=20, min_p=0.01, seed=3),
    "penalised": Sampling(temperature=1.0, top_p=0.9, repetition_penalty=1.2, frequency_penalty=0.3, seed=4),
    "greedy, penalised": Sampling(presence_penalty=0.5, frequency_penalty=0.2),
    "biased": Sampling(logit_bias=((42, 3.0), (7, -100.0))),
}


def requests(dice: random.Random, kinds: Sequence[str] = tuple(KINDS), count: int = 10) -> list[Submit]:
    trunk = tuple(dice.randrange(256) for _ in range(40))
    some = []
    for i in range(count):
        fresh = tuple(dice.randrange(256) for _ in range(dice.choice([1, 2, 20, 70])))
        some.append(
            Submit(
                id=f"r{i}",
                prompt=trunk + fresh if dice.random() < 0.3 else fresh,
                max_tokens=dice.randint(1, 30),
                sampling=msgspec.structs.replace(KINDS[kinds[i % len(kinds)]], seed=i),
                stop_token_ids=tuple(dice.sample(range(256), 6)),
                min_tokens=dice.choice([0, 5]),
                logprobs=dice.choice([None, 0, 3]),
                prompt_logprobs=dice.choice([None, None, 2]),
                max_wait_s=1e9,
            )
        )
    return some


LockStep = Callable[..., tuple[list[Submit], Looped]]


@pytest.fixture(scope="module")
def lock_step(tiny: Tiny) -> LockStep:
    """Requests, and what a model in `MODELS` gives for them in lock-step; computed once for each."""

    @cache
    def get(name: str, kinds: tuple[str, ...] = tuple(KINDS)) -> tuple[list[Submit], Looped]:
        some = requests(random.Random(0), kinds)
        step = Looped(ModelRunner(in_lock_step(named(tiny, name))))
        step.run(*some)
        return some, step

    return get


def assert_alike(found: list[Any], wanted: list[Any]) -> None:
    """The same tokens and end; log-probabilities as near as other batches let them be."""
    assert (found[0], found[3]) == (wanted[0], wanted[3])
    for mine, theirs in zip(found[1:3], wanted[1:3], strict=True):
        assert [_numbers(one) for one in mine] == [pytest.approx(_numbers(one), abs=1e-3) for one in theirs]


def _numbers(one: TokenLogprob) -> list[float]:
    return [one.logprob, *(value for _, value in one.top)]


@pytest.mark.parametrize("architecture", MODELS)
def test_every_request_is_what_it_is_in_lock_step(tiny: Tiny, lock_step: LockStep, architecture: str) -> None:
    some, step = lock_step(architecture)
    run = Looped(ModelRunner(ahead(named(tiny, architecture))))
    assert run.runner.capabilities().steps.lookahead == 1
    run.run(*some)
    for request in some:
        assert_alike(run.everything(request.id), step.everything(request.id))
    assert run.runner.statistics().kv_bytes == 0


@pytest.mark.parametrize(
    ("architecture", "kinds"), [*((model, tuple(KINDS)) for model in MODELS), ("gemma3", ("nucleus",))]
)
def test_a_pick_that_changes_late_changes_what_was_built_on_it(
    tiny: Tiny, lock_step: LockStep, architecture: str, kinds: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A nucleus that is wider than its candidates is drawn again when the next step is under way."""
    some, step = lock_step(architecture, kinds)
    monkeypatch.setattr(sampler, "CANDIDATES", 4)
    relaunched = _count(monkeypatch)
    run = Looped(ModelRunner(ahead(named(tiny, architecture))))
    run.run(*some)
    assert relaunched
    for request in some:
        assert_alike(run.everything(request.id), step.everything(request.id))


@pytest.mark.parametrize("room", [2048, 2], ids=["sorted", "spilled"])
def test_a_kernel_picks_the_same_ahead_as_in_lock_step(tiny: Tiny, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it leaves rows to be drawn again, when the next step is under way, and where numbers are uploaded."""
    monkeypatch.setattr(cuda_launches, "SORTED", room)
    model = tiny("llama")
    model = replace(model, draws=SamplingKernel(model.vocabulary, mx.float32, cuda.ReferenceKernel))
    some = requests(random.Random(11))
    relaunched = _count(monkeypatch)
    step = Looped(ModelRunner(in_lock_step(model)))
    run = Looped(ModelRunner(replace(ahead(model), device="cuda")))
    step.run(*some)
    run.run(*some)
    assert bool(relaunched) == (room == 2)
    for request in some:
        assert_alike(run.everything(request.id), step.everything(request.id))


@pytest.mark.parametrize("kinds", [("greedy", "drawn"), ("penalised",), ("greedy", "penalised")], ids="_".join)
def test_rows_that_need_their_last_token_are_sampled_with_the_others_in_one_draw(
    tiny: Tiny, kinds: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps are started ahead all the same: the draw waits, and not the pass."""
    draws: list[tuple[Any, set[bool]]] = []
    real = StepSampler._draw

    def recording(self: StepSampler, step: Any, places: Sequence[int], **given: Any) -> None:
        if places:
            draws.append((step, {step.rows[step.decodes[place].id].sampling.depends_on_last_token for place in places}))
        real(self, step, places, **given)

    monkeypatch.setattr(StepSampler, "_draw", recording)
    model = tiny("llama")
    some = requests(random.Random(5), kinds)
    run = Looped(ModelRunner(ahead(model)))
    run.run(*some)
    steps = {id(step): step for step, _ in draws}.values()
    seen = [[remembers for of, remembers in draws if of is step] for step in steps]
    if "penalised" not in kinds:
        assert all(groups == [{False}] for groups in seen)
    else:
        assert all(groups in ([{False}], [{True}], [{False, True}]) for groups in seen)
        assert ([{False, True}] in seen) == (len(kinds) == 2)
    step = Looped(ModelRunner(model))
    step.run(*some)
    for request in some:
        assert_alike(run.everything(request.id), step.everything(request.id))


def _count(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Counts the steps that were computed again."""
    real, seen = ModelRunner._continue_later_steps, []

    def counting(self: ModelRunner, step: Any, redrawn: bool) -> None:
        if redrawn and len(self._started) > 1:
            seen.append(True)
        real(self, step, redrawn)

    monkeypatch.setattr(ModelRunner, "_continue_later_steps", counting)
    return seen


class LateFault(ModelRunner):
    """Raises at the start and at the end of steps now and then."""

    dice = random.Random(0)

    def _launch(self, step: Any, before: Any) -> None:
        super()._launch(step, before)
        if self.dice.random() < 0.03:
            raise ArithmeticError("early")

    def _read(self, step: Any) -> Any:
        if self.dice.random() < 0.03:
            raise ArithmeticError("late")
        return super()._read(step)


@pytest.mark.parametrize(("architecture", "seed"), [(model, i) for i, model in enumerate(MODELS)])
def test_steps_that_raise_ahead_change_nobodys_tokens(
    tiny: Tiny, lock_step: LockStep, architecture: str, seed: int
) -> None:
    """B7: whatever was in flight is void, and every row goes on as if nothing had happened. A row that is tried alone
    may be taken for the guilty one; it fails, and the others don't."""
    dice = random.Random(seed)
    some, step = lock_step(architecture)
    runner = LateFault(
        ahead(named(tiny, architecture)), clock=partial(next, count(0.0, 0.01))
    )  # each time the same plans
    runner.dice = dice
    loop = Looped(runner)
    waiting, cancelled = list(some), set()
    while waiting or loop.has_work:
        if waiting and dice.random() < 0.5:
            loop.submit(waiting.pop())
        if dice.random() < 0.05:
            victim = dice.choice(some).id
            loop.cancel(victim)
            cancelled.add(victim)
        loop.step()
    ends = {request.id: loop.finish(request.id) for request in some}
    assert sum(end is FinishReason.ERROR for end in ends.values()) < 5
    for id_, end in ends.items():
        wanted, got = step.tokens(id_), loop.tokens(id_)
        assert got == wanted[: len(got)]
        assert len(got) == len(wanted) or end is FinishReason.ERROR or id_ in cancelled
    assert runner.statistics().kv_bytes == 0
    assert not runner._rows


@pytest.mark.parametrize("name", ["llama", "padded llama", "padded gemma3", "padded llama4"])
def test_keys_and_values_are_not_copied_while_a_step_is_in_flight(tiny: Tiny, name: str) -> None:
    """MLX writes to arrays in place where no step that the device runs reads them."""
    runner = ModelRunner(ahead(named(tiny, name)))
    some = [Submit(id=str(i), prompt=(7, 8, 9) * 600, max_tokens=99) for i in range(2)]
    chunks = tuple(PrefillChunk(one.id, 0, len(one.prompt) - 1) for one in some)
    runner.execute(StepPlan(step=1, admit=tuple(Admit(request=one) for one in some), prefill=chunks))
    peaks = []
    for position in range(20):
        runner.start(StepPlan(step=2, decode=tuple(DecodeRow(one.id, position) for one in some)))
        if position:
            runner.finish()
            peaks.append(mx.get_peak_memory() - mx.get_active_memory())
        mx.reset_peak_memory()
    assert statistics.median(peaks[5:]) < 0.4 * runner.statistics().kv_bytes
    runner.finish()


@pytest.mark.parametrize("name", MODELS)
def test_what_a_sequence_leaves_while_a_step_is_in_flight_is_reused(tiny: Tiny, name: str) -> None:
    """It ends with a token that the step in flight has computed already: what it leaves is from before that."""
    model = named(tiny, name)
    loop, dice = Looped(ModelRunner(ahead(model)), prefill_tokens=512), random.Random(5)
    limits = {"max_tokens": 99, "min_tokens": 40, "stop_token_ids": tuple(range(0, 256, 2)), "max_wait_s": 1e9}
    prompts = [tuple(dice.randrange(256) for _ in range(70 + i)) for i in range(3)]
    some = [Submit(id=f"r{i}", prompt=prompt, **limits) for i, prompt in enumerate(prompts)]  # type: ignore[arg-type]
    loop.run(*some)
    for one in some:
        answer = loop.tokens(one.id)
        assert loop.finish(one.id) is FinishReason.STOP
        later = Submit(id=f"{one.id} later", prompt=(*one.prompt, *answer, 1, 2), max_tokens=9, max_wait_s=1e9)
        assert loop.run(later)[later.id] == reference(model, later)
        assert loop.cached(later.id) >= len(one.prompt) + len(answer) - 1


@pytest.mark.parametrize("name", MODELS)
def test_who_leaves_in_the_middle_of_a_prompt_leaves_what_is_in_flight(tiny: Tiny, name: str) -> None:
    """Where the caches before that are gone; contiguous ones are kept by block, up to what is committed."""
    model = named(tiny, name)
    loop = Looped(ModelRunner(ahead(model)), prefill_tokens=100)
    prompt = tuple(3 * i % 251 for i in range(400))
    loop.submit(Submit(id="a", prompt=prompt, max_tokens=9, max_wait_s=1e9))
    loop.step()
    loop.step()
    computed = loop.runner._rows["a"].cached
    loop.cancel("a")
    while loop.has_work:
        loop.step()
    again = Submit(id="b", prompt=prompt, max_tokens=9, max_wait_s=1e9)
    assert loop.run(again)["b"] == reference(model, again)
    contiguous = model.choice.config.name == "contiguous"
    assert 64 <= loop.cached("b") < computed if contiguous else loop.cached("b") == computed


def test_a_row_whose_id_came_back_is_left_alone_when_a_step_is_computed_again(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The contract lets a row leave while two steps are in flight, and its id come back at once."""
    model = tiny()
    monkeypatch.setattr(sampler, "CANDIDATES", 2)
    runner = ModelRunner(ahead(model))
    wide = Submit(id="wide", prompt=(5,), max_tokens=9, sampling=KINDS["nucleus"])
    gone, back = (Submit(id="a", prompt=prompt, max_tokens=9) for prompt in ((1, 2, 3), (9, 8, 7, 6)))
    wanted = reference(model, back)
    redrawn = _count(monkeypatch)
    admit = (Admit(request=wide), Admit(request=gone))
    first = (DecodeRow("wide", 0), DecodeRow("a", 0))
    runner.start(StepPlan(step=1, admit=admit, prefill=(PrefillChunk("a", 0, 2),), decode=first))
    runner.start(StepPlan(step=2, decode=(DecodeRow("wide", 1), DecodeRow("a", 1))))
    runner.release("a")
    assert runner.match_prefix(Admit(request=back)) == 0
    runner.finish()
    assert redrawn
    assert [row.id for row in runner.finish().rows] == ["wide"]
    chunk = PrefillChunk("a", 0, 3)
    plan = StepPlan(step=3, admit=(Admit(request=back),), prefill=(chunk,), decode=(DecodeRow("a", 0),))
    assert runner.execute(plan).rows[0].tokens == (wanted[0],)
