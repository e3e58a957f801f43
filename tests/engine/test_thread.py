"""Owner on a real thread, with a runner that stops where the test says."""

from __future__ import annotations

import asyncio
import atexit
import random
import threading
from typing import Any

import pytest

from tests.support.aio import in_loop
from tests.support.faults import Faults, FaultyRunner, Gate, builds, plain
from tests.support.owners import WAIT_S, settle
from treadle.core.messages import Stop, Submit
from treadle.engine import supervisor as supervisor_module
from treadle.engine.admission import AdmissionLimits
from treadle.engine.client import EngineClient
from treadle.engine.owner import OwnerLimits
from treadle.engine.status import status_of
from treadle.engine.thread import ThreadOwner
from treadle.engine.timeouts import Timeouts
from treadle.errors import EngineUnavailable, ModelError, RequestCancelled, StartFailed, TreadleError
from treadle.runner.base import RunnerBroken

LIMITS = OwnerLimits(max_running=3, prefill_tokens=64)


def engine(build: Any, patience: Timeouts | None = None) -> EngineClient:
    return EngineClient(lambda: ThreadOwner(build, LIMITS), AdmissionLimits(3, 8, 30.0), patience)


def reserve(client: EngineClient, rows: int = 1) -> Any:
    return client.reserve(rows=rows, prompt_tokens=2, completion_tokens=5, kind="chat", tag="t")


def ask(tokens: int = 5, prompt: tuple[int, ...] = (1, 2)) -> Submit:
    return Submit(id="", prompt=prompt, max_tokens=tokens)


async def tokens_of(generation: Any) -> list[int]:
    async with asyncio.timeout(WAIT_S):
        return [token async for delta in generation for token in delta.tokens]


async def in_thread(function: Any) -> None:
    await asyncio.wait_for(asyncio.to_thread(function), WAIT_S)


@in_loop
async def test_everything_of_the_runner_happens_on_one_thread_that_is_not_this_one():
    """A1, A6: built, warmed up, stepped, released, given jobs and closed."""
    made: list[FaultyRunner] = []

    def build(progress: Any) -> FaultyRunner:
        made.append(FaultyRunner())
        return made[-1]

    client = engine(build)
    await asyncio.wait_for(client.start(), WAIT_S)
    with reserve(client) as reservation:
        assert await tokens_of(reservation.submit([ask()])[0]) == [plain(ask(), i) for i in range(5)]
    assert await asyncio.wait_for(client.jobs.run("echo", a=1), WAIT_S) == {"a": 1}
    await asyncio.wait_for(client.stop(), WAIT_S)
    (runner,) = made
    assert {name for name, _ in runner.threads} == {"build", "warm_up", "execute", "finish", "release", "job", "close"}
    assert len({thread for _, thread in runner.threads}) == 1
    assert runner.threads[0][1] != threading.get_ident()


@in_loop
async def test_the_event_loop_answers_while_a_step_computes():
    """A2: admission, cancels, status and health of others at once."""
    gate = Gate()
    client = engine(builds(before_step=lambda step: gate.hold() if step == 1 else None))
    await asyncio.wait_for(client.start(), WAIT_S)
    with reserve(client) as reservation, reserve(client) as other:
        (generation,) = reservation.submit([ask()])
        await in_thread(gate.wait_reached)
        (second,) = other.submit([ask()])
        second.cancel()
        assert client.health().ready
        assert status_of(client)["admission"]["waiting"] == 2
        gate.open()
        assert len(await tokens_of(generation)) == 5
        with pytest.raises(RequestCancelled):
            await tokens_of(second)
    await asyncio.wait_for(client.idle(), WAIT_S)
    await client.stop()


@pytest.mark.parametrize("seed", range(6))
@in_loop
async def test_the_owner_does_one_thing_at_a_time_under_random_interleavings(seed):
    """A3: max_concurrent == 1, also across cancellations, and nothing is left."""
    chance = random.Random(seed)
    runner = FaultyRunner()
    client = engine(builds(runner))
    await asyncio.wait_for(client.start(), WAIT_S)

    async def pause() -> None:
        for _ in range(chance.randint(0, 20)):
            await asyncio.sleep(0)

    async def request(i: int) -> None:
        await pause()
        with reserve(client) as reservation:
            (generation,) = reservation.submit([ask(chance.randint(1, 8), (i,))])
            if chance.random() < 0.3:
                await pause()
                generation.cancel()
            await tokens_of(generation)

    async def job(i: int) -> None:
        await pause()
        assert await client.jobs.run("echo", i=i) == {"i": i}

    tasks = [asyncio.create_task(request(i)) for i in range(10)] + [asyncio.create_task(job(i)) for i in range(6)]
    for task in tasks:
        if chance.random() < 0.3:
            await pause()
            task.cancel()
            task.cancel()
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), WAIT_S)
    assert all(result is None or isinstance(result, asyncio.CancelledError | RequestCancelled) for result in results)
    await asyncio.wait_for(client.idle(), WAIT_S)
    assert client.jobs.pending == 0
    assert await asyncio.wait_for(client.jobs.run("echo"), WAIT_S) == {}
    assert (runner.max_concurrent, runner.rows) == (1, {})
    await client.stop()


@in_loop
async def test_a_cancelled_job_keeps_the_owner_until_it_has_unwound():
    """A3, A5: a request behind it starts only then."""
    gate, noticed = Gate(), threading.Event()

    def job(context: Any, args: Any) -> str:
        gate.hold()
        if context.cancelled():
            noticed.set()
        return "unwound"

    runner = FaultyRunner(Faults(jobs={"slow": job}))
    client = engine(builds(runner))
    await asyncio.wait_for(client.start(), WAIT_S)
    caller = asyncio.create_task(client.jobs.run("slow"))
    await in_thread(gate.wait_reached)
    caller.cancel()
    await settle()
    caller.cancel()
    with reserve(client) as reservation:
        (generation,) = reservation.submit([ask()])
        await settle()
        assert not caller.done()
        assert runner.steps == 0
        gate.open()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(caller, WAIT_S)
        assert noticed.is_set()
        assert len(await tokens_of(generation)) == 5
    await client.stop()


@in_loop
async def test_a_start_that_fails_is_told_and_the_thread_ends():
    """C1."""
    client = engine(builds(warm_up=ModelError("warm-up failed")))
    with pytest.raises(StartFailed, match="warm-up failed"):
        await asyncio.wait_for(client.start(), WAIT_S)
    await client.stop()


@in_loop
async def test_a_broken_runner_is_replaced_by_a_new_one_on_a_new_thread():
    """B7."""
    made: list[FaultyRunner] = []

    def build(progress: Any) -> FaultyRunner:
        made.append(FaultyRunner(Faults(always=None if made else RunnerBroken("lost"))))
        return made[-1]

    client = engine(build)
    await asyncio.wait_for(client.start(), WAIT_S)
    with reserve(client) as reservation:
        assert len(await tokens_of(reservation.submit([ask()])[0])) == 5
    assert client.supervisor.restarts == 1
    with reserve(client) as reservation:
        assert len(await tokens_of(reservation.submit([ask()])[0])) == 5
    assert [runner.closed for runner in made] == [1, 0]
    await client.stop()


@in_loop
async def test_a_hung_thread_is_the_end_and_everyone_is_answered(monkeypatch):
    """C4, B7: it can't be killed; health says so."""
    monkeypatch.setattr(supervisor_module, "KILL_GRACE_S", 0.05)
    gate = Gate()
    client = engine(builds(before_step=lambda step: gate.hold()), Timeouts(hang_after_s=0.1))
    await asyncio.wait_for(client.start(), WAIT_S)
    with reserve(client, 2) as reservation:
        generations = reservation.submit([ask(), ask()])
        for generation in generations:
            with pytest.raises(TreadleError, match="hung"):
                await tokens_of(generation)
    assert "can't be ended" in await asyncio.wait_for(client.supervisor.failed(), WAIT_S)
    assert (client.health().ready, client.health().state) == (False, "failed")
    assert client.busy == 0
    with pytest.raises(EngineUnavailable):
        await client.jobs.run("echo")
    gate.open()
    await asyncio.wait_for(client.stop(), WAIT_S)


def test_an_event_loop_that_closed_before_the_hand_over_costs_the_owner_nothing():
    """Design, Tests: the thread goes on to its end and closes its runner."""
    gate = Gate()
    runner = FaultyRunner(Faults(before_step=lambda step: gate.hold()))
    owner = ThreadOwner(builds(runner), LIMITS)

    async def begin() -> None:
        await owner.start(lambda message: None, lambda how: None)
        owner.send(Submit(id="a", prompt=(1,), max_tokens=1))
        await in_thread(gate.wait_reached)

    asyncio.run(begin())
    owner.send(Stop())
    gate.open()
    owner._thread.join(WAIT_S)
    assert not owner._thread.is_alive()
    assert runner.closed == 1


@in_loop
async def test_a_message_after_the_end_is_harmless():
    exits: list[str] = []
    owner = ThreadOwner(builds(FaultyRunner()), LIMITS)
    await owner.start(lambda message: None, exits.append)
    owner.send(Stop())
    await asyncio.wait_for(owner.ended(), WAIT_S)
    owner.send(Submit(id="a", prompt=(1,), max_tokens=1))
    assert not owner.kill()
    await settle()
    assert exits == ["stopped"]


@in_loop
async def test_a_thread_that_ends_by_what_nobody_catches_is_still_an_end():
    """B7: SystemExit out of a step."""
    runner = FaultyRunner(Faults(always=SystemExit(3)))
    exits: list[str] = []
    owner = ThreadOwner(builds(runner), LIMITS)
    await owner.start(lambda message: None, exits.append)
    owner.send(Submit(id="a", prompt=(1,), max_tokens=1))
    await asyncio.wait_for(owner.ended(), WAIT_S)
    assert (exits, runner.closed) == (["failed"], 1)


@in_loop
async def test_a_program_that_ends_waits_for_an_engine_that_it_never_stopped(monkeypatch):
    """C2: what the interpreter is left to call ends the owner's thread; one that ended has nothing left there."""
    left: list[Any] = []
    monkeypatch.setattr(atexit, "register", left.append)
    monkeypatch.setattr(atexit, "unregister", left.remove)
    owner = ThreadOwner(builds(), LIMITS)
    await owner.start(lambda message: None, lambda how: None)
    (at_exit,) = left
    await in_thread(at_exit)
    assert not owner._thread.is_alive()
    assert left == []
