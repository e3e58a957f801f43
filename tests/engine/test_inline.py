"""The owner without a thread."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest

from tests.support.aio import in_loop
from tests.support.faults import Faults, FaultyRunner, builds, plain
from tests.support.owners import WAIT_S, settle
from treadle.core.messages import Ping, Pong, Submit
from treadle.engine.admission import AdmissionLimits
from treadle.engine.client import EngineClient
from treadle.engine.inline import InlineOwner
from treadle.engine.owner import OwnerLimits
from treadle.errors import ModelError, Quarantined, ServerStopping, StartFailed
from treadle.runner.base import RunnerBroken

LIMITS = OwnerLimits(max_running=2, prefill_tokens=64)


def engine(build: Any, *, pump: bool = False) -> tuple[EngineClient, InlineOwner]:
    owner = InlineOwner(build, LIMITS, pump=pump)
    return EngineClient(lambda: owner, AdmissionLimits(2, 2, 5.0)), owner


def reserve(client: EngineClient) -> Any:
    return client.reserve(rows=1, prompt_tokens=2, completion_tokens=3, kind="chat", tag="t")


REQUEST = Submit(id="", prompt=(1, 2), max_tokens=3)


@pytest.mark.parametrize("pump", [False, True])
@in_loop
async def test_it_generates_by_steps_or_by_itself(pump):
    client, owner = engine(builds(FaultyRunner()), pump=pump)
    await asyncio.wait_for(client.start(), WAIT_S)
    assert client.supervisor.pid == os.getpid()
    for _ in range(2):
        with reserve(client) as reservation:
            (generation,) = reservation.submit([REQUEST])
            for _ in range(0 if pump else 5):
                owner.run_once()
            tokens = [token async for delta in generation for token in delta.tokens]
            assert tokens == [plain(REQUEST, i) for i in range(3)]
    assert (owner.is_suspended(), owner.in_steps()) == (False, {2})
    await client.stop()
    assert client.busy == 0
    owner.run_once()


@in_loop
async def test_a_start_that_fails_ends_it():
    """C1."""
    client, owner = engine(builds(construct=ModelError("no model")))
    with pytest.raises(StartFailed, match="no model"):
        await asyncio.wait_for(client.start(), WAIT_S)
    owner.run_once()
    assert owner.kill()
    await client.stop()


@in_loop
async def test_a_broken_runner_is_told_and_closed():
    """B7: the one request that was there each time is at fault."""
    runner = FaultyRunner(Faults(always=RunnerBroken("lost")))
    client = EngineClient(lambda: InlineOwner(builds(runner), LIMITS, pump=True), AdmissionLimits(2, 2, 5.0))
    await asyncio.wait_for(client.start(), WAIT_S)
    with reserve(client) as reservation:
        (generation,) = reservation.submit([REQUEST])
        with pytest.raises(Quarantined):
            [delta async for delta in generation]
    assert runner.closed == 2
    await client.stop()


@in_loop
async def test_a_ping_is_answered_at_once_whoever_steps_it():
    said: list[Any] = []
    owner = InlineOwner(builds(FaultyRunner()), LIMITS)
    await owner.start(said.append, lambda how: None)
    owner.send(Ping())
    assert said[-1] == Pong()
    owner.kill()


@in_loop
async def test_a_killed_one_runs_no_more_and_ends_once():
    runner = FaultyRunner()
    exits: list[str] = []
    owner = InlineOwner(builds(runner), LIMITS)
    await owner.start(lambda message: None, exits.append)
    owner.send(REQUEST)
    assert owner.kill()
    assert owner.kill()
    owner.run_once()
    await asyncio.wait_for(owner.ended(), WAIT_S)
    assert (exits, runner.steps, runner.closed) == (["killed"], 0, 1)


@in_loop
async def test_a_stop_is_taken_at_once_though_nobody_steps():
    """C3."""
    client, _ = engine(builds(FaultyRunner()))
    await asyncio.wait_for(client.start(), WAIT_S)
    with reserve(client) as reservation:
        (generation,) = reservation.submit([REQUEST])
        reading = asyncio.ensure_future(generation.admitted())
        await settle()
        await asyncio.wait_for(client.stop(), WAIT_S)
        with pytest.raises(ServerStopping):
            await reading
