"""Requests with more sequences than places: each further one takes the place of one that has ended."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.support.aio import in_loop
from tests.support.faults import FaultyRunner, builds
from tests.support.owners import WAIT_S
from treadle.core.messages import CancelReason, Pooling, Submit
from treadle.engine.admission import AdmissionLimits
from treadle.engine.client import EngineClient
from treadle.engine.inline import InlineOwner
from treadle.engine.owner import OwnerLimits
from treadle.engine.quarantine import Quarantine
from treadle.errors import EngineUnavailable, InvalidRequest, Quarantined, RequestCancelled, ServerStopping

POOLED = Submit(id="", prompt=(1, 2), max_tokens=0, pooling=Pooling.LAST)


async def started(running: int = 2) -> tuple[EngineClient, InlineOwner]:
    owner = InlineOwner(builds(FaultyRunner()), OwnerLimits(max_running=running, prefill_tokens=64))
    client = EngineClient(lambda: owner, AdmissionLimits(running, 2, 0.05))
    await asyncio.wait_for(client.start(), WAIT_S)
    return client, owner


def reserve(client: EngineClient, rows: int = 1, **more: Any) -> Any:
    return client.reserve(rows=rows, prompt_tokens=2 * rows, completion_tokens=0, kind="embedding", tag="t", **more)


async def vector(owner: InlineOwner, generation: Any) -> bytes:
    for _ in range(3):
        owner.run_once()
    deltas = [delta async for delta in generation]
    found: bytes = deltas[-1].finish.vector
    return found


@in_loop
async def test_upcoming_sequences_take_the_places_of_those_that_ended():
    client, owner = await started()
    with reserve(client, 1, prompts=3, upcoming=2) as reservation:
        (generation,) = reservation.submit([POOLED])
        first = await vector(owner, generation)
        assert first
        assert client.gate.rows == 1
        second = reservation.submit_next(POOLED)
        assert (second.request.group, second.request.max_wait_s) != (generation.request.group, 0.05)
        assert await vector(owner, second) == first
        await vector(owner, reservation.submit_next(POOLED))
        assert client.gate.rows == 0, "the last one's place is free at once"
    assert client.gate.statistics()["ended"] == {"stop": 3}
    await client.stop()


@in_loop
async def test_there_is_none_before_one_has_ended_and_places_are_freed_that_none_took():
    client, owner = await started()
    with reserve(client, 2, prompts=5, upcoming=3) as reservation:
        generations = reservation.submit([POOLED])
        with pytest.raises(InvalidRequest, match="no sequence has left a place"):
            reservation.submit_next(POOLED)
        await vector(owner, generations[0])
        assert client.gate.rows == 2
    assert client.gate.rows == 0
    assert client.gate.statistics()["ended"] == {"stop": 1, "unused": 2}
    await client.stop()


@in_loop
async def test_one_that_is_cancelled_leaves_its_place_to_none():
    client, owner = await started()
    with reserve(client, 1, prompts=2, upcoming=1) as reservation:
        (generation,) = reservation.submit([POOLED])
        reservation.cancel(CancelReason.CLIENT)
        owner.run_once()
        with pytest.raises(RequestCancelled):
            await vector(owner, generation)
        with pytest.raises(InvalidRequest):
            reservation.submit_next(POOLED)
    assert client.gate.rows == 0
    await client.stop()


@in_loop
async def test_an_upcoming_sequence_waits_for_as_long_as_it_takes():
    """Its request has begun: what was computed of it is not thrown away."""
    client, owner = await started(running=1)
    with reserve(client, 1, prompts=2, upcoming=1) as reservation, reserve(client) as other:
        (generation,) = reservation.submit([POOLED])
        await vector(owner, generation)
        (answer,) = other.submit([Submit(id="", prompt=(1,), max_tokens=60)])
        owner.run_once()
        waits = reservation.submit_next(POOLED)
        for _ in range(4):
            await asyncio.sleep(0.05)
            owner.run_once()
        assert waits.is_waiting
        answer.cancel()
        assert await vector(owner, waits)
    await client.stop()


@in_loop
async def test_upcoming_sequences_of_a_request_that_has_begun_end_while_the_server_drains():
    """C3"""
    client, owner = await started()
    with reserve(client, 1, prompts=3, upcoming=2) as reservation:
        (generation,) = reservation.submit([POOLED])
        await vector(owner, generation)
        client.drain()
        with pytest.raises(ServerStopping):
            reserve(client)
        for _ in range(2):
            assert await vector(owner, reservation.submit_next(POOLED))
    assert client.gate.statistics()["ended"] == {"stop": 3}
    await client.stop()


@in_loop
async def test_an_upcoming_sequence_is_refused_while_there_is_no_engine():
    client, owner = await started()
    with reserve(client, 1, prompts=2, upcoming=1) as reservation:
        (generation,) = reservation.submit([POOLED])
        await vector(owner, generation)
        client.on_unavailable(EngineUnavailable("the engine is restarting", retry_after_s=1.0))
        with pytest.raises(EngineUnavailable):
            reservation.submit_next(POOLED)
    await client.stop()


@in_loop
async def test_one_that_can_not_be_run_is_refused_and_keeps_the_place():
    client, owner = await started()
    with reserve(client, 1, prompts=3, upcoming=2) as reservation:
        (generation,) = reservation.submit([POOLED])
        await vector(owner, generation)
        poison = Submit(id="", prompt=(6, 6), max_tokens=0, pooling=Pooling.LAST)
        client.dispatch.quarantine.add(poison)
        with pytest.raises(Quarantined):
            reservation.submit_next(poison)
        assert await vector(owner, reservation.submit_next(POOLED))
    assert client.gate.rows == 0
    await client.stop()


def test_poolings_of_one_prompt_are_quarantined_apart():
    table = Quarantine(lambda: 0.0)
    table.add(POOLED)
    table.check(Submit(id="", prompt=(1, 2), max_tokens=0, pooling=Pooling.MEAN))
    with pytest.raises(Quarantined):
        table.check(POOLED)
