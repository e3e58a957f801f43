"""The client over an owner that says what the test tells it, on a clock that the test moves."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from tests.support.aio import in_loop
from tests.support.capabilities import capabilities
from tests.support.owners import CAN, WAIT_S, Clock, FakeOwner, Yard, settle
from treadle.core.capabilities import Capabilities, SpecPrefillCapabilities
from treadle.core.compute_path import Backend, ComputePath
from treadle.core.draft_budget import NOTHING_READY
from treadle.core.messages import (
    Cancel,
    CancelReason,
    Finish,
    FinishReason,
    Output,
    StepReport,
    Stop,
    Submit,
    TokenLogprob,
)
from treadle.core.statistics import (
    DrafterStatistics,
    EngineStatistics,
    PrefixStatistics,
    RunnerStatistics,
    ScorerStatistics,
    SpecPrefillStatistics,
    SpeculationStatistics,
)
from treadle.core.virtual_queue import Arrival
from treadle.engine import deaths as deaths_module
from treadle.engine import generation as generation_module
from treadle.engine import supervisor as supervisor_module
from treadle.engine.admission import EXPECTED_COMPLETION, USUAL_COMPLETION, AdmissionLimits
from treadle.engine.client import EngineClient
from treadle.engine.generation import MAX_DELTA_TOKENS, Delta, Generation, max_unread_tokens
from treadle.engine.reservation import Reservation
from treadle.engine.status import status_of
from treadle.engine.timeouts import Timeouts
from treadle.errors import (
    Busy,
    ContextLengthExceeded,
    EngineDied,
    EngineUnavailable,
    InvalidRequest,
    ReaderStalled,
    RequestCancelled,
    ServerStopping,
    StartFailed,
    StepFailed,
)

HANG_S = 0.04


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(deaths_module, "BACKOFF_S", (0.0, 0.001))
    monkeypatch.setattr(supervisor_module, "KILL_GRACE_S", 0.05)


class Notes:
    """Recording observer."""

    def __init__(self) -> None:
        self.notes: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.notes.append((name, *args))

    def of(self, name: str) -> list[tuple[Any, ...]]:
        return [note[1:] for note in self.notes if note[0] == name]


class Faulty:
    def __getattr__(self, name: str) -> Any:
        def fail(*args: Any) -> None:
            raise ValueError(f"observer {name}")

        return fail


class Scene:
    def __init__(self, *, running: int = 2, waiting: int = 2, max_wait_s: float = 4.0, **owner: Any) -> None:
        self.clock, self.notes = Clock(), Notes()
        self.yard = Yard(lambda: FakeOwner(**owner))
        self.owner: FakeOwner
        self.client = EngineClient(
            self.yard,
            AdmissionLimits(running, waiting, max_wait_s),
            Timeouts(HANG_S, 100.0),
            observers=[Faulty(), self.notes],
            clock=self.clock,
        )

    async def begin(self, can: Any = CAN) -> Scene:
        self.client.begin()
        self.owner = await self.yard.next()
        self.owner.ready(can)
        return self

    def reserve(self, rows: int = 1, prompt: int = 10, completion: int | None = 5) -> Reservation:
        return self.client.reserve(
            rows=rows, prompt_tokens=prompt, completion_tokens=completion, kind="chat", tag="req-1"
        )

    def submit(self, reservation: Reservation, rows: int = 1, **fields: Any) -> list[Generation]:
        return reservation.submit([Submit(id="", prompt=(1, 2, 3), max_tokens=5, **fields)] * rows)

    def say(self, *outputs: Output) -> None:
        self.owner.say(StepReport(step=1, outputs=outputs, statistics=EngineStatistics(steps=1)))

    def admit(self, generation: Generation, **fields: Any) -> None:
        self.say(Output(id=generation.id, admitted=True, wait_s=0.25, **fields))

    def finish(self, generation: Generation, reason: FinishReason = FinishReason.LENGTH, **fields: Any) -> None:
        self.say(Output(id=generation.id, finish=Finish(reason=reason, **fields)))

    @property
    def free(self) -> bool:
        gate = self.client.gate
        return gate.rows == 0 and gate.tokens == 0 and not self.client.dispatch.generations

    @property
    def ended(self) -> dict[str, int]:
        ended: dict[str, int] = self.client.gate.statistics()["ended"]
        return ended


async def read(generation: Generation) -> list[Delta]:
    async with asyncio.timeout(WAIT_S):
        return [delta async for delta in generation]


# Retry-After -------------------------------------------------------------------------------------------------------

TIMED = capabilities(CAN, context=4096, decode_step_s=0.1, prompt_token_s=0.01)


@in_loop
async def test_a_fresh_server_promises_what_its_warm_up_measured():
    """R2: 20 tokens of answer and two prompts of 50, where nobody has been answered yet."""
    scene = await Scene(running=2, waiting=0).begin(TIMED)
    with scene.reserve(prompt=50, completion=20), scene.reserve(prompt=50, completion=20):
        with pytest.raises(Busy) as refused:
            scene.reserve()
        assert refused.value.retry_after_s == pytest.approx(3.0, rel=0.04)
    await scene.client.stop()


@in_loop
async def test_an_answer_of_no_given_length_counts_as_a_usual_one():
    scene = await Scene(running=1, waiting=0).begin(TIMED)
    with scene.reserve(prompt=1, completion=None):
        with pytest.raises(Busy) as refused:
            scene.reserve()
        assert refused.value.retry_after_s == pytest.approx(USUAL_COMPLETION * 0.1 + 0.01, rel=0.04)
    await scene.client.stop()


@pytest.mark.parametrize(
    ("limit", "least", "tokens"),
    [
        (100, 0, 100),
        (1024, 0, 512),
        (1024, 1024, 1024),
        (1024, 700, 700),
        (1 << 20, 0, EXPECTED_COMPLETION),
        (None, 900, 900),
    ],
)
@in_loop
async def test_a_long_limit_is_between_a_wish_and_a_bound(limit: int | None, least: int, tokens: int):
    """R2: the geometric mean of the limit and a usual answer, and no less than what is sure to come."""
    scene = await Scene(running=1, waiting=0).begin(capabilities(TIMED, decode_step_s=0.01))
    ask: dict[str, Any] = {"rows": 1, "prompt_tokens": 0, "kind": "chat", "tag": "req"}
    with scene.client.reserve(completion_tokens=limit, least_tokens=least, **ask):
        with pytest.raises(Busy) as refused:
            scene.reserve()
        assert refused.value.retry_after_s == pytest.approx(tokens * 0.01, rel=0.04)
    await scene.client.stop()


@pytest.mark.parametrize(("gained", "times"), [(0, 3.0), (1, 3.0), (4, 0.75)])
@in_loop
async def test_steps_of_a_full_server_correct_what_is_promised(gained: int, times: float):
    """R2: by the tokens that a step gives, as with accepted drafts."""
    scene = await Scene(running=1, waiting=0).begin(TIMED)
    with scene.reserve(prompt=1, completion=20) as reservation:
        (generation,) = scene.submit(reservation)
        scene.admit(generation)
        for _ in range(60):
            outputs = (Output(id=generation.id, tokens=(7,) * gained),)
            scene.owner.say(StepReport(step=2, outputs=outputs, statistics=EngineStatistics(steps=2, step_s=0.3)))
        with pytest.raises(Busy) as refused:
            scene.reserve()
        assert refused.value.retry_after_s == pytest.approx(times * (20 * 0.1 + 0.01), rel=0.05)
    await scene.client.stop()


# Life --------------------------------------------------------------------------------------------------------------


@in_loop
async def test_start_returns_when_requests_are_taken():
    """C1."""
    scene = Scene()
    start = asyncio.create_task(scene.client.start())
    owner = await scene.yard.next()
    with pytest.raises(EngineUnavailable, match="loading"):
        scene.reserve()
    assert not scene.client.health().ready
    owner.ready()
    await asyncio.wait_for(start, WAIT_S)
    assert scene.client.health().ready
    with scene.reserve():
        assert scene.client.busy == 1
    await scene.client.stop()


@in_loop
async def test_a_start_that_fails_can_be_stopped_and_refuses_for_good():
    """C1, C3."""
    scene = Scene(start_error=OSError("no"))
    with pytest.raises(StartFailed):
        await asyncio.wait_for(scene.client.start(), WAIT_S)
    await asyncio.wait_for(scene.client.stop(), WAIT_S)
    assert (scene.client.health().state, scene.client.health().ready) == ("failed", False)
    with pytest.raises(EngineUnavailable):
        scene.reserve()


@in_loop
async def test_draining_refuses_what_is_new_and_lets_what_runs_end():
    """C3."""
    scene = await Scene().begin()
    with scene.reserve() as reservation, scene.reserve() as late:
        (generation,) = scene.submit(reservation)
        scene.client.drain()
        assert (scene.client.health().state, scene.client.health().ready) == ("draining", False)
        with pytest.raises(ServerStopping):
            scene.reserve()
        with pytest.raises(ServerStopping):
            scene.submit(late)
        idle = [asyncio.create_task(scene.client.idle()) for _ in range(2)]
        await settle()
        scene.admit(generation, tokens=(1,))
        scene.finish(generation)
        assert [delta.tokens for delta in await read(generation)] == [(1,)]
        assert not any(task.done() for task in idle)
    await asyncio.wait_for(asyncio.gather(*idle), WAIT_S)
    assert scene.free
    await scene.client.idle()
    await scene.client.stop()


@in_loop
async def test_an_engine_that_restarts_while_it_drains_stays_closed():
    """C3."""
    scene = await Scene().begin()
    scene.client.drain()
    scene.owner.end()
    scene.owner = await scene.yard.next()
    scene.owner.ready()
    with pytest.raises(ServerStopping):
        scene.reserve()
    await scene.client.stop()


@in_loop
async def test_a_stop_wakes_everyone_with_one_end():
    """C3: waiting, running, jobs, and whoever waits for idle."""
    scene = await Scene(polite=False).begin()
    with scene.reserve(rows=2) as reservation:
        waiting, running = scene.submit(reservation, 2)
        scene.admit(running)
        readers = [
            asyncio.create_task(waiting.admitted()),
            asyncio.create_task(read(running)),
            asyncio.create_task(scene.client.jobs.run("echo")),
        ]
        idle = asyncio.create_task(scene.client.idle())
        await settle()
        stop = asyncio.create_task(scene.client.stop())
        done, _ = await asyncio.wait(readers, timeout=WAIT_S)
        assert [type(task.exception()) for task in readers] == [ServerStopping] * 3
        assert len(done) == 3
        await asyncio.wait_for(idle, WAIT_S)
        assert scene.client.health().reason == "the engine was stopped"
        scene.finish(running)
        scene.finish(waiting)
        scene.owner.end("stopped")
        await asyncio.wait_for(stop, WAIT_S)
    assert scene.free
    assert scene.ended == {"lost": 2}
    with pytest.raises(ServerStopping):
        await scene.client.jobs.run("echo")


# Accounting --------------------------------------------------------------------------------------------------------


@in_loop
async def test_a_request_from_reserve_to_the_end():
    scene = await Scene().begin()
    with scene.reserve(rows=2, prompt=20, completion=5) as reservation:
        assert (scene.client.gate.rows, scene.client.gate.tokens) == (2, 30)
        reservation.resize(prompt_tokens=6, completion_tokens=8)
        assert scene.client.gate.tokens == 14
        scene.clock.now += 1.0
        a, b = scene.submit(reservation, 2)
        submits = [message for message in scene.owner.sent if isinstance(message, Submit)]
        assert [message.id for message in submits] == [a.id, b.id] == ["1.0", "1.1"]
        assert {(message.group, message.max_wait_s) for message in submits} == {("1", 3.0)}
        scene.admit(a, tokens=(7,), prompt_tokens_done=3)
        scene.finish(a)
        assert (scene.client.gate.rows, scene.client.gate.tokens) == (1, 7)
        scene.finish(b, FinishReason.STOP, stop_token_id=9)
        assert scene.free
        (delta,) = await read(a)
        assert (delta.tokens, delta.finish) == ((7,), Finish(reason=FinishReason.LENGTH))
        (end,) = await read(b)
        assert end.finish == Finish(reason=FinishReason.STOP, stop_token_id=9)
    assert not any(isinstance(message, Cancel) for message in scene.owner.sent)
    await scene.client.stop()


@in_loop
async def test_leaving_early_takes_back_what_lives_and_keeps_its_places_until_the_engine_has_ended_it():
    """Design rule 6: a reservation ends with the engine's word, never with the disconnect."""
    scene = await Scene().begin()
    with scene.reserve(rows=3) as reservation:
        a, b = scene.submit(reservation, 2)
        scene.finish(a)
    assert [message.id for message in scene.owner.sent if isinstance(message, Cancel)] == [b.id]
    assert scene.client.busy == 1
    reservation.__exit__(None, None, None)
    assert scene.client.busy == 1
    scene.finish(b, FinishReason.CANCELLED, code="client")
    assert scene.free
    assert scene.ended == {"length": 1, "unused": 1, "cancelled": 1}
    with pytest.raises(RequestCancelled):
        await read(b)
    await scene.client.stop()


@in_loop
async def test_a_reservation_that_is_never_used_gives_everything_back():
    scene = await Scene().begin()
    with pytest.raises(KeyError), scene.reserve(rows=2):
        raise KeyError
    assert scene.free
    await scene.client.stop()


@in_loop
async def test_more_sequences_than_reserved_are_refused_whole():
    scene = await Scene().begin()
    with scene.reserve() as reservation:
        with pytest.raises(InvalidRequest, match="2 sequences, but 1 were reserved"):
            scene.submit(reservation, 2)
        assert not any(isinstance(message, Submit) for message in scene.owner.sent)
    assert scene.free
    await scene.client.stop()


@in_loop
async def test_a_sequence_that_cannot_be_sent_leaves_no_trace():
    """Else the engine would seem to owe an answer for ever, and be killed for it."""
    scene = await Scene().begin()

    def send(message: Any) -> None:
        if isinstance(message, Submit):
            raise TypeError("not a plain value")

    scene.owner.send, send_truly = send, scene.owner.send  # type: ignore[method-assign]
    with pytest.raises(TypeError), scene.reserve() as reservation:
        scene.submit(reservation)
    assert scene.free
    assert scene.client.work_since() is None
    scene.owner.send = send_truly  # type: ignore[method-assign]
    await scene.client.stop()


@in_loop
async def test_a_full_house_refuses_at_once_and_says_when_to_come_again():
    """D1."""
    scene = await Scene().begin()
    with scene.reserve(rows=4):
        with pytest.raises(Busy) as refused:
            scene.reserve()
        assert refused.value.retry_after_s is not None
        with pytest.raises(InvalidRequest):
            scene.reserve(rows=5)
        with pytest.raises(Busy):
            scene.client.check_room()
    scene.client.check_room()
    assert scene.notes.of("refused") == [("queue_full",), ("too_many_rows",), ("queue_full",)]
    await scene.client.stop()


def tenant(name: str, scene: Scene, rows: int = 1) -> Reservation:
    return scene.client.reserve(
        rows=rows, prompt_tokens=10 * rows, completion_tokens=5, kind="chat", tag=name, arrival=Arrival(name)
    )


@in_loop
async def test_a_waiting_request_gives_its_place_to_a_tenant_that_holds_less_and_ends_once():
    """D16: its client is told when to come again; its row's end comes later and frees nothing twice."""
    scene = await Scene(running=2, waiting=1).begin()
    with tenant("a", scene, 2) as running, tenant("a", scene) as waiting:
        first, second = scene.submit(running, 2)
        scene.admit(first)
        scene.admit(second)
        (third,) = scene.submit(waiting)
        assert third.request.tenant == "a"
        with tenant("b", scene) as other:
            with pytest.raises(Busy, match="went to a client that holds less") as refused:
                await asyncio.wait_for(third.admitted(), WAIT_S)
            assert refused.value.ticket
            assert scene.client.gate.rows == 4
            await settle()
            scene.finish(third, FinishReason.CANCELLED)
            await settle()
            assert scene.client.gate.rows == 3
            (fourth,) = scene.submit(other)
            assert scene.ended == {"displaced": 1}
            for generation in (first, second, fourth):
                scene.admit(generation)
                scene.finish(generation)
            await settle()
    assert scene.free
    await scene.client.stop()


@in_loop
async def test_a_request_that_lost_its_place_while_it_was_tokenized_is_told_so():
    """D16"""
    scene = await Scene(running=1, waiting=1).begin()
    with tenant("a", scene) as first:
        with tenant("a", scene) as second:
            with tenant("b", scene), pytest.raises(Busy, match="went to a client that holds less"):
                scene.submit(second)
            with pytest.raises(Busy):
                scene.submit(second)
        scene.submit(first)
    await scene.client.stop()
    assert scene.free


@in_loop
async def test_who_waited_in_vain_keeps_its_place_when_it_comes_back():
    """D12"""
    scene = await Scene(running=1, waiting=1).begin()
    arrival = Arrival("a", fingerprint=1, repeat=False)
    with tenant("a", scene) as running:
        (runs,) = scene.submit(running)
        scene.admit(runs)
        ask: dict[str, Any] = {"rows": 1, "prompt_tokens": 10, "completion_tokens": 5, "kind": "chat", "tag": "t"}
        with scene.client.reserve(**ask, arrival=arrival) as reservation:
            (waits,) = scene.submit(reservation)
            scene.finish(waits, FinishReason.EXPIRED)
            with pytest.raises(Busy, match="no slot came free") as refused:
                await asyncio.wait_for(waits.admitted(), WAIT_S)
        assert refused.value.retry_after_s is not None
        scene.clock.now += refused.value.retry_after_s
        with pytest.raises(Busy, match="promised to requests that came earlier"):
            tenant("a", scene)
        with scene.client.reserve(**ask, arrival=Arrival("a", ticket_id=refused.value.ticket)):
            pass
    await scene.client.stop()


@in_loop
async def test_a_correction_that_no_longer_fits_is_refused_and_leaves_the_estimate():
    """D2: still before the first byte."""
    can = capabilities(CAN, kv_token_bytes=1, kv_row_bytes=10, kv_budget_bytes=70)
    scene = await Scene(running=2, waiting=2).begin(can)
    assert scene.client.gate.limits.tokens == 100
    with scene.reserve(prompt=10, completion=10) as reservation, scene.reserve(prompt=40, completion=20):
        with pytest.raises(Busy):
            reservation.resize(prompt_tokens=41, completion_tokens=0)
        with pytest.raises(InvalidRequest):
            reservation.resize(prompt_tokens=101, completion_tokens=0)
        assert scene.client.gate.tokens == 80
    with scene.reserve() as reservation:
        reservation.resize(prompt_tokens=30)
        assert scene.client.gate.tokens == CAN.context, "without a limit it is what the context leaves"
    assert scene.notes.of("refused") == [("tokens",), ("too_long",)]
    await scene.client.stop()


@pytest.mark.parametrize(
    "can", [capabilities(CAN, kv_block=10, kv_blocks=5), capabilities(CAN, kv_token_bytes=2, kv_budget_bytes=100)]
)
@in_loop
async def test_no_sequence_is_sent_when_one_would_not_fit_into_the_cache(can: Capabilities):
    """D2: else the request would be answered, and then fail. It is refused though all together are within the gate's
    tokens."""
    scene = await Scene(running=2, waiting=2).begin(can)
    with scene.reserve(rows=2, prompt=20, completion=10) as reservation:
        reservation.resize(prompt_tokens=50, completion_tokens=10)
        short, long = Submit(id="", prompt=(1,) * 4, max_tokens=5), Submit(id="", prompt=(1,) * 46, max_tokens=5)
        with pytest.raises(ContextLengthExceeded, match=r"length is 50 tokens\. However, you requested 51"):
            reservation.submit([short, long])
        assert not scene.owner.sent
        assert len(reservation.submit([short, msgspec.structs.replace(long, max_tokens=4)])) == 2
    assert scene.notes.of("refused") == [("too_long",)]
    await scene.client.stop()


@in_loop
async def test_where_rows_can_wait_for_memory_they_reserve_what_is_expected_of_them():
    """D2: clients that always ask for the most there is are not refused for it."""
    can = capabilities(CAN, context=40_000, kv_block=16, kv_blocks=1000)
    scene = await Scene(running=2, waiting=1).begin(can)
    assert scene.client.gate.limits.tokens == 24_000
    with scene.reserve(prompt=100, completion=32_000) as reservation:
        assert scene.client.gate.tokens == 100 + EXPECTED_COMPLETION
        reservation.resize(prompt_tokens=90, completion_tokens=32_000)
        assert scene.client.gate.tokens == 90 + EXPECTED_COMPLETION
        reservation.resize(prompt_tokens=90, completion_tokens=7)
        assert scene.client.gate.tokens == 97
    with scene.reserve(prompt=100, completion=None):
        assert scene.client.gate.tokens == 100 + EXPECTED_COMPLETION
    await scene.client.stop()


@in_loop
async def test_without_a_limit_a_row_reserves_what_the_context_leaves():
    scene = await Scene().begin()
    with scene.reserve(rows=2, prompt=60, completion=None):
        assert scene.client.gate.tokens == 60 + 2 * (CAN.context - 30)
    with scene.reserve(prompt=500, completion=7):
        assert scene.client.gate.tokens == 501
    await scene.client.stop()


@in_loop
async def test_a_request_begun_before_the_first_capabilities_counts_one_token():
    assert Scene().client.admission.completion_tokens(None, 10) == 1


# Losing the engine -------------------------------------------------------------------------------------------------


@in_loop
async def test_an_engine_lost_between_reserve_and_submit_refuses_the_submit():
    """C4."""
    scene = await Scene().begin()
    with scene.reserve() as reservation:
        scene.owner.end("killed by SIGKILL")
        second = await scene.yard.next()
        with pytest.raises(EngineUnavailable, match="killed by SIGKILL") as refused:
            scene.submit(reservation)
        assert refused.value.retry_after_s == pytest.approx(1.0, rel=0.04)
        assert refused.value.ticket, "its place in line is kept"
        second.ready()
        scene.owner = second
        (generation,) = scene.submit(reservation)
        scene.finish(generation)
        await read(generation)
    assert scene.free
    await scene.client.stop()


@in_loop
async def test_an_engine_that_will_not_come_back_ends_everyone_once():
    """B7: what waited may come again elsewhere, what ran may be at fault; each has an error of its own."""
    scene = await Scene().begin()
    with scene.reserve(rows=3) as reservation:
        waiting, running, ended = scene.submit(reservation, 3)
        scene.admit(running, tokens=(1, 2))
        scene.finish(ended)
        scene.client.on_lost(EngineDied("for good"), EngineUnavailable("for good"))
        with pytest.raises(EngineUnavailable) as refused:
            await asyncio.wait_for(waiting.admitted(), WAIT_S)
        deltas = aiter(running)
        assert (await anext(deltas)).tokens == (1, 2), "tokens that came before the error are not lost"
        with pytest.raises(EngineDied) as lost:
            await anext(deltas)
        assert (refused.value.grpc_status, lost.value.grpc_status) == ("UNAVAILABLE", "INTERNAL")
        assert (await read(ended))[-1].finish == Finish(reason=FinishReason.LENGTH)
        assert scene.free
        running.fail(StepFailed("too late"))
        with pytest.raises(EngineDied):
            await read(running)
    assert scene.ended == {"lost": 2, "length": 1}
    assert scene.client.work_since() is None
    await scene.client.stop()


@in_loop
async def test_each_one_that_is_lost_gets_an_error_of_its_own():
    """An exception raised in several tasks would gather the traces of all."""
    scene = await Scene().begin()
    with scene.reserve(rows=2) as reservation:
        generations = scene.submit(reservation, 2)
        scene.client.on_lost(EngineDied("for good"), EngineUnavailable("for good"))
        errors = [generation._error for generation in generations]
        assert errors[0] is not errors[1]
        assert str(errors[0]) == str(errors[1])
    await scene.client.stop()


@in_loop
async def test_a_job_without_an_engine_is_refused_at_once():
    """B7, A3: it would wait for an end that can't come, and no cancellation would release it."""
    scene = Scene()
    with pytest.raises(EngineUnavailable, match="loading"):
        await scene.client.jobs.run("echo")
    await scene.begin()
    scene.owner.end()
    await scene.yard.next()
    with pytest.raises(EngineUnavailable, match="restarting"):
        await scene.client.jobs.run("echo")
    assert scene.client.jobs.pending == 0
    assert scene.client.work_since() is None
    await scene.client.stop()


@in_loop
async def test_a_hung_engine_is_seen_in_health_and_status_and_everyone_is_answered():
    """C4, D3: status needs nothing of the engine."""
    scene = await Scene(thread=True, killable=False, polite=False).begin()
    with scene.reserve() as reservation:
        (generation,) = scene.submit(reservation)
        scene.admit(generation, tokens=(1,))
        scene.clock.now += HANG_S * 2
        assert status_of(scene.client)["engine"]["last_heard_s"] == pytest.approx(HANG_S * 2)
        with pytest.raises(EngineDied, match="hung"):
            await read(generation)
        await asyncio.wait_for(scene.client.supervisor.failed(), WAIT_S)
        health = scene.client.health()
        assert (health.live, health.ready, health.state) == (True, False, "failed")
        assert "hung" in health.reason
        assert status_of(scene.client)["ready"] is False
        with pytest.raises(EngineUnavailable, match="for good"):
            scene.reserve()
        scene.say(Output(id=generation.id, tokens=(2,)))
    assert scene.free
    await scene.client.stop(0.01)


@in_loop
async def test_the_time_that_the_engine_owes_an_answer_starts_with_the_first_request_after_rest():
    """C4: an old debt must not make a new one look hung."""
    scene = await Scene().begin()
    with scene.reserve(rows=2) as reservation:
        first = scene.clock.now
        a, b = scene.submit(reservation, 2)
        assert scene.client.work_since() == first
        scene.clock.now += HANG_S / 2
        scene.finish(a)
        assert scene.client.work_since() == first
        scene.finish(b)
        assert scene.client.work_since() is None
    scene.clock.now += 1e6
    a.cancel()
    with scene.reserve() as reservation:
        (c,) = scene.submit(reservation)
        assert scene.client.work_since() == scene.clock.now
        scene.client.supervisor._changed.set()
        await settle()
        assert scene.owner.kills == 0
        scene.finish(c)
    await scene.client.stop()


@in_loop
async def test_a_restart_is_told_and_the_gate_opens_again():
    scene = await Scene().begin()
    scene.owner.end()
    scene.owner = await scene.yard.next()
    assert scene.client.health().state == "restarting"
    assert scene.client.health().ready is False
    scene.owner.ready()
    assert scene.client.health().ready
    assert scene.notes.of("restarted") == [()]
    with scene.reserve():
        pass
    await scene.client.stop()


# What a generation says --------------------------------------------------------------------------------------------


@in_loop
async def test_an_expired_wait_is_busy_and_says_when_to_come_again():
    """D2."""
    scene = await Scene().begin()
    with scene.reserve() as reservation:
        (generation,) = scene.submit(reservation)
        admitted = asyncio.create_task(generation.admitted())
        await settle()
        scene.finish(generation, FinishReason.EXPIRED, code="text_generation_busy")
        with pytest.raises(Busy) as refused:
            await asyncio.wait_for(admitted, WAIT_S)
        assert refused.value.retry_after_s
    assert scene.free
    assert scene.notes.of("refused") == [("wait_over",)]
    await scene.client.stop()


@pytest.mark.parametrize(
    ("finish", "error"),
    [
        (Finish(reason=FinishReason.CANCELLED, code="client"), RequestCancelled),
        (Finish(reason=FinishReason.CANCELLED, code="stalled"), ReaderStalled),
        (Finish(reason=FinishReason.CANCELLED, code="shutdown"), ServerStopping),
        (Finish(reason=FinishReason.ERROR, code="engine_step_failed", message="why"), StepFailed),
    ],
)
@in_loop
async def test_every_bad_end_is_an_error_of_its_own(finish, error):
    """B7: after the tokens that came before it, and again whenever it is asked for."""
    scene = await Scene().begin()
    with scene.reserve() as reservation:
        (generation,) = scene.submit(reservation)
        scene.say(Output(id=generation.id, admitted=True, tokens=(1,), finish=finish))
        deltas = aiter(generation)
        assert (await anext(deltas)).tokens == (1,)
        with pytest.raises(error) as raised:
            await anext(deltas)
        assert type(raised.value) is error
        with pytest.raises(error):
            await read(generation)
        await generation.admitted()
    await scene.client.stop()


@in_loop
async def test_a_stop_string_before_the_first_step_is_a_good_end():
    scene = await Scene().begin()
    with scene.reserve() as reservation:
        (generation,) = scene.submit(reservation)
        generation.cancel(CancelReason.STOP)
        scene.finish(generation, FinishReason.STOP)
        await generation.admitted()
        assert [delta.finish for delta in await read(generation)] == [Finish(reason=FinishReason.STOP)]
    await scene.client.stop()


@in_loop
async def test_deltas_that_nobody_read_merge_and_a_reader_wakes_for_each_news():
    scene = await Scene().begin()
    with scene.reserve() as reservation:
        (generation,) = scene.submit(reservation)
        assert generation.phase == "waiting"
        scene.admit(generation, prompt_tokens_done=2, cached_tokens=1)
        assert generation.phase == "prefill"
        deltas = aiter(generation)
        first = await anext(deltas)
        assert (first.prompt_tokens_done, first.cached_tokens, first.tokens) == (2, 1, ())
        later = asyncio.ensure_future(anext(deltas))
        await settle()
        assert not later.done()
        scene.say(Output(id=generation.id, tokens=(1,)))
        scene.say(Output(id=generation.id, tokens=(2, 3)))
        assert (await asyncio.wait_for(later, WAIT_S)).tokens == (1, 2, 3)
        assert generation.phase == "decode"
        scene.finish(generation)
        assert generation.phase == "done"
        assert (await anext(deltas)).finish is not None
        with pytest.raises(StopAsyncIteration):
            await anext(deltas)
    await scene.client.stop()


@in_loop
async def test_a_generation_knows_how_much_of_its_prompt_is_prefilled():
    scene = await Scene().begin()
    with scene.reserve() as reservation:
        (generation,) = scene.submit(reservation)
        scene.admit(generation, prompt_tokens_done=2)
        assert (generation.scored_tokens, generation.kept_tokens) == (0, 0)
        scene.say(Output(id=generation.id, scored_tokens=9, kept_tokens=4))
        scene.say(Output(id=generation.id, tokens=(1,)))
        assert (generation.scored_tokens, generation.kept_tokens) == (9, 4)
        scene.finish(generation)
    await scene.client.stop()


@in_loop
async def test_scores_of_a_prompt_merge_like_tokens_and_come_once():
    scene = await Scene().begin()
    scores = [TokenLogprob(logprob=-float(i)) for i in range(3)]
    with scene.reserve() as reservation:
        (generation,) = scene.submit(reservation)
        scene.admit(generation, prompt_logprobs=(scores[0],))
        scene.say(Output(id=generation.id, prompt_logprobs=(scores[1],)))
        deltas = aiter(generation)
        assert (await anext(deltas)).prompt_logprobs == tuple(scores[:2])
        scene.say(Output(id=generation.id, prompt_logprobs=(scores[2],)))
        assert (await anext(deltas)).prompt_logprobs == (scores[2],)
    await scene.client.stop()


@pytest.mark.parametrize("top", [None, 0, 2])
@in_loop
async def test_a_reader_whose_unread_tokens_take_too_much_memory_is_cancelled_once(monkeypatch, top):
    """Issue 2, 7: a bounded buffer, then its request is cancelled. Log-probabilities take the most memory."""
    monkeypatch.setattr(generation_module, "MAX_UNREAD_BYTES", 4000)
    scene = await Scene().begin()
    most = max_unread_tokens(top)
    assert most == {None: 100, 0: 33, 2: 11}[top]
    with scene.reserve() as reservation:
        (generation,) = scene.submit(reservation, logprobs=top)
        scene.admit(generation, tokens=(1,) * most)
        cancels = [message for message in scene.owner.sent if isinstance(message, Cancel)]
        assert cancels == []
        for _ in range(2):
            scene.say(Output(id=generation.id, tokens=(1,)))
        cancels = [message for message in scene.owner.sent if isinstance(message, Cancel)]
        assert cancels == [Cancel(id=generation.id, reason=CancelReason.STALLED)]
        scene.finish(generation, FinishReason.CANCELLED, code="stalled")
        with pytest.raises(ReaderStalled, match="reads its answer too slowly"):
            await read(generation)
    assert scene.free
    await scene.client.stop()


def test_a_pause_of_minutes_costs_no_answer():
    """Time decides how long a reader may pause, and the front has the clock. The answer of a large context fits."""
    assert max_unread_tokens(None) > 500_000
    assert max_unread_tokens(20) > 10_000


@in_loop
async def test_a_reader_that_catches_up_lets_others_run_between_the_parts():
    scene = await Scene().begin()
    with scene.reserve() as reservation:
        (generation,) = scene.submit(reservation, logprobs=0)
        tokens = tuple(range(2 * MAX_DELTA_TOKENS + 1))
        scores = tuple(TokenLogprob(logprob=-float(token)) for token in tokens)
        scene.admit(generation, tokens=tokens, logprobs=scores, prompt_logprobs=scores[:1])
        scene.finish(generation)
        turns: list[int] = []
        loop = asyncio.get_running_loop()
        deltas: list[Delta] = []
        async for delta in generation:
            deltas.append(delta)
            loop.call_soon(turns.append, len(deltas))
        assert turns == [1, 2]
        assert [len(delta.tokens) for delta in deltas] == [MAX_DELTA_TOKENS, MAX_DELTA_TOKENS, 1]
        assert sum((delta.tokens for delta in deltas), ()) == tokens
        assert sum((delta.logprobs for delta in deltas), ()) == scores
        assert [delta.prompt_logprobs for delta in deltas] == [scores[:1], (), ()]
        assert [delta.finish is None for delta in deltas] == [True, True, False]
    await scene.client.stop()


@in_loop
async def test_a_cancel_is_sent_once_and_never_after_the_end():
    """B3: idempotent."""
    scene = await Scene().begin()
    with scene.reserve(rows=2) as reservation:
        a, b = scene.submit(reservation, 2)
        for _ in range(3):
            a.cancel()
        reservation.cancel(CancelReason.SHUTDOWN)
        scene.finish(b, FinishReason.CANCELLED, code="shutdown")
        b.cancel()
        cancels = [message for message in scene.owner.sent if isinstance(message, Cancel)]
        assert cancels == [Cancel(id=a.id), Cancel(id=b.id, reason=CancelReason.SHUTDOWN)]
        scene.finish(a, FinishReason.CANCELLED, code="client")
        scene.finish(a, FinishReason.CANCELLED, code="client")
    assert scene.ended == {"cancelled": 2}, "one end each, however often it is said"
    await scene.client.stop()


@in_loop
async def test_a_reader_that_is_cancelled_leaves_the_places_to_the_reservation():
    scene = await Scene().begin()

    async def request() -> None:
        with scene.reserve() as reservation:
            (generation,) = scene.submit(reservation)
            await generation.admitted()

    task = asyncio.create_task(request())
    await settle()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    cancel = scene.owner.sent[-1]
    assert isinstance(cancel, Cancel)
    assert scene.client.busy == 1
    scene.say(Output(id=cancel.id, finish=Finish(reason=FinishReason.CANCELLED)))
    assert scene.free
    await scene.client.stop()


# Observers and status ----------------------------------------------------------------------------------------------


@in_loop
async def test_observers_hear_of_everything_though_one_of_them_raises():
    """The first observer of these scenes raises on every call."""
    scene = await Scene().begin()
    with scene.reserve() as reservation:
        (generation,) = scene.submit(reservation)
        scene.clock.now += 0.5
        scene.admit(generation, tokens=(1,))
        scene.clock.now += 0.25
        scene.say(Output(id=generation.id, tokens=(2, 3)))
        scene.finish(generation)
        await read(generation)
    assert scene.notes.of("admitted") == [("chat", 0.25)]
    assert scene.notes.of("first_token") == [("chat", 0.5)]
    assert scene.notes.of("tokens") == [("chat", 2, 0.25)]
    assert scene.notes.of("finished") == [("chat", "length", 0.75)]
    assert len(scene.notes.of("step")) == 3
    await scene.client.stop()


@in_loop
async def test_the_status_says_what_became_of_draft_tokens():
    scene = Scene(running=4)
    assert status_of(scene.client)["speculation"] is None
    await scene.begin(capabilities(CAN, drafters=("lookup",), draft_tokens=8))
    status = status_of(scene.client)
    assert "speculation" not in status["capabilities"]
    found = status["speculation"]
    assert (found["drafters"], found["draft_tokens"], found["on"]) == (["lookup"], 8, False)
    assert found["reason"] == NOTHING_READY, "an owner that has had no step is off for a reason, too"
    assert (found["acceptance"], found["tokens_per_step"]) == (0.0, 1.0)
    drafter = RunnerStatistics(drafter=DrafterStatistics(4096, 7, PrefixStatistics(reused=32)))
    counted = SpeculationStatistics(
        steps=4, rows=5, drafted=20, accepted=15, gained=15, on=True, chances=(0.9, 0.5), match_chances=((2, 0.3),)
    )
    scene.owner.say(StepReport(step=1, statistics=EngineStatistics(speculation=counted, runner=drafter)))
    await settle()
    found = status_of(scene.client)["speculation"]
    assert (found["steps"], found["drafted"], found["accepted"], found["on"]) == (4, 20, 15, True)
    assert found["reason"] == ""
    assert (found["acceptance"], found["tokens_per_step"], found["chances"]) == (0.75, 4.0, [0.9, 0.5])
    assert found["match_chances"] == {"2": 0.3}
    assert (found["kv_bytes"], found["backlog"], found["reused_tokens"]) == (4096, 7, 32)
    waits = SpeculationStatistics(reason=NOTHING_READY)
    scene.owner.say(StepReport(step=2, statistics=EngineStatistics(speculation=waits, runner=drafter)))
    await settle()
    found = status_of(scene.client)["speculation"]
    assert found["reason"] == f"{NOTHING_READY}: the draft model has yet to compute 7 tokens of its sequences"
    await scene.client.stop()


@in_loop
async def test_the_status_says_what_became_of_prompts_that_were_scored():
    scene = Scene(running=4)
    assert status_of(scene.client)["spec_prefill"] is None
    scorer = SpecPrefillCapabilities(scorer="small", keep=0.2, min_tokens=8192, longest=30000)
    steps = msgspec.structs.replace(CAN.steps, spec_prefill=scorer)
    await scene.begin(msgspec.structs.replace(CAN, steps=steps))
    status = status_of(scene.client)
    assert "spec_prefill" not in status["capabilities"]
    assert (status["spec_prefill"]["scorer"], status["spec_prefill"]["prompts"]) == ("small", 0)
    counted = SpecPrefillStatistics(prompts=2, scored_tokens=900, kept_tokens=200, failed=1, reason="no", scoring=3)
    cache = RunnerStatistics(scorer=ScorerStatistics(1, 4096, PrefixStatistics(reused=32)))
    scene.owner.say(StepReport(step=1, statistics=EngineStatistics(spec_prefill=counted, runner=cache)))
    await settle()
    found = status_of(scene.client)["spec_prefill"]
    assert (found["prompts"], found["scored_tokens"], found["kept_tokens"], found["scoring"]) == (2, 900, 200, 3)
    assert (found["failed"], found["reason"], found["keep"]) == (1, "no", 0.2)
    assert (found["kv_bytes"], found["reused_tokens"]) == (4096, 32)
    await scene.client.stop()


@in_loop
async def test_the_status_says_why_nothing_is_drafted():
    scene = Scene(running=4)
    await scene.begin(capabilities(CAN, reason="it can't"))
    assert status_of(scene.client)["speculation"]["reason"] == "it can't"
    await scene.client.stop()


@in_loop
async def test_the_status_says_how_the_engine_computes():
    """`path` is what runs, not what was asked for."""
    scene = Scene(running=4)
    assert (status_of(scene.client)["path"], status_of(scene.client)["compute"]) == ("batched", None)
    path = ComputePath(Backend.SERIAL, Backend.CONTIGUOUS, why=("padded: no",))
    await scene.begin(msgspec.structs.replace(CAN, path="serialized", compute=path))
    status = status_of(scene.client)
    assert status["path"] == "serialized"
    assert status["compute"]["summary"] == "serial (padded: no)"
    assert (status["compute"]["backend"], status["compute"]["fused"]) == ("serial", False)
    assert "compute" not in status["capabilities"]
    await scene.client.stop()


@in_loop
async def test_the_status_of_what_waits_and_runs():
    """D3."""
    scene = Scene(running=1)
    assert status_of(scene.client)["capabilities"] is None
    assert status_of(scene.client)["engine"]["last_step"] is None
    await scene.begin()
    with scene.reserve(rows=2) as reservation:
        waiting, running = scene.submit(reservation, 2)
        scene.admit(running, tokens=(1,), prompt_tokens_done=3)
        scene.clock.now += 2.0
        status = status_of(scene.client)
        assert (status["state"], status["ready"], status["path"]) == ("ready", True, "serialized")
        admission = status["admission"]
        assert (admission["running"], admission["waiting"], admission["oldest_wait_s"]) == (1, 1, 2.0)
        assert [request["phase"] for request in status["requests"]] == ["waiting", "decode"]
        assert {request["id"] for request in status["requests"]} == {"req-1"}
        of = {tenant: len(status_of(scene.client, tenant)["requests"]) for tenant in ("", "key a")}
        assert of == {"": 2, "key a": 0}, "its requests are of the tenant without a name"
        assert (status["engine"]["last_step"], status["engine"]["last_heard_s"]) == (1, 2.0)
        assert status["engine"]["statistics"]["steps"] == 1
        assert status["capabilities"]["context"] == CAN.context
        scene.finish(waiting)
        scene.finish(running)
    await scene.client.stop()
    assert (status_of(scene.client)["state"], scene.owner.sent[-1]) == ("stopped", Stop())
