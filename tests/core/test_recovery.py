"""A step that raises: who fails, who does not, and that those who don't get the tokens they would have got (B7)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.core.drive import Bench
from treadle.core.messages import Finish, FinishReason, Submit
from treadle.core.plan import StepPlan


def takes_part(*names: str) -> Callable[[StepPlan], bool]:
    def raises(plan: StepPlan) -> bool:
        inside = {a.request.id for a in plan.admit} | {c.id for c in plan.prefill} | {d.id for d in plan.decode}
        return bool(inside & set(names))

    return raises


def once(at: int) -> Callable[[StepPlan], bool]:
    left = [at]

    def raises(plan: StepPlan) -> bool:
        left[0] -= 1
        return left[0] == 0

    return raises


def failed(bench: Bench) -> set[str]:
    ends = {id_: heard.finish for id_, heard in bench.heard.items()}
    assert all(ends.values())
    return {id_ for id_, end in ends.items() if end is not None and end.reason is FinishReason.ERROR}


def many(bench: Bench, count: int, prompt: int = 40) -> list[Submit]:
    return [bench.submit(f"r{i}", prompt=prompt + i, max_tokens=12 + i) for i in range(count)]


@pytest.mark.parametrize("rows", [1, 2, 4, 9])
@pytest.mark.parametrize("at", [1, 2, 5, 9])
def test_a_step_that_raises_once_fails_nobody(rows: int, at: int) -> None:
    bench = Bench(max_running=4, prefill_tokens=32)
    requests = many(bench, rows)
    bench.runner.raises = once(at)
    bench.run()
    for request in requests:
        bench.assert_undisturbed(request)
    assert all(heard.admitted == 1 for heard in bench.heard.values()), "admitted is told once"
    assert bench.statistics().recovered_steps == bench.raised == 1
    bench.assert_idle()


@pytest.mark.parametrize("rows", [1, 2, 4, 9])
@pytest.mark.parametrize("before", [0, 1, 4])
def test_a_row_that_makes_steps_raise_fails_alone(rows: int, before: int) -> None:
    bench = Bench(max_running=4, prefill_tokens=32)
    requests = many(bench, rows)
    for _ in range(before):
        bench.step()
    bench.runner.raises = takes_part("r0")
    bench.run()
    assert failed(bench) == {"r0"}
    for request in requests[1:]:
        bench.assert_undisturbed(request)
    bench.assert_idle()


def test_a_row_is_told_why_it_failed() -> None:
    bench = Bench()
    bench.submit("a")
    bench.runner.raises = takes_part("a")
    bench.run()
    finish = bench.heard["a"].finish
    assert finish is not None
    assert finish.code == "engine_step_failed"
    assert finish.message == "the step failed on this request: the step raised"


def test_a_row_that_makes_steps_raise_late_fails_alone() -> None:
    bench = Bench(max_running=4)
    requests = many(bench, 4)
    bench.runner.raises = lambda plan: any(row.id == "r2" and row.position == 4 for row in plan.decode)
    bench.run()
    assert failed(bench) == {"r2"}
    assert len(bench.heard["r2"].tokens) == 4
    for request in requests:
        if request.id != "r2":
            bench.assert_undisturbed(request)
    bench.assert_idle()


def test_a_long_life_beside_many_bad_requests_is_not_a_fault() -> None:
    bench = Bench(max_running=3)
    request = bench.submit("long", prompt=20, max_tokens=300)
    bench.step()
    bad = [f"bad{i}" for i in range(30)]
    bench.runner.raises = takes_part(*bad)
    for name in bad:
        bench.submit(name)
    bench.run()
    assert failed(bench) == set(bad)
    bench.assert_undisturbed(request)
    bench.assert_idle()


def test_many_bad_rows_at_once_do_not_take_a_good_one_with_them() -> None:
    bench = Bench(max_running=16, prefill_tokens=16)
    good = bench.submit("good", prompt=50, max_tokens=20)
    bad = [f"bad{i}" for i in range(15)]
    for name in bad:
        bench.submit(name, prompt=50)
    bench.runner.raises = takes_part(*bad)
    bench.run()
    assert failed(bench) == set(bad)
    bench.assert_undisturbed(good)


@pytest.mark.parametrize("rows", [1, 2, 9])
def test_a_runner_that_always_raises_ends_everyone_once(rows: int) -> None:
    bench = Bench(max_running=4, prefill_tokens=32)
    many(bench, rows)
    bench.step()
    bench.runner.raises = lambda plan: True
    bench.run(steps=4 * rows + 4)
    assert failed(bench) == {f"r{i}" for i in range(rows)}
    bench.assert_idle()


def test_newcomers_stay_out_of_a_trial_and_run_after_it() -> None:
    bench = Bench(max_running=4, prefill_tokens=16)
    bench.submit("a", prompt=60, max_tokens=3)
    bench.submit("b", prompt=60, max_tokens=3)
    bench.runner.raises = once(1)
    bench.step()
    late = bench.submit("late")
    bench.step()
    assert [a.request.id for a in bench.plan.admit] == ["a"]
    bench.run()
    bench.assert_undisturbed(late)


def test_the_cleared_go_on_beside_the_one_on_trial() -> None:
    bench = Bench(max_running=4)
    bench.submit("a", max_tokens=30)
    bench.submit("b", max_tokens=30)
    bench.step()
    bench.runner.raises = once(1)
    bench.step()
    bench.step()
    assert [d.id for d in bench.plan.decode] == ["a"]
    bench.step()
    assert [d.id for d in bench.plan.decode] == ["a", "b"]


def test_once_the_one_to_blame_is_found_the_others_beside_it_go_on_together() -> None:
    bench = Bench(max_running=4)
    bench.submit("a", max_tokens=30)
    bench.submit("b", max_tokens=30)
    bench.submit("bad", max_tokens=30)
    bench.step()
    bench.runner.raises = takes_part("bad")
    bench.until(lambda: bench.heard["bad"].finish is not None)
    bench.step()
    assert [d.id for d in bench.plan.decode] == ["a", "b"]


def test_a_row_comes_back_with_its_tokens() -> None:
    bench = Bench()
    bench.submit("a", max_tokens=30)
    for _ in range(3):
        bench.step()
    bench.runner.raises = once(1)
    bench.step()
    bench.step()
    assert bench.released == ("a",)
    (admit,) = bench.plan.admit
    assert list(admit.history) == bench.heard["a"].tokens[:3]


@pytest.mark.parametrize("steps", range(5))
def test_a_cancel_during_recovery_ends_once(steps: int) -> None:
    bench = Bench(max_running=4, prefill_tokens=16)
    requests = many(bench, 3)
    bench.step()
    bench.runner.raises = once(1)
    bench.step()
    for _ in range(steps):
        bench.step()
    bench.cancel("r1")
    bench.run()
    assert bench.heard["r1"].finish is not None
    assert bench.heard["r1"].finish.reason is FinishReason.CANCELLED
    bench.assert_undisturbed(requests[0])
    bench.assert_undisturbed(requests[2])
    bench.assert_idle()


def test_the_end_of_all_during_recovery() -> None:
    bench = Bench()
    many(bench, 3)
    bench.runner.raises = once(1)
    bench.step()
    bench.hear(bench.scheduler.end_all(Finish(reason=FinishReason.ERROR, code="engine_died")))
    bench.step()
    assert failed(bench) == {"r0", "r1", "r2"}
    bench.assert_idle()
