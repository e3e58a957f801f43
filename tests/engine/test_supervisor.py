"""Supervisor over scripted owners, on a clock that the test moves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.aio import in_loop
from tests.support.owners import CAN, WAIT_S, Clock, FakeOwner, Yard, settle
from treadle.core.capabilities import Capabilities
from treadle.core.messages import Failed, FromOwner, Loading, Ready, StepReport, Stop
from treadle.engine import deaths, heartbeat
from treadle.engine import supervisor as module
from treadle.engine.deaths import Cause, Death
from treadle.engine.supervisor import EngineState, Supervisor
from treadle.engine.timeouts import Timeouts
from treadle.errors import EngineDied, EngineUnavailable, ModelError, ServerStopping, StartFailed, TreadleError

HANG_S = 0.04


class Ear:
    """Recording receiver of engine events; `owed` is the result of `work_since`."""

    def __init__(self) -> None:
        self.owed: float | None = None
        self.messages: list[FromOwner] = []
        self.ready: list[Capabilities] = []
        self.deaths: list[Death] = []
        self.explains = 0
        self.away: list[TreadleError] = []
        self.lost: list[tuple[TreadleError, TreadleError]] = []
        self.fault: Exception | None = None

    def on_message(self, message: FromOwner) -> None:
        if self.fault is not None:
            raise self.fault
        self.messages.append(message)

    def on_ready(self, capabilities: Capabilities) -> None:
        self.ready.append(capabilities)

    def on_death(self, death: Death) -> int:
        self.deaths.append(death)
        return self.explains

    def on_unavailable(self, waiting: EngineUnavailable) -> None:
        self.away.append(waiting)

    def on_lost(self, running: TreadleError, waiting: TreadleError) -> None:
        self.lost.append((running, waiting))

    def work_since(self) -> float | None:
        return self.owed


class Scene:
    def __init__(self, *, clock: Callable[[], float] | None = None, **owner: Any) -> None:
        self.clock, self.ear = Clock(), Ear()
        self.yard = Yard(lambda: FakeOwner(**owner))
        self.supervisor = Supervisor(self.yard, self.ear, Timeouts(HANG_S, 100.0), clock or self.clock)

    async def begin(self, *, ready: bool = True) -> FakeOwner:
        self.supervisor.begin()
        owner: FakeOwner = await self.yard.next()
        if ready:
            owner.ready()
        return owner

    async def reaches(self, state: EngineState) -> None:
        async with asyncio.timeout(WAIT_S):
            while self.supervisor.state is not state:
                await self.supervisor._next_change()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(deaths, "BACKOFF_S", (0.0, 0.001, 0.002))
    monkeypatch.setattr(module, "KILL_GRACE_S", 0.05)


# Starting ----------------------------------------------------------------------------------------------------------


@in_loop
async def test_a_start_returns_when_the_owner_is_ready():
    """C1: not before."""
    scene = Scene()
    stages: list[str] = []
    scene.supervisor.on_stage = stages.append
    start = asyncio.create_task(scene.supervisor.start())
    owner = await scene.yard.next()
    owner.say(Loading(stage="reading weights"))
    await settle()
    assert not start.done()
    assert (scene.supervisor.state, scene.supervisor.stage) == (EngineState.STARTING, "reading weights")
    owner.ready(load_s=2.5)
    await asyncio.wait_for(start, WAIT_S)
    assert (stages, scene.supervisor.load_s, scene.ear.ready) == (["reading weights"], 2.5, [CAN])
    assert scene.supervisor.pid == owner.pid
    await scene.supervisor.stop()


@in_loop
async def test_a_first_start_that_fails_is_final_with_the_owners_reason(caplog):
    """C1: one clear message, no second try, and no line of its own: whoever started it reports."""
    scene = Scene()
    start = asyncio.create_task(scene.supervisor.start())
    owner = await scene.yard.next()
    owner.say(Failed(code="start_failed", message="no such model"))
    owner.end()
    with pytest.raises(StartFailed, match=r"^no such model$"):
        await asyncio.wait_for(start, WAIT_S)
    assert await asyncio.wait_for(scene.supervisor.failed(), WAIT_S) == "no such model"
    assert len(scene.yard.launched) == 1
    assert not caplog.messages
    await scene.supervisor.stop()
    assert scene.supervisor.state is EngineState.FAILED


@in_loop
async def test_an_owner_that_ends_without_a_word_before_it_is_ready_is_a_failed_start():
    """C1."""
    scene = Scene()
    owner = await scene.begin(ready=False)
    owner.end("killed by SIGSEGV")
    with pytest.raises(StartFailed, match="the engine process ended: killed by SIGSEGV"):
        await asyncio.wait_for(scene.supervisor.ready(), WAIT_S)


@in_loop
async def test_an_owner_that_cannot_be_launched_is_a_failed_start():
    """C1: nobody waits for a start that will not come."""
    scene = Scene(start_error=OSError("no more processes"))
    with pytest.raises(StartFailed, match="could not be launched: no more processes"):
        await asyncio.wait_for(scene.supervisor.start(), WAIT_S)
    await asyncio.wait_for(scene.supervisor.stop(), WAIT_S)


@in_loop
async def test_a_launch_that_raises_is_a_failed_start():
    """C1: such as a model folder that has gone."""

    def launch() -> Any:
        raise ModelError("the folder is gone")

    supervisor = Supervisor(launch, Ear(), Timeouts(), Clock())
    with pytest.raises(StartFailed, match="the folder is gone"):
        await asyncio.wait_for(supervisor.start(), WAIT_S)
    await asyncio.wait_for(supervisor.stop(), WAIT_S)
    assert supervisor.pid is None


@in_loop
async def test_an_owner_that_is_not_ready_in_time_is_killed():
    """C1, C4."""
    scene = Scene()
    scene.supervisor._timeouts = Timeouts(HANG_S, 5.0)
    owner = await scene.begin(ready=False)
    owner.say(Loading(stage="warming up"))
    scene.clock.now += 5.1
    with pytest.raises(StartFailed, match=r"not ready within 5 s \(warming up\)"):
        await asyncio.wait_for(scene.supervisor.ready(), WAIT_S)
    assert owner.kills == 1


@in_loop
async def test_a_ready_that_comes_while_its_owner_is_put_down_counts_for_nothing():
    """C1: the start has failed; nobody is told otherwise for a moment."""

    class Late(FakeOwner):
        def kill(self) -> bool:
            self.ready()
            return super().kill()

    scene = Scene()
    scene.yard.make = Late
    await scene.begin(ready=False)
    scene.clock.now += 100.1
    with pytest.raises(StartFailed, match="not ready within 100 s"):
        await asyncio.wait_for(scene.supervisor.ready(), WAIT_S)
    assert scene.ear.ready == []
    await scene.supervisor.stop()


@in_loop
async def test_a_slow_start_within_its_bound_is_no_hang():
    """C4: loading has its own bound."""
    scene = Scene()
    owner = await scene.begin(ready=False)
    scene.ear.owed = scene.clock.now
    scene.clock.now += 99
    scene.supervisor._changed.set()
    await settle()
    assert owner.kills == 0
    await scene.supervisor.stop()


# Restarting --------------------------------------------------------------------------------------------------------


@in_loop
async def test_an_owner_that_dies_is_replaced():
    """B7, C4."""
    scene = Scene()
    owner = await scene.begin()
    await settle()
    owner.end("killed by SIGABRT")
    await scene.reaches(EngineState.RESTARTING)
    second = await scene.yard.next()
    assert scene.ear.deaths == [Death(Cause.CRASH, "the engine process ended: killed by SIGABRT")]
    assert all("killed by SIGABRT" in waiting.message for waiting in scene.ear.away)
    assert scene.supervisor.outage.left_s() == 1.0
    assert scene.ear.lost == [], "what ran goes on with the next owner"
    assert "killed by SIGABRT" in scene.supervisor.reason
    second.ready()
    assert (scene.supervisor.state, scene.supervisor.reason, scene.supervisor.restarts) == (EngineState.READY, "", 1)
    await scene.supervisor.stop()


@in_loop
async def test_a_death_is_noticed_in_the_turn_in_which_it_is_told():
    """B7: no wake-up is lost between two looks, however far they are apart."""
    scene = Scene()
    scene.supervisor._timeouts = Timeouts(1e6, 1e6)
    for _ in range(20):
        owner = await scene.begin() if not scene.yard.launched else await scene.yard.next()
        owner.ready()
        before = len(scene.ear.deaths)
        scene.clock.now += deaths.WINDOW_S
        scene.supervisor._changed.set()
        await asyncio.sleep(0)  # the supervisor is between its look and its wait
        owner.end()
        await settle(10)
        assert len(scene.ear.deaths) == before + 1
    await scene.supervisor.stop()


@in_loop
async def test_failed_is_the_end_of_taking_work_though_the_owner_is_still_unwinding():
    """C4: not ready between the last word and the exit."""
    scene = Scene()
    owner = await scene.begin()
    owner.say(Failed(code="engine_died", message="the device is lost"))
    assert scene.supervisor.state is EngineState.RESTARTING
    assert scene.ear.deaths == [Death(Cause.CRASH, "the server's log says why")]
    assert scene.supervisor.reason == "the device is lost", "for operators"
    await settle()
    assert len(scene.yard.launched) == 1, "two owners at a time"
    owner.end()
    (await scene.yard.next()).ready()
    await scene.supervisor.stop()


@in_loop
async def test_an_owner_that_failed_and_does_not_end_is_killed():
    """B7: a runner that hangs in its close."""
    scene = Scene()
    owner = await scene.begin()
    owner.say(Failed(code="engine_died", message="lost"))
    await settle()
    assert owner.kills == 0
    scene.clock.now += module.KILL_GRACE_S * 2
    (await scene.yard.next()).ready()
    assert owner.kills == 1
    await scene.supervisor.stop()


@in_loop
async def test_three_failed_restarts_in_a_row_are_the_end(caplog):
    """B7: it says that it is dead."""
    scene = Scene()
    (await scene.begin()).end()
    for i in range(module.MAX_FAILED_STARTS):
        owner = await scene.yard.next()
        owner.say(Failed(code="start_failed", message=f"reason {i}"))
        owner.end()
    assert await asyncio.wait_for(scene.supervisor.failed(), WAIT_S) == "reason 2"
    running, waiting = scene.ear.lost[-1]
    assert isinstance(running, EngineDied)
    assert "for good" in waiting.message
    with pytest.raises(StartFailed, match="reason 2"):
        await scene.supervisor.ready()
    told = [record.getMessage() for record in caplog.records]
    assert told[1] == "the engine did not start (reason 0); starting it again in 0.0 s (restart 2)"
    assert told[-1] == "the engine has failed for good: reason 2"


@in_loop
async def test_a_start_that_succeeds_forgets_the_failed_ones_before():
    scene = Scene()
    (await scene.begin()).end()
    for _ in range(3):
        for _ in range(2):
            (await scene.yard.next()).end()
        owner = await scene.yard.next()
        owner.ready()
        await settle()
        owner.end()
    await scene.yard.next()
    assert scene.supervisor.state is EngineState.RESTARTING
    await scene.supervisor.stop()


@in_loop
async def test_quick_deaths_are_backed_off_and_a_settled_life_starts_afresh(monkeypatch):
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    scene = Scene()
    monkeypatch.setattr(asyncio, "sleep", sleep)
    owner = await scene.begin()
    for lived_s in (0.0, 0.0, 0.0, deaths.STABLE_S + 1, 0.0):
        scene.clock.now += lived_s
        owner.end()
        owner = await scene.yard.next()
        owner.ready()
    monkeypatch.undo()
    assert waits == [0.0, 0.001, 0.002, 0.0, 0.0]
    await scene.supervisor.stop()


# Hanging -----------------------------------------------------------------------------------------------------------


@in_loop
async def test_a_hung_owner_is_killed_answered_for_and_replaced():
    """C4: no step while work waits."""
    scene = Scene()
    owner = await scene.begin()
    scene.ear.owed = scene.clock.now
    scene.clock.now += HANG_S * 2
    second = await scene.yard.next()
    assert owner.kills == 1
    assert scene.ear.deaths == [Death(Cause.HANG, "hung: no step for 0.1 s while work waits")]
    scene.ear.owed = None
    second.ready()
    await scene.supervisor.stop()


@in_loop
async def test_an_owner_that_was_stopped_from_outside_hangs_by_nobodys_fault():
    scene = Scene()
    owner = await scene.begin()
    owner.stands_still = True
    scene.ear.owed = scene.clock.now
    scene.clock.now += HANG_S * 2
    second = await scene.yard.next()
    (death,) = scene.ear.deaths
    assert death.cause is Cause.KILLED
    assert "stopped from outside (SIGSTOP, a debugger)" in death.reason
    scene.ear.owed = None
    second.ready()
    await scene.supervisor.stop()


@in_loop
async def test_idle_is_not_hung_and_neither_is_a_step_just_told():
    """C4."""
    scene = Scene()
    owner = await scene.begin()
    scene.clock.now += 1e6
    scene.supervisor._changed.set()
    await settle()
    scene.ear.owed = scene.clock.now - 1e5
    owner.say(StepReport(step=1))
    scene.supervisor._changed.set()
    await settle()
    assert (owner.kills, scene.ear.messages) == (0, [StepReport(step=1)])
    await scene.supervisor.stop()


@in_loop
async def test_an_owner_is_not_hung_because_the_watcher_stood_still(monkeypatch):
    """C4: after SIGSTOP, or in a container that was frozen, nothing was heard as nobody listened."""
    monkeypatch.setattr(heartbeat, "SUSPENDED_S", HANG_S / 2)
    scene = Scene(clock=time.monotonic)
    owner = await scene.begin()
    scene.ear.owed = time.monotonic()
    await settle()
    time.sleep(HANG_S * 4)  # the event loop stands still
    await settle()
    assert owner.kills == 0
    second = await scene.yard.next()
    assert owner.kills == 1, "it stays silent though it is watched again"
    scene.ear.owed = None
    second.ready()
    await scene.supervisor.stop()


@in_loop
async def test_a_hung_thread_is_the_end_and_later_words_change_nothing():
    """C4, A1: a thread can't be killed, and a second owner beside it must not be."""
    scene = Scene(killable=False, thread=True, polite=False)
    owner = await scene.begin()
    scene.ear.owed = scene.clock.now
    scene.clock.now += HANG_S * 2
    await scene.reaches(EngineState.RESTARTING)
    assert "runs on a thread, which can't be ended" in await asyncio.wait_for(scene.supervisor.failed(), WAIT_S)
    assert isinstance(scene.ear.lost[0][0], EngineDied)
    owner.ready()
    assert scene.supervisor.state is EngineState.FAILED
    assert len(scene.yard.launched) == 1
    await scene.supervisor.stop(0.01)


@in_loop
async def test_a_thread_that_unwinds_after_all_is_replaced():
    scene = Scene(thread=True)
    await scene.begin()
    scene.ear.owed = scene.clock.now
    scene.clock.now += HANG_S * 2
    second = await scene.yard.next()
    scene.ear.owed = None
    second.ready()
    assert scene.supervisor.state is EngineState.READY
    await scene.supervisor.stop()


@in_loop
async def test_a_process_that_survives_being_killed_is_the_end():
    """Nothing waits without a bound (D2)."""
    scene = Scene(killable=False, polite=False)
    await scene.begin()
    scene.ear.owed = scene.clock.now
    scene.clock.now += HANG_S * 2
    assert "its process does not end" in await asyncio.wait_for(scene.supervisor.failed(), WAIT_S)
    await asyncio.wait_for(scene.supervisor.stop(0.01), WAIT_S)


@in_loop
async def test_an_owner_whose_words_cannot_be_taken_in_is_replaced():
    """B7: the books of this side may be wrong now, so everyone is answered."""
    scene = Scene()
    owner = await scene.begin()
    scene.ear.fault = KeyError("books")
    owner.say(StepReport(step=1))
    second = await scene.yard.next()
    assert owner.kills == 1
    assert scene.ear.deaths[0].reason == "the server's log says why"
    assert "could not be handled (KeyError: 'books')" in scene.supervisor.reason
    second.ready()
    await scene.supervisor.stop()


# Stopping ----------------------------------------------------------------------------------------------------------


@in_loop
async def test_a_stop_answers_everyone_at_once_and_ends_the_owner():
    """C3."""
    scene = Scene()
    owner = await scene.begin()
    await asyncio.wait_for(scene.supervisor.stop(), WAIT_S)
    assert [type(error) for error in scene.ear.lost[0]] == [ServerStopping, ServerStopping]
    assert (owner.sent, owner.kills) == ([Stop()], 0)
    assert scene.supervisor.state is EngineState.STOPPED


@in_loop
async def test_stops_may_be_repeated_and_overlap():
    """C3."""
    scene = Scene(polite=False)
    owner = await scene.begin()
    stops = [asyncio.create_task(scene.supervisor.stop(5.0)) for _ in range(3)]
    await settle()
    assert not any(stop.done() for stop in stops)
    owner.end("stopped")
    await asyncio.wait_for(asyncio.gather(*stops), WAIT_S)
    await scene.supervisor.stop()
    assert scene.supervisor.state is EngineState.STOPPED
    assert len(scene.ear.lost) == 1


@in_loop
async def test_a_stop_that_is_cancelled_can_be_repeated():
    scene = Scene(polite=False)
    owner = await scene.begin()
    stop = asyncio.create_task(scene.supervisor.stop(5.0))
    await settle()
    stop.cancel()
    await asyncio.wait([stop])
    assert scene.supervisor.state is EngineState.STOPPING
    owner.end("stopped")
    await asyncio.wait_for(scene.supervisor.stop(), WAIT_S)
    assert scene.supervisor.state is EngineState.STOPPED


@in_loop
async def test_an_owner_that_ignores_the_stop_is_killed():
    """C3."""
    scene = Scene(polite=False)
    owner = await scene.begin()
    await asyncio.wait_for(scene.supervisor.stop(0.01), WAIT_S)
    assert owner.kills == 1


@in_loop
async def test_a_stop_before_the_start_is_harmless():
    scene = Scene()
    await scene.supervisor.stop()
    scene.supervisor.kill()
    scene.supervisor.send(Stop())
    assert scene.supervisor.state is EngineState.STOPPED


@in_loop
async def test_a_stop_wakes_who_waits_for_the_start():
    """C3."""
    scene = Scene()
    start = asyncio.create_task(scene.supervisor.start())
    await scene.yard.next()
    await scene.supervisor.stop()
    with pytest.raises(StartFailed, match="stopped before it was ready"):
        await asyncio.wait_for(start, WAIT_S)


@in_loop
async def test_a_stop_while_an_owner_is_being_spawned_leaves_none():
    """C3: it can't be sent to yet, so it is not waited for."""
    scene = Scene(stuck=True)
    owner = await scene.begin(ready=False)
    await asyncio.wait_for(scene.supervisor.stop(60.0), WAIT_S)
    assert owner.cancelled
    assert owner.sent == []


@in_loop
async def test_a_stop_during_the_back_off_starts_no_other_owner(monkeypatch):
    """C3."""
    monkeypatch.setattr(deaths, "BACKOFF_S", (60.0,))
    scene = Scene()
    (await scene.begin()).end()
    await scene.reaches(EngineState.RESTARTING)
    await settle()
    await asyncio.wait_for(scene.supervisor.stop(60.0), WAIT_S)
    assert (len(scene.yard.launched), scene.supervisor.state) == (1, EngineState.STOPPED)


@in_loop
async def test_a_back_off_that_is_over_while_the_engine_stops_starts_no_other_owner():
    """C3: else that owner would live on with nobody to end it."""
    scene = Scene(polite=False)
    owner = await scene.begin()
    await settle()
    owner.end()
    for _ in range(200):
        if scene.supervisor.restarts:
            break
        await asyncio.sleep(0)
    assert len(scene.yard.launched) == 1
    scene.supervisor._set_state(EngineState.STOPPING)
    assert scene.supervisor._task is not None
    await asyncio.wait_for(scene.supervisor._task, WAIT_S)
    assert len(scene.yard.launched) == 1


@in_loop
async def test_an_owner_that_becomes_ready_or_fails_while_it_is_stopped_stays_stopped():
    """C4."""
    scene = Scene(polite=False)
    owner = await scene.begin(ready=False)
    stop = asyncio.create_task(scene.supervisor.stop(5.0))
    await settle()
    owner.ready()
    owner.say(Failed(code="x", message="y"))
    assert scene.supervisor.state is EngineState.STOPPING
    scene.clock.now += 1e6
    scene.supervisor._changed.set()
    await settle()
    assert owner.kills == 0, "only the stop's own grace counts now"
    owner.end()
    await asyncio.wait_for(stop, WAIT_S)
    owner.say(Ready(capabilities=CAN, pid=1))
    assert scene.supervisor.state is EngineState.STOPPED
    assert scene.ear.ready == []


@in_loop
async def test_kill_ends_the_owner_at_once():
    """C3: the second signal."""
    scene = Scene()
    owner = await scene.begin()
    scene.supervisor.kill()
    assert owner.kills == 1
    await scene.supervisor.stop()


# Idle hangs --------------------------------------------------------------------------------------------------------


@in_loop
async def test_an_idle_owner_that_answers_no_ping_is_replaced():
    """D21, R3: within `hang_after_s` of its last word, though nobody asks it for anything."""
    scene = Scene(deaf=True)
    owner = await scene.begin()
    scene.clock.now += HANG_S / 2
    await until(lambda: owner.pings == 1)
    scene.clock.now += HANG_S * 0.8
    second = await scene.yard.next()
    assert scene.ear.deaths == [Death(Cause.HANG, "hung: no word for 0.1 s, idle and asked for one")]
    assert owner.kills == 1
    second.ready()
    await scene.supervisor.stop()


@in_loop
async def test_an_idle_owner_is_asked_only_when_nothing_was_heard():
    scene = Scene()
    owner = await scene.begin()
    for _ in range(20):
        scene.clock.now += HANG_S / 8
        owner.say(StepReport(step=1))
        scene.supervisor._changed.set()
        await settle()
    assert owner.pings == 0
    scene.ear.owed = scene.clock.now
    scene.clock.now += HANG_S / 2
    scene.supervisor._changed.set()
    await settle()
    assert owner.pings == 0, "one that works shows it by its steps"
    scene.ear.owed = None
    await until(lambda: owner.pings == 1)
    scene.clock.now += HANG_S * 10
    await until(lambda: owner.pings > 1)
    assert owner.kills == 0
    await scene.supervisor.stop()


async def until(found: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not found():
            await asyncio.sleep(0)


# Reloads -----------------------------------------------------------------------------------------------------------


@in_loop
async def test_a_reload_that_hangs_is_given_up_by_the_load_that_was_measured():
    """D13: not by the bound of the first start, which may be half an hour."""
    scene = Scene()
    scene.supervisor._timeouts = Timeouts(HANG_S, 1800.0)
    owner = await scene.begin(ready=False)
    owner.ready(load_s=20.0)
    owner.end()
    second = await scene.yard.next()
    for stage in ("reading", "warming up"):
        scene.clock.now += 99.0
        second.say(Loading(stage=stage))
        await settle()
    assert second.kills == 0, "each stage counts anew"
    scene.clock.now += 101.0
    third = await scene.yard.next()
    assert second.kills == 1
    assert scene.supervisor.reason == "not ready within 100 s (warming up)"
    third.ready()
    await scene.supervisor.stop()


@pytest.mark.parametrize(("measured_s", "bound_s"), [(None, 1800.0), (1.0, 60.0), (20.0, 100.0), (1e6, 1800.0)])
def test_how_long_a_load_may_go_on_without_another_stage(measured_s: float | None, bound_s: float):
    assert Timeouts().load_timeout_s(measured_s) == bound_s


# Retry-After -------------------------------------------------------------------------------------------------------


@in_loop
async def test_the_end_of_an_outage_is_back_off_and_load_and_what_is_late():
    """D11."""
    scene = Scene()
    owner = await scene.begin(ready=False)
    assert scene.supervisor.outage.left_s() == 2.0
    scene.clock.now += 12.0
    assert scene.supervisor.outage.left_s() == 10.0, "a first load: as long again as it is late"
    owner.ready(load_s=7.0)
    assert scene.supervisor.load_s == 12.0, "with what the process took to begin"
    for _ in range(2):
        owner.end()
        owner = await scene.yard.next()
        owner.ready(load_s=7.0)
    owner.end()
    await settle()
    assert scene.supervisor.outage.left_s() == pytest.approx(deaths.BACKOFF_S[2] + 7.0)
    scene.clock.now += 1e6
    assert scene.supervisor.outage.left_s() == 30.0
    await scene.supervisor.stop()


# The end of a crash loop -------------------------------------------------------------------------------------------


@in_loop
async def test_a_crash_loop_that_nobody_explains_ends_the_engine(monkeypatch):
    """D4: whoever supervises the server learns of it."""
    monkeypatch.setattr(deaths, "BACKOFF_S", (0.0,))
    scene = Scene()
    owner = await scene.begin()
    for _ in range(deaths.MAX_DEATHS - 1):
        owner.end()
        owner = await scene.yard.next()
        owner.ready()
    owner.end()
    reason = await asyncio.wait_for(scene.supervisor.failed(), WAIT_S)
    assert "died 10 times within 5 minutes" in reason
    assert "for good" in scene.ear.lost[-1][1].message
    await scene.supervisor.stop()


@in_loop
async def test_deaths_with_a_culprit_are_no_crash_loop_and_are_not_backed_off(monkeypatch):
    """D4."""
    monkeypatch.setattr(deaths, "BACKOFF_S", (0.0, 1e6))
    scene = Scene()
    scene.ear.explains = 1
    owner = await scene.begin()
    for _ in range(2 * deaths.MAX_DEATHS):
        owner.end()
        owner = await scene.yard.next()
        owner.ready()
    assert scene.supervisor.state is EngineState.READY
    assert scene.supervisor.deaths.explained == 2 * deaths.MAX_DEATHS
    await scene.supervisor.stop()


# Words that come too late ------------------------------------------------------------------------------------------


@in_loop
async def test_what_an_owner_says_after_it_was_given_up_is_dropped():
    """Its rows are replayed from what was heard before: a token heard later would come twice."""
    scene = Scene()
    owner = await scene.begin()
    owner.say(StepReport(step=1), Failed(code="engine_died", message="lost"), StepReport(step=2))
    assert scene.ear.messages == [StepReport(step=1)]
    await scene.supervisor.stop()


@pytest.mark.parametrize(
    ("how", "cause"),
    [("killed by SIGKILL", Cause.KILLED), ("killed by SIGSEGV", Cause.CRASH), ("exit code 3", Cause.CRASH)],
)
@in_loop
async def test_who_ended_it_is_told(how: str, cause: Cause):
    scene = Scene()
    (await scene.begin()).end(how)
    (await scene.yard.next()).ready()
    assert scene.ear.deaths == [Death(cause, f"the engine process ended: {how}")]
    await scene.supervisor.stop()


@in_loop
async def test_a_mistake_in_supervision_ends_the_engine_and_is_told(monkeypatch):
    scene = Scene()
    owner = await scene.begin()
    owner.ready()

    def broken(death: Death) -> int:
        raise KeyError("books")

    monkeypatch.setattr(scene.ear, "on_death", broken)
    owner.end()
    assert "KeyError: 'books'" in await asyncio.wait_for(scene.supervisor.failed(), 5)
    assert scene.supervisor.public_reason == "the server's log says why"
    await scene.supervisor.stop()
