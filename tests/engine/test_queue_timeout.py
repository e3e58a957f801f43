"""Waits that the owner does not end in time (D2)."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable

import pytest

from tests.support.aio import in_loop
from tests.support.faults import Faults, FaultyRunner, Gate, builds
from tests.support.owners import CAN, WAIT_S, Clock, FakeOwner, Yard, settle
from treadle.core.messages import Cancel, CancelReason, Finish, FinishReason, Output, StepReport, Submit
from treadle.engine import queue_timeout as module
from treadle.engine.admission import AdmissionLimits
from treadle.engine.client import EngineClient
from treadle.engine.generation import Generation
from treadle.engine.owner import OwnerLimits
from treadle.engine.queue_timeout import SLACK_S, SLACK_STEPS, enforce_queue_timeout
from treadle.engine.thread import ThreadOwner
from treadle.errors import Busy

REQUEST = Submit(id="", prompt=(1, 2), max_tokens=4)


class Timers:
    """Event-loop clock and timers under the test's control."""

    def __init__(self) -> None:
        self.now = 100.0
        self.pending: list[tuple[float, Callable[[], None]]] = []

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, call: Callable[[], None]) -> None:
        self.pending.append((when, call))

    def fire(self, *, late_s: float = 0.0) -> float:
        """Run the next timer; returns the seconds since the start."""
        when, call = self.pending.pop(0)
        self.now = when + late_s
        call()
        return when - 100.0


@pytest.fixture
def timers(monkeypatch) -> Timers:
    timers = Timers()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: timers)
    return timers


def group(count: int) -> list[Generation]:
    return [Generation(REQUEST, kind="chat", tag="t", now=0.0, cancel=lambda *_: None) for _ in range(count)]


def test_nothing_is_kept_of_those_that_end_before(timers):
    """With a long `--max-wait` prompts would pile up."""
    generations, refused = group(2), []
    enforce_queue_timeout(generations, 600.0, 0.25, refused.append)
    last = weakref.ref(generations[0])
    generations.clear()
    gc.collect()
    assert last() is None
    timers.fire()
    assert refused == []


def test_a_group_that_still_waits_is_refused_whole(timers):
    """D2: after the wait and what the owner may take to say so itself."""
    generations, refused = group(2), []
    enforce_queue_timeout(generations, 4.0, 0.25, refused.append)
    assert timers.fire() == 4.0 + SLACK_S + SLACK_STEPS * 0.25
    assert refused == generations
    assert timers.pending == []


def test_once_one_of_a_group_runs_none_is_refused(timers):
    generations, refused = group(2), []
    enforce_queue_timeout(generations, 4.0, 0.0, refused.append)
    generations[1].push(Output(id="", admitted=True), 1.0)
    timers.fire()
    assert (refused, timers.pending) == ([], [])


def test_who_has_left_or_ended_is_not_refused(timers):
    generations, refused = group(3), []
    enforce_queue_timeout(generations, 4.0, 0.0, refused.append)
    generations[0].cancel(CancelReason.CLIENT)
    generations[1].fail(Busy("over"))
    timers.fire()
    assert refused == generations[2:]


def test_a_look_that_comes_late_looks_again(timers):
    """The event loop was held up: the owner may have said long ago that it runs."""
    generations, refused = group(1), []
    enforce_queue_timeout(generations, 4.0, 0.0, refused.append)
    timers.fire(late_s=2 * SLACK_S)
    assert refused == []
    timers.fire()
    assert refused == generations


def test_a_late_look_finds_what_was_said_meanwhile(timers):
    generations, refused = group(1), []
    enforce_queue_timeout(generations, 4.0, 0.0, refused.append)
    timers.fire(late_s=2 * SLACK_S)
    generations[0].push(Output(id="", admitted=True), 1.0)
    timers.fire()
    assert (refused, timers.pending) == ([], [])


@in_loop
async def test_a_refused_one_keeps_its_place_until_the_owner_has_ended_it(monkeypatch):
    """D2, B3: the same refusal as ever; what the owner says of it later reaches nobody."""
    monkeypatch.setattr(module, "SLACK_S", 0.01)
    yard, clock = Yard(FakeOwner), Clock()
    client = EngineClient(yard, AdmissionLimits(2, 2, 0.01), clock=clock)
    client.begin()
    owner = await yard.next()
    owner.ready(CAN)
    with client.reserve(rows=1, prompt_tokens=2, completion_tokens=4, kind="chat", tag="t") as reservation:
        (generation,) = reservation.submit([REQUEST])
        with pytest.raises(Busy, match="no slot came free") as refused:
            await asyncio.wait_for(generation.admitted(), WAIT_S)
        assert refused.value.retry_after_s
    assert [message.id for message in owner.sent if isinstance(message, Cancel)] == [generation.id]
    assert client.gate.rows == 1
    owner.say(StepReport(step=1, outputs=(Output(id=generation.id, admitted=True, tokens=(5,)),)))
    assert (generation.completion_tokens, client.gate.rows) == (0, 1)
    ended = Output(id=generation.id, finish=Finish(reason=FinishReason.CANCELLED, code="client"))
    owner.say(StepReport(step=2, outputs=(ended,)))
    with pytest.raises(Busy):
        await generation.admitted()
    books = client.gate.statistics()
    assert (client.gate.rows, books["ended"], books["refused"]) == (0, {"expired": 1}, {"wait_over": 1})
    await client.stop()


@in_loop
async def test_who_waits_behind_a_step_that_is_stuck_is_refused_in_time(monkeypatch):
    """D2, C4: long before the engine is found to hang."""
    monkeypatch.setattr(module, "SLACK_S", 0.05)
    gate = Gate()
    runner = FaultyRunner(Faults(before_step=lambda step: gate.hold() if step == 2 else None))
    client = EngineClient(lambda: ThreadOwner(builds(runner), OwnerLimits(1, 64)), AdmissionLimits(1, 1, 0.05))
    await asyncio.wait_for(client.start(), WAIT_S)

    def reserve():
        return client.reserve(rows=1, prompt_tokens=2, completion_tokens=4, kind="chat", tag="t")

    with reserve() as first, reserve() as second:
        (runs,) = first.submit([REQUEST])
        await asyncio.to_thread(gate.wait_reached)
        (waits,) = second.submit([REQUEST])
        with pytest.raises(Busy):
            await asyncio.wait_for(waits.admitted(), WAIT_S)
        assert client.health().ready
        gate.open()
        assert len([token async for delta in runs for token in delta.tokens]) == 4
    await asyncio.wait_for(client.idle(), WAIT_S)
    await settle()
    await client.stop()
