"""The owner's loop, run by hand on the test's thread: an interleaving is a list of calls."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from tests.support.faults import Faults, FaultyRunner, plain
from treadle.cache.prefix_index import PrefixIndex
from treadle.core import block_budget
from treadle.core.capabilities import SpecPrefillCapabilities
from treadle.core.messages import (
    BlocksCleared,
    BlockStored,
    Cancel,
    CancelJob,
    Failed,
    Finish,
    FinishReason,
    FromOwner,
    JobDone,
    Output,
    Ping,
    Pong,
    RunJob,
    StepReport,
    Stop,
    Stopped,
    Submit,
    WatchBlocks,
)
from treadle.core.plan import StepResult
from treadle.core.statistics import RunnerStatistics
from treadle.engine.loop import BEAT_S, MAX_FAILING_STEPS, MAX_RELEASE_TRIES, REST_AFTER_S, EngineLoop
from treadle.engine.mailbox import Mailbox
from treadle.engine.owner import OwnerLimits, scheduler_of, serve
from treadle.runner.base import RunnerBroken


class Hand:
    """A loop, its fault-injecting runner, and its messages."""

    def __init__(self, max_running: int = 4, can: dict[str, Any] | None = None, **faults: Any) -> None:
        self.now = 0.0
        self.faults = Faults(**faults)
        self.runner = FaultyRunner(self.faults, can=can)
        self.mailbox = Mailbox()
        self.said: list[FromOwner] = []
        limits = OwnerLimits(max_running=max_running, prefill_tokens=64)
        self.loop = EngineLoop(
            self.runner, scheduler_of(self.runner, limits), self.mailbox, self.said.append, lambda: self.now
        )

    def put(self, *messages: Any) -> Hand:
        for message in messages:
            self.mailbox.put(message)
        return self

    def step(self, times: int = 1) -> Hand:
        for _ in range(times):
            self.loop.run_once()
        return self

    def until_idle(self, most: int = 400) -> Hand:
        for _ in range(most):
            if not self.loop.has_work:
                return self
            self.loop.run_once()
        raise AssertionError("it never became idle")

    @property
    def outputs(self) -> list[Output]:
        return [output for message in self.said if isinstance(message, StepReport) for output in message.outputs]

    def tokens(self, row: str) -> tuple[int, ...]:
        return tuple(token for output in self.outputs if output.id == row for token in output.tokens)

    def ends(self, row: str) -> list[Finish]:
        return [output.finish for output in self.outputs if output.id == row and output.finish]

    def end(self, row: str) -> Finish:
        (finish,) = self.ends(row)
        return finish

    @property
    def jobs(self) -> dict[str, JobDone]:
        return {message.id: message for message in self.said if isinstance(message, JobDone)}


def ask(row: str, tokens: int = 3, prompt: tuple[int, ...] = (1, 2), **fields: Any) -> Submit:
    return Submit(id=row, prompt=prompt, max_tokens=tokens, max_wait_s=60.0, **fields)


def expected(request: Submit) -> tuple[int, ...]:
    return tuple(plain(request, i) for i in range(request.max_tokens))


# Admission per step ------------------------------------------------------------------------------------------------


def test_a_request_that_arrives_mid_decode_joins_the_next_step():
    """B1: nothing is drained before it is admitted."""
    hand = Hand().put(ask("a", 20)).step(5)
    assert len(hand.tokens("a")) >= 4
    hand.put(ask("b")).step()
    assert [admit.request.id for admit in hand.runner.plans[-1].admit] == ["b"]
    assert {row.id for row in hand.runner.plans[-1].decode} >= {"a"}
    hand.until_idle()
    assert hand.tokens("a") == expected(ask("a", 20))
    assert hand.tokens("b") == expected(ask("b"))


def test_each_sequence_ends_once_and_leaves_nothing():
    hand = Hand().put(*(ask(f"r{i}", i + 1) for i in range(9))).step().until_idle()
    for i in range(9):
        assert hand.end(f"r{i}") == Finish(reason=FinishReason.LENGTH)
    assert not hand.runner.rows
    assert hand.loop.scheduler.live == 0


def test_an_idle_turn_says_nothing_and_runs_nothing():
    hand = Hand().step(3)
    assert hand.said == []
    assert hand.runner.steps == 0


# Cancels -----------------------------------------------------------------------------------------------------------


def test_a_cancel_is_applied_at_the_next_step_and_its_slot_is_free_in_it():
    """B3, B6: the follow-up starts within one step."""
    hand = Hand(max_running=1).put(ask("a", 50), ask("b")).step(3)
    hand.put(Cancel(id="a"), Cancel(id="a")).step()
    assert hand.end("a").reason is FinishReason.CANCELLED
    assert hand.runner.released == ["a"]
    assert [admit.request.id for admit in hand.runner.plans[-1].admit] == ["b"]
    assert all(row.id != "a" for row in hand.runner.plans[-1].decode)


def test_a_cancel_before_its_request_is_remembered_and_an_unknown_one_is_harmless():
    """B4."""
    hand = Hand().put(Cancel(id="a"), Cancel(id="nobody"), ask("a"), ask("b")).step().until_idle()
    assert hand.end("a").reason is FinishReason.CANCELLED
    assert hand.tokens("a") == ()
    assert hand.tokens("b") == expected(ask("b"))
    assert hand.ends("nobody") == []


def test_a_cancel_races_the_move_from_waiting_to_running():
    """B4: in the same batch of messages as the end that frees the slot."""
    hand = Hand(max_running=1).put(ask("a", 1), ask("b", 5)).step()
    assert hand.end("a")
    hand.put(Cancel(id="b"), Cancel(id="a")).step().until_idle()
    assert hand.end("b").reason is FinishReason.CANCELLED
    assert hand.end("a").reason is FinishReason.LENGTH


# Removal -----------------------------------------------------------------------------------------------------------


def test_a_row_that_cannot_be_released_once_is_tried_again_and_keeps_nobody():
    """B5."""
    tries: list[str] = []

    def on_release(row: str) -> Exception | None:
        tries.append(row)
        return ValueError("stuck") if tries.count("bad") == 1 and row == "bad" else None

    hand = Hand(on_release=on_release).put(ask("bad", 9), ask("good", 9), ask("other", 30)).step(2)
    hand.put(Cancel(id="bad"), Cancel(id="good")).step()
    assert hand.runner.released == ["good"]
    hand.until_idle()
    assert tries.count("bad") == 2
    assert hand.tokens("other") == expected(ask("other", 30))
    assert not hand.runner.rows


def test_a_row_that_can_never_be_released_breaks_the_runner_after_some_tries():
    """B5: no phantom row decodes for ever."""
    tries: list[str] = []

    def on_release(row: str) -> Exception | None:
        tries.append(row)
        return ValueError("stuck") if row == "bad" else None

    hand = Hand(on_release=on_release).put(ask("bad"), ask("other", 30)).step()
    assert not serve(hand.loop)
    assert tries.count("bad") == MAX_RELEASE_TRIES
    assert hand.end("bad").reason is FinishReason.LENGTH
    assert hand.ends("other") == [], "Failed is the end of every row, and the client replays them"
    assert isinstance(hand.said[-1], Failed)


def test_a_broken_runner_in_a_release_is_not_tried_again():
    hand = Hand(on_release=lambda row: RunnerBroken("gone")).put(ask("a", 1))
    with pytest.raises(RunnerBroken, match="gone"):
        hand.step(2)


def test_a_row_that_would_rejoin_while_its_old_self_stays_breaks_the_runner():
    """B7: a step's rows are released before they are recomputed; a runner that keeps one would decode it twice."""
    hand = Hand(steps={3: ValueError("once")}, on_release=lambda row: ValueError("stuck"))
    hand.put(ask("a", 9), ask("b", 9)).step(3)
    with pytest.raises(RunnerBroken, match=r"row \w can't be released"):
        hand.step()


# Steps that raise --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [1, 2, 5])
def test_a_step_that_raises_once_fails_nobody_and_changes_no_token(at):
    """B7."""
    requests = [ask(f"r{i}", 4 + i, prompt=(i, 3)) for i in range(4)]
    hand = Hand(steps={at: ValueError("hiccup")}).put(*requests).step().until_idle()
    for request in requests:
        assert hand.tokens(request.id) == expected(request)
        assert hand.end(request.id).reason is FinishReason.LENGTH
    assert hand.said[-1].statistics.recovered_steps == 1  # type: ignore[union-attr]


def test_a_row_that_makes_every_step_raise_fails_alone():
    """B7."""
    requests = [ask(f"r{i}", 6, prompt=(i, 3)) for i in range(4)]
    hand = Hand(on_row=lambda row: ValueError("poison") if row == "r2" else None).put(*requests).step().until_idle()
    assert hand.end("r2").code == "engine_step_failed"
    assert hand.end("r2").message == "the step failed on this request: ValueError, see the server's log"
    for request in requests[:2] + requests[3:]:
        assert hand.tokens(request.id) == expected(request)
        assert hand.end(request.id).reason is FinishReason.LENGTH
    hand.put(ask("later")).step().until_idle()
    assert hand.tokens("later") == expected(ask("later"))


def test_when_every_step_raises_each_one_ends_once_and_the_owner_gives_up():
    """B7: never log and continue with clients waiting."""
    hand = Hand(always=ValueError("dead device")).put(*(ask(f"r{i}") for i in range(MAX_FAILING_STEPS + 6)))
    assert not serve(hand.loop)
    ends = [end for i in range(MAX_FAILING_STEPS + 6) for end in hand.ends(f"r{i}")]
    assert {end.code for end in ends} == {"engine_step_failed"}
    assert len(ends) < MAX_FAILING_STEPS
    last = hand.said[-1]
    assert isinstance(last, Failed)
    assert f"{MAX_FAILING_STEPS} steps in a row raised" in last.message
    assert "dead device" in last.message
    assert hand.runner.steps == MAX_FAILING_STEPS


def test_steps_that_raise_now_and_then_are_not_in_a_row():
    """B7: a long life may see many of them."""
    rows = [ask(f"r{i}", prompt=(i,)) for i in range(2 * MAX_FAILING_STEPS)]
    hand = Hand(max_running=1)
    hand.faults.steps = {3 * i + 1: ValueError("hiccup") for i in range(3 * len(rows))}
    hand.put(*rows).step().until_idle()
    assert [hand.end(row.id).reason for row in rows] == [FinishReason.LENGTH] * len(rows)
    assert [hand.tokens(row.id) for row in rows] == [expected(row) for row in rows]
    assert not hand.loop.stopped


def test_steps_that_raise_show_that_the_owner_lives():
    """C4: hung means that no step ends, and these do end."""
    hand = Hand(steps={3: ValueError("slow fault")}).put(ask("a"), ask("b")).step(2)
    hand.said.clear()
    hand.now = BEAT_S
    hand.step()
    assert [message.outputs for message in hand.said] == [()]  # type: ignore[union-attr]


def test_a_broken_runner_ends_everything_at_once():
    """B7: its state is not trusted."""
    hand = Hand(steps={3: RunnerBroken("the device is lost")}).put(
        ask("a", 9), ask("b", 9), RunJob(id="j", name="echo")
    )
    hand.put(RunJob(id="k", name="echo"), RunJob(id="l", name="echo"), RunJob(id="m", name="echo"))
    assert not serve(hand.loop)
    assert hand.ends("a") == hand.ends("b") == []
    assert len(hand.tokens("a")) == 2, "what it has gained is told"
    assert [hand.jobs[j].code for j in "jklm"] == ["", "", "", "engine_died"]
    assert hand.said[-1] == Failed(code="engine_died", message="the engine failed and is replaced: the device is lost")
    assert hand.loop.stopped


def test_what_came_while_the_runner_broke_is_answered_too():
    """C3: nobody waits for an owner that has gone."""
    hand = Hand()

    def break_late(step: int) -> None:
        hand.put(ask("late"), RunJob(id="j", name="echo"), CancelJob(id="x"), Cancel(id="y"))
        raise RunnerBroken("gone")

    hand.faults.before_step = break_late
    hand.put(ask("a"))
    assert not serve(hand.loop)
    assert hand.jobs["j"].code == "engine_died"
    assert hand.ends("late") == hand.ends("a") == [], "the client has both"


def test_an_owner_whose_books_are_broken_still_says_that_it_failed(monkeypatch):
    """C4."""
    hand = Hand().put(ask("a"))

    def broken(*_: object) -> Any:
        raise AssertionError("scheduler books")

    monkeypatch.setattr(hand.loop.scheduler, "apply", broken)
    monkeypatch.setattr(hand.loop.scheduler, "flush", broken)
    assert not serve(hand.loop)
    assert hand.said == [Failed(code="engine_died", message="the engine failed and is replaced: scheduler books")]


# Planning that raises ----------------------------------------------------------------------------------------------

REUSES = {"prefix_cache": True, "kv_block": 4, "kv_blocks": 400}


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_row_whose_prefix_cannot_be_looked_up_fails_alone(monkeypatch, lookahead):
    """B7: an exception out of `reuse` has a scope; those that joined in the same plan are recomputed."""
    hand = Hand(can={**REUSES, "lookahead": lookahead}).put(ask("a", 20, prompt=(9, 9))).step(4)
    reuse = hand.runner.match_prefix

    def poisoned(admit: Any) -> int:
        if admit.request.id == "bad":
            raise ValueError("torn index")
        return reuse(admit)

    monkeypatch.setattr(hand.loop.scheduler._plan_builder, "_match", poisoned)
    good = [ask(f"r{i}", 5, prompt=(i, 3)) for i in range(2)]
    hand.put(good[0], ask("bad"), good[1]).step().until_idle()
    assert hand.end("bad").code == "engine_step_failed"
    assert "ValueError, see the server's log" in hand.end("bad").message
    for request in (*good, ask("a", 20, prompt=(9, 9))):
        assert hand.tokens(request.id) == expected(request)
        assert hand.end(request.id).reason is FinishReason.LENGTH
    assert not hand.runner.rows, "what `reuse` gave to rows of the plan that was not made is released"
    assert not hand.loop.stopped


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("where", ["free_blocks", "plan"])
def test_planning_that_raises_once_fails_nobody_and_changes_no_token(monkeypatch, where, lookahead):
    """B7: with nobody named, rows are tried one by one, and the trial passes."""
    requests = [ask(f"r{i}", 5 + i, prompt=(i, 3)) for i in range(3)]
    hand = Hand(can={**REUSES, "lookahead": lookahead}).put(*requests).step(3)
    owner: Any = hand.runner if where == "free_blocks" else hand.loop.scheduler._plan_builder
    name = "free_blocks" if where == "free_blocks" else "build"
    truly, calls = getattr(owner, name), []

    def hiccup(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise KeyError("hiccup")
        return truly(*args)

    monkeypatch.setattr(owner, name, hiccup)
    hand.put(Cancel(id="nobody")).step().until_idle()
    for request in requests:
        assert hand.tokens(request.id) == expected(request)
        assert hand.end(request.id).reason is FinishReason.LENGTH
    assert hand.said[-1].statistics.recovered_steps == 1  # type: ignore[union-attr]
    assert not hand.runner.rows


def test_a_row_on_which_planning_raises_is_found_by_trial(monkeypatch):
    """B7: though nothing names it."""
    requests = [ask(f"r{i}", 6, prompt=(i, 3)) for i in range(4)]
    hand = Hand().put(*requests)
    builder = hand.loop.scheduler._plan_builder
    truly = builder._chunk

    def fussy(row: Any, *args: Any) -> Any:
        if row.id == "r2":
            raise ZeroDivisionError
        return truly(row, *args)

    monkeypatch.setattr(builder, "_chunk", fussy)
    hand.step().until_idle()
    assert hand.end("r2").code == "engine_step_failed"
    for request in requests[:2] + requests[3:]:
        assert hand.tokens(request.id) == expected(request)
    assert not hand.loop.stopped


def test_planning_that_always_raises_ends_the_owner(monkeypatch):
    """B7: it does not go on for ever, with or without rows to blame."""
    hand = Hand(can=REUSES).put(ask("a"))
    monkeypatch.setattr(hand.runner, "free_blocks", lambda: 1 // 0)
    assert not serve(hand.loop)
    last = hand.said[-1]
    assert isinstance(last, Failed)
    assert f"{MAX_FAILING_STEPS} steps in a row raised" in last.message


@pytest.mark.parametrize("where", ["free_blocks", "match"])
def test_a_runner_that_breaks_while_planning_is_the_owners_end_at_once(monkeypatch, where):
    """B7."""

    def broken(*args: Any) -> int:
        raise RunnerBroken("the device is lost")

    hand = Hand(can=REUSES).put(ask("a"))
    owner: Any = hand.runner if where == "free_blocks" else hand.loop.scheduler._plan_builder
    monkeypatch.setattr(owner, where if where == "free_blocks" else "_match", broken)
    assert not serve(hand.loop)
    assert hand.said[-1] == Failed(code="engine_died", message="the engine failed and is replaced: the device is lost")


def test_a_release_is_not_lost_when_planning_raises(monkeypatch):
    """B5: else the runner would keep the row for ever."""
    hand = Hand().put(ask("a", 1), ask("b", 9))
    builder = hand.loop.scheduler._plan_builder
    truly, calls = builder.build, []

    def hiccup(step: int, release: Any, *args: Any) -> Any:
        calls.append(release)
        if len(calls) == 1:
            hand.loop.scheduler._released_ids.append("ghost")
            raise KeyError("hiccup")
        return truly(step, release, *args)

    monkeypatch.setattr(builder, "build", hiccup)
    hand.step(2).until_idle()
    assert "ghost" in hand.runner.released


# Sequences of an earlier engine ------------------------------------------------------------------------------------


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("gained", [1, 3, 7])
def test_a_resumed_sequence_goes_on_as_if_nothing_had_been(gained, lookahead):
    """Its limits count from its first token, and it is fed all it had."""
    request = ask("a", 8, prompt=(5, 6, 7))
    tokens = expected(request)
    hand = Hand(can={"lookahead": lookahead})
    hand.put(msgspec.structs.replace(request, generated=tokens[:gained], resumed=True)).step().until_idle()
    assert hand.tokens("a") == tokens[gained:]
    assert hand.end("a").reason is FinishReason.LENGTH
    assert hand.runner.plans[0].admit[0].history == tokens[:gained]


def test_a_resumed_sequence_keeps_its_stop_tokens_and_its_least_length():
    request = ask("a", 50, prompt=(5, 6, 7))
    tokens = expected(request)
    request = msgspec.structs.replace(request, stop_token_ids=(tokens[2], tokens[6]), min_tokens=4)
    hand = Hand().put(msgspec.structs.replace(request, generated=tokens[:3], resumed=True)).step().until_idle()
    assert hand.tokens("a") == tokens[3:7]
    assert hand.end("a") == Finish(reason=FinishReason.STOP, stop_token_id=tokens[6])


def test_a_resumed_sequence_goes_before_all_who_wait_and_its_wait_has_no_end():
    hand = Hand(max_running=1).put(ask("first", 4)).step()
    late = msgspec.structs.replace(ask("b", 3, priority=5), max_wait_s=0.0, resumed=True)
    hand.put(ask("urgent", 3, priority=-9), late, msgspec.structs.replace(ask("c", 3), max_wait_s=0.0)).step()
    hand.now += 1000.0
    hand.until_idle()
    assert hand.end("c").reason is FinishReason.EXPIRED
    assert hand.tokens("b") == expected(late)
    order = [admit.request.id for plan in hand.runner.plans for admit in plan.admit]
    assert order[:2] == ["first", "b"]


def test_what_was_told_of_a_prompts_scores_is_not_told_again():
    request = ask("a", 3, prompt=(5, 6, 7, 8, 9), prompt_logprobs=0)
    calm = Hand().put(request).step().until_idle()
    scores = [score for output in calm.outputs for score in output.prompt_logprobs]
    assert len(scores) == 4
    again = msgspec.structs.replace(request, generated=expected(request)[:1], scored=3, resumed=True)
    hand = Hand().put(again).step().until_idle()
    assert [score for output in hand.outputs for score in output.prompt_logprobs] == scores[3:]


# Pings -------------------------------------------------------------------------------------------------------------


def test_a_ping_is_answered_between_two_steps_and_costs_none():
    hand = Hand().put(Ping()).step()
    assert hand.said == [Pong()]
    assert hand.runner.steps == 0
    hand.put(ask("a", 3), Ping()).step().until_idle()
    assert hand.said.count(Pong()) == 2
    assert hand.tokens("a") == expected(ask("a", 3))


def test_pings_do_not_keep_the_runner_from_its_rest(monkeypatch):
    """D21: they come more often than it rests."""
    hand, waits = Hand().put(ask("a", 1)), []
    coming = iter([(3.0, Ping()), (3.0, Ping()), (4.5, None), (0.0, Stop())])

    def wait(timeout_s: float) -> bool:
        waits.append(timeout_s)
        passes, message = next(coming)
        hand.now += min(passes, timeout_s)
        hand.put(*([] if message is None else [message]))
        if message is None:
            hand.put(Stop())
        return message is not None

    monkeypatch.setattr(hand.mailbox, "wait", wait)
    assert serve(hand.loop)
    assert waits == [REST_AFTER_S, REST_AFTER_S, REST_AFTER_S - 3], "the first one came with work"
    assert hand.runner.rests == 1


# Steps in flight ---------------------------------------------------------------------------------------------------

AHEAD = {"lookahead": 1}


def test_a_step_is_started_before_the_one_before_it_is_finished():
    hand = Hand(can=AHEAD).put(ask("a", 4)).step()
    assert (hand.runner.steps, hand.runner.finished) == (1, 0)
    assert hand.tokens("a") == ()
    hand.step()
    assert (hand.runner.steps, hand.runner.finished) == (2, 1)
    assert len(hand.tokens("a")) == 1
    hand.until_idle()
    assert hand.runner.most_in_flight == 2
    assert hand.tokens("a") == expected(ask("a", 4))


def test_a_runner_that_cannot_look_ahead_is_stepped_one_by_one():
    hand = Hand().put(ask("a", 4)).step().until_idle()
    assert hand.runner.most_in_flight == 1


def test_each_row_is_told_of_once_in_a_report():
    hand = Hand(can=AHEAD).put(ask("a", 4), ask("b", 2)).step().until_idle()
    for report in hand.said:
        named = [output.id for output in report.outputs]  # type: ignore[union-attr]
        assert len(set(named)) == len(named)


def test_the_time_of_a_step_is_from_result_to_result():
    hand = Hand(can=AHEAD)

    def work(step: int) -> None:
        hand.now += 2.0

    hand.faults.before_step = work
    hand.now = 5.0
    hand.put(ask("a", 4)).step(2)
    assert hand.said[-1].statistics.step_s == 2.0, "the first, from its start"  # type: ignore[union-attr]
    hand.step()
    assert hand.said[-1].statistics.step_s == 4.0, "the second, with the start of the third"  # type: ignore[union-attr]
    hand.step()
    assert hand.said[-1].statistics.step_s == 2.0  # type: ignore[union-attr]


def told_as_steps_start(hand: Hand, row: str) -> list[int]:
    """The tokens of `row` that are told as each of the steps to come is started."""
    told: list[int] = []
    hand.faults.before_step = lambda step: told.append(len(hand.tokens(row)))
    return told


def test_first_tokens_are_told_before_the_next_step_is_started():
    """To start it takes a GPU's host as long as a step; the tokens behind them are told a step later."""
    hand = Hand(can=AHEAD).put(ask("a", 4), ask("b", 4, prompt=(3, 4))).step()
    told = told_as_steps_start(hand, "a")
    hand.until_idle()
    assert told == [1, 1, 2]
    assert hand.tokens("a") == expected(ask("a", 4))


@pytest.mark.parametrize("other", [ask("other", 50), ask("other", 2, prompt=tuple(range(1, 600)))])
def test_first_tokens_of_some_do_not_hold_up_the_steps_of_others(other: Submit):
    """Sequences that decode, and prompts that go on."""
    hand = Hand(can=AHEAD).put(other).step(3).put(ask("a", 4))
    while not any(row.id == "a" and row.position == 0 for row in hand.runner.plans[-1].decode):
        hand.step()
    told = told_as_steps_start(hand, "a")
    hand.until_idle()
    assert told[0] == 0
    assert hand.tokens("a") == expected(ask("a", 4))
    assert hand.tokens("other") == expected(other)


def test_a_cancel_leaves_its_slot_though_its_step_is_in_flight():
    """B3, B6"""
    hand = Hand(max_running=1, can=AHEAD).put(ask("a", 50), ask("b", 3)).step(3)
    told = hand.tokens("a")
    hand.put(Cancel(id="a")).step()
    assert hand.end("a").reason is FinishReason.CANCELLED
    assert hand.tokens("a") == told
    assert [admit.request.id for admit in hand.runner.plans[-1].admit] == ["b"]
    hand.until_idle()
    assert hand.tokens("b") == expected(ask("b", 3))


def test_an_id_that_comes_again_while_its_old_self_is_in_flight_gets_its_own_tokens():
    hand = Hand(can=AHEAD).put(ask("a", 50, prompt=(3, 4))).step(3)
    hand.put(Cancel(id="a")).step()
    hand.said.clear()
    again = ask("a", 4, prompt=(8, 9))
    hand.put(again).step().until_idle()
    assert hand.tokens("a") == expected(again)


@pytest.mark.parametrize("where", ["steps", "finishes"])
@pytest.mark.parametrize("at", [1, 2, 3, 5])
def test_a_fault_at_either_end_of_a_step_fails_nobody_and_changes_no_token(where, at):
    """B7"""
    requests = [ask(f"r{i}", 4 + i, prompt=(i, 3)) for i in range(4)]
    faults: dict[str, Any] = {where: {at: ValueError("hiccup")}}
    hand = Hand(can=AHEAD, **faults).put(*requests).step().until_idle()
    for request in requests:
        assert hand.tokens(request.id) == expected(request)
        assert hand.end(request.id).reason is FinishReason.LENGTH
    assert hand.said[-1].statistics.recovered_steps == 1  # type: ignore[union-attr]
    assert not hand.runner.rows


def test_a_start_that_raises_and_then_the_finish_before_it_is_one_recovery():
    """B7: the step in flight takes the one that was not started with it."""
    requests = [ask(f"r{i}", 5, prompt=(i, 3)) for i in range(2)]
    hand = Hand(can=AHEAD, steps={3: ValueError("start")}, finishes={2: ValueError("finish")})
    hand.put(*requests).step().until_idle()
    assert hand.said[-1].statistics.recovered_steps == 1  # type: ignore[union-attr]
    for request in requests:
        assert hand.tokens(request.id) == expected(request)


def test_a_broken_runner_in_a_finish_is_the_end():
    """B7"""
    hand = Hand(can=AHEAD, finishes={2: RunnerBroken("the device is lost")}).put(ask("a", 9))
    assert not serve(hand.loop)
    assert hand.ends("a") == []
    assert isinstance(hand.said[-1], Failed)


def test_a_stop_ends_rows_with_steps_in_flight():
    """C3"""
    hand = Hand(can=AHEAD).put(ask("a", 9)).step(2).put(Stop()).step()
    assert hand.end("a").code == "server_stopping"
    assert isinstance(hand.said[-1], Stopped)


def test_a_job_finds_no_row_that_has_ended():
    """A3, B4: it is answered after the rows that ended before it have given back what they held."""
    hand, seen = Hand(), []
    hand.faults.jobs = {"job": lambda context, args: seen.append(sorted(hand.runner.rows))}
    hand.put(ask("a", tokens=1), ask("b", tokens=9))
    while not hand.ends("a"):
        hand.step()
    hand.put(RunJob(id="j", name="job")).step()
    assert seen == [["b"]]


def test_a_job_finds_no_step_in_flight_and_comes_after_what_those_had_to_say():
    hand = Hand(can=AHEAD)
    seen: list[tuple[int, int]] = []
    hand.faults.jobs = {"job": lambda context, args: seen.append((len(hand.runner.in_flight), len(hand.tokens("a"))))}
    hand.put(ask("a", 9)).step(2)
    hand.put(RunJob(id="j", name="job")).step()
    assert seen == [(0, 2)]
    hand.until_idle()
    assert hand.tokens("a") == expected(ask("a", 9))


@pytest.fixture
def greedy(monkeypatch):
    """Expect few tokens of each sequence, so that more are admitted than fit in the end."""
    monkeypatch.setattr(block_budget, "EXPECTED_TOKENS", 1)


@pytest.mark.usefixtures("greedy")
def test_rows_that_outgrow_the_runners_blocks_take_turns():
    hand = Hand(can={**AHEAD, "kv_block": 2, "kv_blocks": 12, "prefix_cache": True})
    requests = [ask(f"r{i}", 16, prompt=(i, 3, 5)) for i in range(4)]
    hand.put(*requests).step().until_idle(2000)
    for request in requests:
        assert hand.tokens(request.id) == expected(request)
    statistics = hand.said[-1].statistics  # type: ignore[union-attr]
    assert statistics.preempted > 0
    assert statistics.cached_tokens > 0


def test_prompts_that_begin_alike_and_come_together_are_computed_once():
    """P9: who waits for another one's prompt gets its own answer all the same."""
    hand = Hand(max_running=8, can={**AHEAD, "kv_block": 4, "prefix_cache": True})
    system = tuple(range(200))
    requests = [ask(f"r{i}", 6, prompt=(*system, i, *range(i, i + 9))) for i in range(6)]
    hand.put(*requests).step().until_idle()
    for request in requests:
        assert hand.tokens(request.id) == expected(request)
    assert hand.runner.computed == 200 + 6 * 9
    assert hand.said[-1].statistics.cached_tokens == 5 * 200  # type: ignore[union-attr]


@pytest.mark.usefixtures("greedy")
def test_a_row_that_outgrew_the_blocks_is_released_before_others_grow():
    """What the runner holds is never more than there is: it checks that itself."""
    released: list[str] = []
    hand = Hand(can={"kv_block": 2, "kv_blocks": 12}, on_release=lambda row: released.append(row))
    hand.put(*(ask(f"r{i}", 16, prompt=(i, 3, 5)) for i in range(4))).step().until_idle(2000)
    assert len(released) > 4


def test_scores_of_a_prompt_are_told_and_a_request_for_no_tokens_ends():
    request = ask("a", 0, prompt=(5, 6, 7), prompt_logprobs=1)
    hand = Hand(can=AHEAD).put(request).step().until_idle()
    scores = [score for output in hand.outputs for score in output.prompt_logprobs]
    assert [score.top[0][0] for score in scores] == [6, 7]
    assert hand.tokens("a") == ()
    assert hand.end("a").reason is FinishReason.LENGTH


# Jobs --------------------------------------------------------------------------------------------------------------


def test_jobs_run_one_between_two_steps():
    """A3, B1: jobs that pile up don't hold up the rows."""
    hand = Hand().put(ask("a", 9), *(RunJob(id=f"j{i}", name="echo", args={"i": i}) for i in range(3)))
    hand.step()
    assert list(hand.jobs) == ["j0"]
    assert hand.runner.steps == 1
    hand.step(2)
    assert [done.result for done in hand.jobs.values()] == [{"i": 0}, {"i": 1}, {"i": 2}]
    assert hand.runner.steps == 3


def test_work_that_asks_for_more_work_waits_for_nothing():
    """A4: there is one place to ask, and asking there from the owner itself takes no lock that the owner holds."""
    hand = Hand(max_running=1)
    inner = ask("inner")

    def job(context: Any, args: Any) -> int:
        hand.put(RunJob(id="nested", name="echo"), inner, Submit(id="gone", prompt=(1,), max_tokens=1))
        hand.put(Cancel(id="gone"))
        return hand.runner.max_concurrent

    hand.faults.jobs = {"job": job}
    hand.put(ask("outer"), RunJob(id="j", name="job")).step().until_idle()
    hand.step().until_idle()
    assert [done.code for done in hand.jobs.values()] == ["", ""]
    assert hand.tokens("outer") == hand.tokens("inner") == expected(inner)
    assert hand.end("gone").reason is FinishReason.CANCELLED
    assert hand.runner.max_concurrent == 1


def test_a_job_that_raises_fails_alone():
    hand = Hand().put(ask("a"), RunJob(id="j", name="raise")).step().until_idle()
    assert (hand.jobs["j"].code, hand.jobs["j"].message) == ("engine_job_failed", "ValueError: the job's fault")
    assert hand.tokens("a") == expected(ask("a"))


def test_an_unknown_job_is_refused_with_the_known_names():
    hand = Hand().put(RunJob(id="j", name="sing")).step()
    assert hand.jobs["j"].code == "invalid_request"
    assert hand.jobs["j"].message == "no job 'sing' here; known: break, echo, odd, raise"


def test_a_runner_that_knows_no_jobs_says_so(monkeypatch):
    hand = Hand().put(RunJob(id="j", name="sing"))
    monkeypatch.setattr(hand.runner, "jobs", dict)
    assert hand.step().jobs["j"].message.endswith("known: none")


def test_a_table_of_jobs_that_raises_fails_the_job_alone(monkeypatch):
    hand = Hand().put(ask("a"), RunJob(id="j", name="echo"))

    def broken() -> Any:
        raise ValueError("no table")

    monkeypatch.setattr(hand.runner, "jobs", broken)
    hand.step().until_idle()
    assert hand.jobs["j"].code == "engine_job_failed"
    assert hand.tokens("a") == expected(ask("a"))


def test_a_job_that_breaks_the_runner_is_answered_before_the_owner_fails():
    """B7."""
    hand = Hand().put(ask("a", 9), RunJob(id="j", name="break"))
    assert not serve(hand.loop)
    assert hand.jobs["j"].code == "engine_died"
    assert hand.ends("a") == []
    assert sum(isinstance(message, JobDone) for message in hand.said) == 1


def test_a_job_cancelled_before_it_began_never_runs():
    """A5."""
    hand = Hand().put(RunJob(id="i", name="echo"), RunJob(id="j", name="echo"), CancelJob(id="j")).step(2)
    assert hand.jobs["i"].code == ""
    assert hand.jobs["j"].code == "request_cancelled"
    assert [name for name, _ in hand.runner.threads].count("job") == 1
    assert not hand.mailbox.job_cancelled("j"), "a cancellation outlived its job"


def test_a_job_sees_its_cancellation_while_it_runs():
    """A5: at a point where it can still stop."""
    hand = Hand()
    saw: list[bool] = []

    def job(context: Any, args: Any) -> str:
        saw.append(context.cancelled())
        hand.put(CancelJob(id="j"))
        saw.append(context.cancelled())
        return "half"

    hand.faults.jobs = {"job": job}
    hand.put(RunJob(id="j", name="job")).step()
    assert saw == [False, True]
    assert hand.jobs["j"].result == "half"
    hand.put(RunJob(id="j", name="echo")).step()
    assert hand.jobs["j"].code == "", "a cancellation outlived its job"


def test_a_cancellation_that_comes_after_its_job_is_forgotten():
    hand = Hand().put(RunJob(id="j", name="echo")).step().put(CancelJob(id="j")).step()
    assert not hand.mailbox.job_cancelled("j")


def test_a_long_job_shows_that_the_owner_lives():
    """C4: a job that polls is no hang."""
    hand = Hand()

    def job(context: Any, args: Any) -> None:
        for _ in range(6):
            hand.now += BEAT_S / 2
            context.cancelled()

    hand.faults.jobs = {"job": job}
    hand.put(RunJob(id="j", name="job")).step()
    beats = [message for message in hand.said if isinstance(message, StepReport)]
    assert len(beats) == 3
    assert isinstance(hand.said[-1], JobDone)


def test_steps_without_outputs_show_that_the_owner_lives(monkeypatch: pytest.MonkeyPatch):
    """D2: a prompt whose scoring takes longer than a hang is none."""
    monkeypatch.setattr(FaultyRunner, "match_scored", lambda self, request: 0)
    can = SpecPrefillCapabilities(scorer="small", keep=0.2, min_tokens=512, longest=4000)
    hand = Hand(can={"spec_prefill": can})
    finish = hand.runner.finish

    def slow_finish() -> StepResult:
        hand.now += BEAT_S
        return finish()

    monkeypatch.setattr(hand.runner, "finish", slow_finish)
    hand.put(ask("a", prompt=(1,) * 600)).step(12)
    assert all(plan.score for plan in hand.runner.plans)
    finished = len(hand.runner.plans) - hand.loop.scheduler.in_flight
    assert finished >= 5
    assert [type(said) for said in hand.said] == [StepReport] * finished
    assert [output.admitted for output in hand.outputs] == [True]


# Rest ------------------------------------------------------------------------------------------------------------


def test_the_runner_rests_when_nothing_has_come_for_a_while(monkeypatch):
    """Not at the end of a row: whoever comes right behind it would wait for memory to be had again."""
    hand, rests = Hand().put(ask("a")), []
    coming = iter([(ask("b"),), (), (ask("c"),), (Stop(),)])

    def wait(timeout_s: float) -> bool:
        assert timeout_s == REST_AFTER_S
        rests.append(hand.runner.rests)
        messages = next(coming)
        hand.put(*(messages or (ask("late"),)))
        return bool(messages)

    monkeypatch.setattr(hand.mailbox, "wait", wait)
    assert serve(hand.loop)
    assert rests == [0, 0, 1, 1]
    for row in ("a", "b", "c", "late"):
        assert hand.tokens(row) == expected(ask(row))


def test_the_last_report_before_an_idle_time_says_what_is_held_then(monkeypatch):
    """Status and metrics: the sequence's memory is released behind the report of its last token."""
    hand, messages = Hand(), iter([(ask("a", 3),), (Stop(),)])

    def held() -> RunnerStatistics:
        return RunnerStatistics(kv_bytes=0 if hand.runner.released else 100)

    monkeypatch.setattr(hand.runner, "statistics", held)
    monkeypatch.setattr(hand.mailbox, "wait", lambda timeout_s: bool(hand.put(*next(messages))))
    assert serve(hand.loop)
    *_, ended, idle, _ = [message for message in hand.said if isinstance(message, StepReport)]
    assert ended.outputs
    assert ended.statistics.runner.kv_bytes == 100
    assert not idle.outputs
    assert idle.statistics.runner.kv_bytes == 0


# The end -----------------------------------------------------------------------------------------------------------


def test_a_stop_answers_everyone_once_and_is_the_last_word():
    """C3: running, waiting and jobs, also what was put behind it."""
    hand = Hand(max_running=1).put(ask("a", 9), ask("b", 9)).step(2)
    hand.put(RunJob(id="j", name="echo"), Stop(), ask("late"), RunJob(id="k", name="echo"), Stop())
    assert serve(hand.loop)
    for row in ("a", "b", "late"):
        assert hand.end(row).code == "server_stopping"
    assert {done.code for done in hand.jobs.values()} == {"server_stopping"}
    assert sum(isinstance(message, Stopped) for message in hand.said) == 1
    assert isinstance(hand.said[-1], Stopped)


def test_a_stop_during_a_job_is_seen_by_it_and_applied_after_it():
    """C3."""
    hand = Hand()
    saw: list[bool] = []

    def job(context: Any, args: Any) -> None:
        hand.put(Stop())
        saw.append(context.cancelled())

    hand.faults.jobs = {"job": job}
    hand.put(RunJob(id="j", name="job"))
    assert serve(hand.loop)
    assert saw == [True]
    assert hand.jobs["j"].code == ""
    assert isinstance(hand.said[-1], Stopped)


@pytest.mark.usefixtures("greedy")
def test_random_operations_end_everyone_once_and_agree_with_the_oracle():
    """B1 to B7, D5: whatever the order, tokens are those of the request alone or a prefix of them."""
    for seed in range(120):
        _random_run(seed)


def _random_run(seed: int) -> None:
    chance = random.Random(seed)
    hiccups = seed % 2 == 0
    poison = set() if hiccups else {f"r{i}" for i in range(12) if chance.random() < 0.15}
    tight = {"kv_block": 2, "kv_blocks": chance.randint(5, 9), "prefix_cache": chance.random() < 0.5}
    hand = Hand(
        max_running=chance.randint(1, 4),
        can={"lookahead": chance.choice((0, 1, 2)), **(tight if chance.random() < 0.5 else {})},
        steps={k: ValueError("hiccup") for k in range(1, 60) if hiccups and chance.random() < 0.1},
        finishes={k: ValueError("late hiccup") for k in range(1, 60) if hiccups and chance.random() < 0.1},
        on_row=lambda row: ValueError("poison") if row in poison else None,
    )
    requests = {f"r{i}": ask(f"r{i}", chance.randint(1, 6), prompt=(i, 1, 2)) for i in range(12)}
    messages: list[Any] = list(requests.values())
    cancelled = set(chance.sample(sorted(requests), 4))
    messages += [Cancel(id=i) for i in cancelled] + [RunJob(id=f"j{i}", name="echo") for i in range(3)]
    chance.shuffle(messages)
    while messages:
        hand.put(*messages[: (n := chance.randint(0, 3))])
        del messages[:n]
        hand.step(chance.randint(0, 2))
    hand.step().until_idle()
    for row, request in requests.items():
        reason = hand.end(row).reason
        assert hand.tokens(row) == expected(request)[: len(hand.tokens(row))]
        if row in poison:
            assert reason in (FinishReason.ERROR, FinishReason.CANCELLED)
        elif hiccups:
            assert reason in (FinishReason.LENGTH, FinishReason.CANCELLED, FinishReason.ERROR)
        elif row not in cancelled:
            assert reason is FinishReason.LENGTH
            assert hand.tokens(row) == expected(request)
    assert set(hand.jobs) == {"j0", "j1", "j2"}
    assert not hand.runner.rows
    hand.loop.scheduler.check_integrity()


# Block events


def events_of(hand: Hand) -> list[str]:
    reports = [message for message in hand.said if isinstance(message, StepReport)]
    return [type(event).__name__ for report in reports for event in report.events]


def test_no_step_asks_for_block_events_while_nobody_watches() -> None:
    hand = Hand()
    hand.put(Submit(id="a", prompt=(1, 2, 3, 4, 5), max_tokens=2)).step().until_idle()
    assert hand.runner.index is None, "it would have raised"
    assert events_of(hand) == []


def test_block_events_come_with_the_reports_of_steps_and_without() -> None:
    hand = Hand()
    hand.runner.index = PrefixIndex(2)
    hand.put(Submit(id="a", prompt=(1, 2, 3, 4), max_tokens=1)).step().until_idle()
    hand.put(WatchBlocks("")).step().until_idle()
    assert events_of(hand) == ["BlocksCleared", "BlockStored", "BlockStored"]
    hand.said.clear()
    hand.put(Submit(id="b", prompt=(5, 6), max_tokens=1)).step().until_idle()
    assert events_of(hand) == ["BlockStored"]
    hand.said.clear()
    hand.put(WatchBlocks("", on=False), Submit(id="c", prompt=(7, 8), max_tokens=1)).step().until_idle()
    assert events_of(hand) == []
    assert not hand.loop.has_work


def test_what_was_cached_before_is_told_on_though_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """One block a turn, until there is no more."""
    monkeypatch.setattr("treadle.cache.events.ANNOUNCED_AT_ONCE", 1)
    hand = Hand()
    hand.runner.index = PrefixIndex(2)
    hand.put(Submit(id="a", prompt=(1, 2, 3, 4, 5, 6), max_tokens=1)).step().until_idle()
    hand.said.clear()
    hand.put(WatchBlocks(""), WatchBlocks("nobody's")).step()
    first = next(message.events for message in hand.said if isinstance(message, StepReport))
    assert [type(event) for event in first] == [BlocksCleared, BlocksCleared, BlockStored]
    assert hand.loop.has_work
    hand.until_idle()
    assert events_of(hand).count("BlockStored") == 3
