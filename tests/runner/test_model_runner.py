"""The runner's contract: failures and their scope, release and re-admission, memory, one owner."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.runner.backends import configured
from tests.runner.conftest import Tiny
from tests.runner.drive import Choice, Drive, run_alone
from tests.support.tiny import make_tiny
from treadle.core.messages import Sampling, Submit
from treadle.core.plan import Admit, DecodeRow, PrefillChunk, StepPlan
from treadle.core.statistics import PrefixStatistics
from treadle.runner.base import RunnerBroken
from treadle.runner.build import build
from treadle.runner.device import memory
from treadle.runner.device.owner_thread import OutOfMemory, WrongThread
from treadle.runner.kv.backend import WarmPass
from treadle.runner.loading.loader import load
from treadle.runner.loading.model import LoadedModel
from treadle.runner.loading.warmup import warm_up
from treadle.runner.model_runner import ModelRunner


def submit(id_: str, prompt: tuple[int, ...] = (10, 20, 30), max_tokens: int = 12, **options: Any) -> Submit:
    return Submit(id=id_, prompt=prompt, max_tokens=max_tokens, **options)


class Faulty:
    """A model that advances its caches and then raises, at the calls that `when` names (0 is the first)."""

    def __init__(self, module: Any, error: Callable[[], BaseException], *when: int) -> None:
        self._module = module
        self._error = error
        self._when = when
        self.calls = -1

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        out = self._module(*args, **kwargs)
        if self.calls in self._when:
            raise self._error()
        return out

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def faulty(model: LoadedModel, error: Callable[[], BaseException], *when: int) -> ModelRunner:
    # In mlx-lm's caches each sequence has a pass of its own, so that `when` counts those, and a first one for the
    # masks of windows; else a pass is a step.
    if not contiguous(model):
        model = configured(model, shared_prefill=False)
    return ModelRunner(replace(model, module=Faulty(model.module, error, *when)))


def contiguous(model: LoadedModel) -> bool:
    return model.choice.config.name == "contiguous"


def everyone(drive: Drive) -> Choice:
    return Choice(list(drive.live.values()), 10_000)


# The prefix cache ---------------------------------------------------------------------------------------------------


def test_what_another_request_generated_is_known_behind_its_prompt(either: Tiny) -> None:
    model = either()
    runner, prompt = ModelRunner(model), tuple(range(40))
    answer = Drive(runner, [submit("a", prompt, 40)]).run()["a"]
    runner.release("a")
    more = runner.continuation("", prompt, 8)
    assert list(more) == (list(answer[:8]) if contiguous(model) else [])
    assert not runner.continuation("another salt", prompt, 8)


# Failures -----------------------------------------------------------------------------------------------------------


def test_rows_of_a_step_that_raised_go_on_the_same_after_release_and_readmission(either: Tiny) -> None:
    """B7, and the engine's recovery: `history` stands for what was generated before."""
    requests = [submit("a"), submit("b", (1,) * 40), submit("c", (7,))]
    sampled = submit("d", sampling=Sampling(temperature=1.0, top_p=0.9, repetition_penalty=1.2, seed=4))
    requests.append(sampled)
    model = either("gemma3")
    wanted = Drive(ModelRunner(model), requests).run()
    runner = faulty(model, lambda: ValueError("bad shape"), 5 if contiguous(model) else 9)
    drive = Drive(runner, requests)
    with pytest.raises(ValueError, match="bad shape"):
        drive.run()
    assert {len(row.tokens) for row in drive.live.values()} == {5}
    for row in drive.live.values():
        runner.release(row.id)
        row.rewind()
    assert drive.run() == wanted
    assert runner.statistics().kv_bytes == 0


def test_rows_that_were_not_in_the_plan_are_intact_after_an_exception(either: Tiny) -> None:
    requests = [submit("a"), submit("b", (5, 6)), submit("c", (9, 9, 9, 9))]
    model = either()
    wanted = Drive(ModelRunner(model), requests).run()
    runner = faulty(model, lambda: KeyError("layer"), 1 if contiguous(model) else 4)
    drive = Drive(runner, requests)
    drive.step(everyone(drive))
    held = [drive.live["a"]]
    with pytest.raises(KeyError):
        drive.step(Choice([drive.live["b"], drive.live["c"]], 10))
    for id_ in ("b", "c"):
        runner.release(id_)
        drive.live[id_].rewind()
    drive.step(Choice(held, 10))
    assert drive.run() == wanted


def test_decoding_rows_are_intact_after_an_exception_over_a_prompt_beside_them(either: Tiny) -> None:
    requests = [submit("a"), submit("b", (5, 6)), submit("c", (9, 9, 9, 9))]
    model = either()
    wanted = Drive(ModelRunner(model), requests).run()
    runner = faulty(model, lambda: KeyError("layer"), 2 if contiguous(model) else 4)
    drive = Drive(runner, requests)
    for _ in range(2):
        drive.step(Choice([drive.live["a"], drive.live["b"]], 10))
    with pytest.raises(KeyError):
        drive.step(Choice([drive.live["c"]], 10))
    runner.release("c")
    drive.live["c"].rewind()
    assert drive.run() == wanted


def test_rows_lost_in_an_exception_fail_alone_when_nobody_readmits_them(either: Tiny) -> None:
    model = either()
    runner = faulty(model, lambda: KeyError("layer"), 0 if contiguous(model) else 2)
    drive = Drive(runner, [submit("a"), submit("b")])
    with pytest.raises(KeyError):
        drive.step(everyone(drive))
    assert runner.statistics().kv_bytes == 0
    result = runner.execute(StepPlan(step=2, decode=(DecodeRow(id="a", position=0),)))
    assert [failure.id for failure in result.failures] == ["a"]
    assert run_alone(runner, submit("x")) == run_alone(ModelRunner(model), submit("x"))


@pytest.mark.parametrize("error", [NotImplementedError("rope"), RecursionError("deep")], ids=["missing", "deep"])
def test_runtime_errors_of_python_itself_do_not_break_the_runner(either: Tiny, error: Exception) -> None:
    drive = Drive(faulty(either(), lambda: error, 1), [submit("a")])
    with pytest.raises(type(error)):
        drive.run()


@pytest.mark.parametrize("call", [0, 1, 3])
def test_a_fault_of_mlx_breaks_the_runner(either: Tiny, call: int) -> None:
    runner = faulty(either(), lambda: RuntimeError("[metal] gone"), call)
    drive = Drive(runner, [submit("a"), submit("b")])
    with pytest.raises(RunnerBroken, match="MLX's runtime failed"):
        drive.run()


@pytest.mark.parametrize("call", [0, 1, 3])
def test_an_allocation_that_fails_costs_its_step_alone(either: Tiny, call: int) -> None:
    requests = [submit("a", (10,) * 70), submit("b")]
    model = either()
    wanted = Drive(ModelRunner(model), requests).run()
    runner = faulty(model, MemoryError, call)
    drive = Drive(runner, requests)
    with pytest.raises(OutOfMemory, match="no memory while"):
        drive.run()
    for row in drive.live.values():
        runner.release(row.id)
        row.rewind()
    assert drive.run() == wanted


def test_what_is_freed_is_given_back_in_a_rest_and_not_before(either: Tiny) -> None:
    """Whoever comes next would have it made again."""
    runner = ModelRunner(either())
    run_alone(runner, submit("a", (10,) * 70))
    assert mx.get_cache_memory() > 0
    runner.trim_memory()
    assert mx.get_cache_memory() == 0


def test_a_step_that_fails_gives_back_what_is_freed(either: Tiny) -> None:
    """It may have failed for want of memory."""
    runner = faulty(either(), MemoryError, 1)
    mx.eval(mx.zeros(1 << 20) + 1)
    drive = Drive(runner, [submit("a"), submit("b")])
    with pytest.raises(OutOfMemory):
        drive.run()
    assert mx.get_cache_memory() < 1 << 20


def test_a_device_that_gives_nothing_back_is_as_broken_as_it_said(
    either: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: Any) -> int:
        raise RuntimeError("illegal address")

    runner = faulty(either(), lambda: RuntimeError("[metal] gone"), 1)
    monkeypatch.setattr(memory, "give_back", gone)
    with pytest.raises(RunnerBroken, match="gone"):
        Drive(runner, [submit("a")]).run()


def test_who_leaves_when_there_is_no_memory_to_keep_it_is_gone_all_the_same(
    either: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = ModelRunner(either())
    drive = Drive(runner, [submit("a", (10,) * 70)])
    drive.step(everyone(drive))

    def full(*arrays: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(mx, "eval", full)
        runner.release("a")
    assert runner.statistics().kv_bytes == 0
    assert run_alone(runner, submit("a", (10,) * 70)) == run_alone(ModelRunner(either()), submit("a", (10,) * 70))


def test_who_joins_when_there_is_no_memory_to_copy_what_is_kept_computes_it(
    either: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, request = ModelRunner(either()), submit("a", (10,) * 70)
    wanted = run_alone(runner, request)

    refused: list[Any] = []

    def full_once(real: Callable[..., None]) -> Callable[..., None]:
        def evaluate(*arrays: Any) -> None:
            if not refused:
                refused.append(arrays)
                raise MemoryError
            real(*arrays)

        return evaluate

    with monkeypatch.context() as patch:
        patch.setattr(mx, "async_eval", full_once(mx.async_eval))
        patch.setattr(mx, "eval", full_once(mx.eval))
        other = submit("b", (10,) * 68)
        assert runner.match_prefix(Admit(request=other)) == 67
        admit, decode = Admit(request=other, cached_tokens=67), DecodeRow(id="b", position=0)
        runner.start(StepPlan(step=1, admit=(admit,), decode=(decode,)))
    result = runner.finish()
    assert (result.evicted, result.rows, result.failures) == (("b",), (), ())
    assert runner.statistics().kv_bytes == 0
    assert run_alone(runner, request) == wanted
    assert runner.match_prefix(Admit(request=other)) == 67


def test_an_array_of_another_thread_breaks_the_runner(either: Tiny) -> None:
    """A1: the real error, not an imitation."""
    foreign: list[Any] = []
    thread = threading.Thread(target=lambda: foreign.append(mx.ones(3) + 1))
    thread.start()
    thread.join()
    model = either()

    class Mixed(Faulty):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self._module(*args, **kwargs) + foreign[0].sum()

    drive = Drive(ModelRunner(replace(model, module=Mixed(model.module, ValueError))), [submit("a")])
    with pytest.raises(RunnerBroken, match="no Stream"):
        drive.run()


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (submit("bad", prompt=(1, 5000)), "token id 5000 is outside the model's vocabulary of 261"),
        (submit("bad", prompt=(-1,)), "token id -1"),
        (submit("bad", prompt=(*range(200), 261)), "token id 261 is outside"),
        (submit("bad", prompt=(*range(200), -7)), "token id -7 is outside"),
        (submit("bad", prompt=(*range(200), 1 << 70)), f"token id {1 << 70} is outside"),
        (submit("bad", prompt=()), "the prompt is empty"),
        (submit("bad", sampling=Sampling(temperature=float("nan"))), "temperature"),
        (submit("bad", sampling=Sampling(top_p=-0.5)), "top_p"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_row_that_cannot_be_admitted_fails_alone(runner: ModelRunner, request_: Submit, why: str) -> None:
    good = submit("good")
    plan = StepPlan(
        step=1,
        admit=(Admit(request=request_), Admit(request=good)),
        prefill=(PrefillChunk(id="bad", start=0, count=1), PrefillChunk(id="good", start=0, count=2)),
        decode=(DecodeRow(id="bad", position=0), DecodeRow(id="good", position=0)),
    )
    result = runner.execute(plan)
    assert [(f.id, why in f.message) for f in result.failures] == [("bad", True)]
    assert [row.id for row in result.rows] == ["good"]
    runner.release("good")
    assert runner.statistics().kv_bytes == 0


def test_a_prompt_that_the_model_refuses_in_a_pass_of_its_own_fails_alone(tiny: Tiny) -> None:
    runner = faulty(tiny(padded=True), lambda: ValueError("no such rope"), 0)
    drive = Drive(runner, [submit("a"), submit("b")])
    result = drive.step(everyone(drive))
    assert drive.failures == {"a": "the prompt can't be read: no such rope"}
    assert [row.id for row in result.rows] == ["b"]
    assert drive.run()["b"] == run_alone(ModelRunner(tiny()), submit("b"))


def test_rows_that_were_never_admitted_fail_by_name(runner: ModelRunner) -> None:
    plan = StepPlan(
        step=1,
        prefill=(PrefillChunk(id="ghost", start=0, count=1),),
        decode=(DecodeRow(id="phantom", position=0),),
    )
    assert {f.id for f in runner.execute(plan).failures} == {"ghost", "phantom"}


# Joining and leaving ------------------------------------------------------------------------------------------------


def test_release_is_harmless_for_strangers_and_twice(runner: ModelRunner) -> None:
    runner.release("nobody")
    drive = Drive(runner, [submit("a"), submit("b")])
    drive.step(everyone(drive))
    runner.release("a")
    runner.release("a")
    del drive.live["a"]
    assert drive.run()["b"] == run_alone(runner, submit("b"))


def test_an_id_that_comes_back_starts_afresh(runner: ModelRunner) -> None:
    first = Drive(runner, [submit("a", (1, 2, 3))])
    first.step(everyone(first))
    assert run_alone(runner, submit("a", (50, 60))) == run_alone(runner, submit("x", (50, 60)))


def test_a_row_may_be_released_at_any_point_of_its_life(runner: ModelRunner) -> None:
    """B5: queued in the batch, half-way through its prompt, or held back."""
    want = run_alone(runner, submit("stays", (3,) * 20))
    for steps in range(6):
        drive = Drive(runner, [submit("stays", (3,) * 20), submit("goes", (4,) * 9), submit("too", (5,))])
        for i in range(steps):
            rows = list(drive.live.values())
            drive.step(Choice(rows if i % 2 else rows[:2], 4))
        for id_ in ("goes", "too"):
            runner.release(id_)
            del drive.live[id_]
        assert drive.run()["stays"] == want
        assert runner.statistics().kv_bytes == 0


def test_an_id_that_comes_back_while_others_decode_starts_afresh(runner: ModelRunner) -> None:
    """B5: a request that left and one that took its id between two steps are not one."""
    drive = Drive(runner, [submit("stays", (3,) * 20), submit("a", (4,) * 9)])
    drive.step(everyone(drive))
    runner.release("a")
    again = Drive(runner, [submit("a", (50,))])
    plans = drive.plan(Choice([drive.live["stays"]], 10)), again.plan(everyone(again))
    both = StepPlan(step=9, admit=plans[1].admit, decode=(*plans[0].decode, *plans[1].decode))
    result = runner.execute(both)
    wanted = run_alone(ModelRunner(runner._model), submit("x", (50,)))
    assert {row.id: row.tokens for row in result.rows}["a"] == (wanted[0],)


def test_memory_comes_back_when_the_last_row_leaves(either: Tiny) -> None:
    """What is kept of them for others was counted before the second time; all else goes. MLX's count differs by the
    smallest array from one run to the next: three rounds that each left one would be more."""
    runner = ModelRunner(either("gemma3"))
    requests = [submit(f"r{i}", (i,) * (1 + 70 * i), 30, logprobs=3) for i in range(4)]
    Drive(runner, requests).run()
    before = settled_memory()
    for _ in range(3):
        drive = Drive(runner, requests)
        for _ in range(10):
            drive.step(everyone(drive))
        settled_memory()
        held = runner.statistics()
        assert held.kv_bytes > 4 * 256
        assert held.active_bytes >= before + held.kv_bytes
        for request in requests:
            runner.release(request.id)
        assert runner.statistics().kv_bytes == 0
        assert settled_memory() <= before + 16


def settled_memory() -> int:
    """Active memory once nothing is computed any more: what sequences leave is copied in the background, and arrays
    of earlier tests may wait in reference cycles."""
    gc.collect()
    mx.synchronize()
    return mx.get_active_memory()


def test_what_is_kept_of_rows_is_counted_and_can_be_given_up(tiny: Tiny) -> None:
    requests = [submit("a", (1,) * 200, 30, logprobs=3)]
    Drive(ModelRunner(tiny("gemma3")), requests).run()  # what passes of its shapes keep takes the place of others'
    runner = ModelRunner(tiny("gemma3"))
    before = settled_memory()
    Drive(runner, requests).run()
    prefix = runner.statistics().prefix
    assert prefix.held == prefix.stored == 229
    held = settled_memory() - before  # MLX may hand out buffers that are somewhat larger
    assert prefix.held_bytes <= held <= 1.25 * prefix.held_bytes
    assert runner.jobs()["reset_prefix_cache"](Never(), {}) == 229
    assert settled_memory() <= before + 64
    assert runner.statistics().prefix.held_bytes == 0


def test_the_graph_does_not_grow_while_a_row_decodes(either: Tiny) -> None:
    """Cache states are evaluated with each step: memory per step is the same at the end as at the start."""
    runner = ModelRunner(either("gemma3", prefix_cache=False))
    drive = Drive(runner, [submit("a", (1, 2), 130), submit("b", (3,) * 20, 130)])
    sizes = []
    while drive.live:
        drive.step(everyone(drive))
        sizes.append(mx.get_active_memory())
    assert max(sizes[10:128]) <= min(sizes[10:128]) + 16, "the positions of a pass"


# Log-probabilities and order ---------------------------------------------------------------------------------------


def test_log_probabilities_come_only_to_those_who_ask_and_are_of_the_raw_logits(either: Tiny) -> None:
    model = either()
    biased = Sampling(logit_bias=((42, 100.0),))
    requests = [submit("none"), submit("zero", logprobs=0), submit("five", logprobs=5, sampling=biased)]
    drive = Drive(ModelRunner(model), requests)
    tokens = drive.run()
    assert drive.all["none"].logprobs == []
    logits = np.array(model.module(mx.array([[10, 20, 30, *tokens["five"]]]))[0]).astype(np.float64)
    reference = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    assert len(drive.all["five"].logprobs) == len(drive.all["zero"].logprobs) == 12
    for i, (token, found) in enumerate(zip(tokens["five"], drive.all["five"].logprobs, strict=True)):
        row = reference[2 + i]
        assert token == 42
        assert found.logprob == pytest.approx(row[42], abs=1e-3)
        assert [best for best, _ in found.top] == np.argsort(-row)[:5].tolist()
        assert [value for _, value in found.top] == pytest.approx(sorted(row)[:-6:-1], abs=1e-3)
    assert all(found.top == () and found.logprob < 0 for found in drive.all["zero"].logprobs)


@pytest.mark.parametrize("padded", [False, True])
def test_log_probabilities_are_of_the_token_that_a_wide_nucleus_gave_in_the_end(tmp_path: Path, padded: bool) -> None:
    model = load(make_tiny(tmp_path / "wide", vocabulary_extra=4000), padded=padded)
    flat = Sampling(temperature=9.0, top_p=0.99, seed=3)
    request = submit("a", max_tokens=6, sampling=flat, logprobs=0)
    drive = Drive(ModelRunner(model), [request])
    tokens = drive.run()["a"]
    logits = np.array(model.module(mx.array([[10, 20, 30, *tokens]]))[0]).astype(np.float64)
    reference = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    ranks = [int((reference[2 + i] > reference[2 + i, token]).sum()) for i, token in enumerate(tokens)]
    assert max(ranks) > 1024
    found = [one.logprob for one in drive.all["a"].logprobs]
    assert found == pytest.approx([reference[2 + i, token] for i, token in enumerate(tokens)], abs=1e-3)


def test_tokens_answer_in_the_plans_order(runner: ModelRunner) -> None:
    drive = Drive(runner, [submit("a"), submit("b"), submit("c")])
    for ids in ("abc", "cab", "bc", "acb"):
        result = drive.step(Choice([drive.live[i] for i in ids], 10))
        assert "".join(row.id for row in result.rows) == ids


def test_seeded_sampling_is_the_same_alone_and_among_others(either: Tiny) -> None:
    kinds = [
        Sampling(temperature=1.0, seed=1),
        Sampling(temperature=0.8, top_p=0.9, seed=2),
        Sampling(temperature=1.2, top_k=20, presence_penalty=0.4, seed=3),
        Sampling(temperature=1.0, min_p=0.02, repetition_penalty=1.1, frequency_penalty=0.2, seed=4),
        Sampling(),
    ]
    requests = [submit(f"r{i}", (i + 1,) * (1 + 9 * i), 25, sampling=kind) for i, kind in enumerate(kinds)]
    runner = ModelRunner(either("qwen3"))
    assert Drive(runner, requests).run() == {r.id: run_alone(runner, r) for r in requests}


def test_stop_tokens_do_not_come_before_their_time(runner: ModelRunner) -> None:
    free = run_alone(runner, submit("a", max_tokens=4))
    held = run_alone(runner, submit("b", max_tokens=4, stop_token_ids=(free[0], free[2]), min_tokens=2))
    assert held[0] != free[0]
    assert not {held[0], held[1]} & {free[0], free[2]}


def test_seconds_are_measured_for_prefill_and_for_decode(either: Tiny) -> None:
    """The token after a prompt comes with the prompt's pass, or with one of its own."""
    ticks = iter(range(100))
    model = either()
    runner = ModelRunner(model, clock=lambda: float(next(ticks)))
    drive = Drive(runner, [submit("a")])
    first = drive.step(Choice([drive.live["a"]], 1))
    second = drive.step(everyone(drive))
    third = drive.step(everyone(drive))
    assert [(r.prefill_s > 0, r.decode_s > 0) for r in (first, second, third)] == [
        (True, False),
        (True, not contiguous(model)),
        (False, True),
    ]


def test_seconds_of_prompts_and_rows_together_are_told_apart_or_reported_as_such(either: Tiny) -> None:
    ticks = iter(range(100))
    model = either()
    drive = Drive(ModelRunner(model, clock=lambda: float(next(ticks))), [submit("a"), submit("b")])
    drive.step(Choice([drive.live["a"]], 10_000))
    both = drive.step(Choice([drive.live["a"], drive.live["b"]], 1))
    if contiguous(model):
        assert (both.prefill_s, both.decode_s, both.mixed_s > 0) == (0.0, 0.0, True)
    else:
        assert (both.prefill_s > 0, both.decode_s > 0, both.mixed_s) == (True, True, 0.0)


# The owner, warm-up, jobs -----------------------------------------------------------------------------------------


def test_every_entry_refuses_another_thread(runner: ModelRunner) -> None:
    """A1."""
    entries: list[Callable[[], Any]] = [
        runner.capabilities,
        runner.warm_up,
        runner.statistics,
        runner.close,
        lambda: runner.execute(StepPlan(step=1)),
        lambda: runner.release("x"),
        lambda: runner.jobs()["memory"](Never(), {}),
        lambda: runner.jobs()["release_memory"](Never(), {}),
    ]
    refused: list[str] = []

    def elsewhere() -> None:
        for entry in entries:
            try:
                entry()
            except WrongThread as error:
                refused.append(str(error))

    thread = threading.Thread(target=elsewhere, name="elsewhere")
    thread.start()
    thread.join()
    assert len(refused) == len(entries)
    assert "'elsewhere'" in refused[0]


class Never:
    def cancelled(self) -> bool:
        return False


def test_the_warm_up_leaves_nothing_behind(runner: ModelRunner) -> None:
    """C2."""
    runner.warm_up()
    before = settled_memory()
    runner.warm_up()
    assert settled_memory() <= before
    assert runner.statistics().kv_bytes == 0
    assert runner.statistics().prefix == PrefixStatistics()


@pytest.mark.parametrize(
    ("one", "named"),
    [
        (WarmPass(4), "the first step of 4 sequences took 60 s"),
        (WarmPass(4, drafts=3), "the first step of 4 sequences with 3 drafts each took 60 s"),
        (WarmPass(chunks=(2048, 64)), "the first prompt chunk of 2,048 and 64 tokens took 60 s"),
        (WarmPass(2, (64,)), "the first step of 2 sequences beside a prompt chunk of 64 tokens took 60 s"),
    ],
)
def test_a_pass_of_the_warm_up_that_takes_long_is_told(
    runner: ModelRunner, one: WarmPass, named: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("treadle.runner.loading.warmup.run_pass", lambda runner, one: 60.0)
    with caplog.at_level("INFO"):
        warm_up(runner, [one])
    assert caplog.messages == [named]


@pytest.mark.parametrize("call", [0, 1, 2])
@pytest.mark.parametrize("error", [ValueError("shape"), RuntimeError("command buffer")], ids=["value", "runtime"])
def test_a_warm_up_that_fails_half_way_leaves_nothing_behind(either: Tiny, call: int, error: Exception) -> None:
    """C1, C2: it raises, and the runner could still be used or closed."""
    model = either()
    runner = faulty(model, lambda: error, min(call, 1) if contiguous(model) else call)
    with pytest.raises((ValueError, RunnerBroken), match=r"shape|command buffer"):
        runner.warm_up()
    assert runner.statistics().kv_bytes == 0
    assert run_alone(runner, submit("x")) == run_alone(ModelRunner(model), submit("x"))


def test_jobs_tell_memory_and_give_it_back(runner: ModelRunner) -> None:
    drive = Drive(runner, [submit("a")])
    drive.step(everyone(drive))
    jobs = runner.jobs()
    found = jobs["memory"](Never(), {})
    assert found["active_bytes"] > found["kv_bytes"] > 0
    assert jobs["release_memory"](Never(), {})["released_bytes"] >= 0
    assert mx.get_cache_memory() == 0


def test_close_frees_rows_and_weights(tiny: Tiny, tmp_path: Path) -> None:
    folder, left = make_tiny(tmp_path / "m", layers=6), []
    gc.collect()  # what other tests left would go meanwhile
    for _ in range(2):
        before = mx.get_active_memory()
        runner = build(folder)
        drive = Drive(runner, [submit("a")])
        drive.step(everyone(drive))
        assert mx.get_active_memory() > before + 100_000
        runner.close()
        left.append(mx.get_active_memory() - before)
    assert left[0] <= 256  # functions that were compiled for the first time keep their constants
    assert left[1] <= 0
