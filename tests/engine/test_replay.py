"""Replay of sequences over scripted owners."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from tests.engine.test_client import HANG_S, Scene, read
from tests.support.aio import in_loop
from tests.support.owners import WAIT_S, FakeOwner, settle
from treadle.core.forecast import FIRST_GUESS_S
from treadle.core.messages import Cancel, CancelReason, FinishReason, Output, Submit, TokenLogprob
from treadle.engine import deaths as deaths_module
from treadle.engine import generation as generation_module
from treadle.engine import queue_timeout as waits_module
from treadle.engine import supervisor as supervisor_module
from treadle.engine.generation import Generation, max_unread_tokens
from treadle.engine.replay import in_flight
from treadle.engine.status import status_of
from treadle.engine.timeouts import Timeouts
from treadle.errors import Busy, EngineDied, EngineUnavailable, Quarantined, RequestCancelled, ServerStopping

CRASH, KILL = "killed by SIGABRT", "killed by SIGKILL"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(deaths_module, "BACKOFF_S", (0.0, 0.001))
    monkeypatch.setattr(supervisor_module, "KILL_GRACE_S", 0.05)


def ask(first: int, **fields: Any) -> Submit:
    return Submit(id="", prompt=(first, 2, 3), max_tokens=50, **fields)


def submits(owner: FakeOwner) -> list[Submit]:
    return [message for message in owner.sent if isinstance(message, Submit)]


def ids(owner: FakeOwner) -> list[str]:
    return [message.id for message in submits(owner)]


async def another(scene: Scene, how: str = CRASH, *, ready: bool = True) -> FakeOwner:
    """Let the engine die and the next one become ready."""
    scene.owner.end(how)
    scene.owner = await scene.yard.next()
    if ready:
        scene.owner.ready()
    return scene.owner


def cancels(owner: FakeOwner) -> list[str]:
    return [message.id for message in owner.sent if isinstance(message, Cancel)]


def gain(scene: Scene, generation: Generation, *tokens: int) -> None:
    scene.say(Output(id=generation.id, tokens=tokens))


@in_loop
async def test_what_ran_goes_on_from_its_tokens_and_what_waited_waits_on():
    """B7: their clients see a pause, and each token once."""
    scene = await Scene(running=1, waiting=3).begin()
    with scene.reserve() as first_one, scene.reserve(rows=2) as others:
        (running,) = first_one.submit([ask(1, logprobs=0, speculate=False, prediction=(4, 5))])
        waiting, later = others.submit([ask(2), ask(3)])
        scene.admit(running, tokens=(7, 8), logprobs=(TokenLogprob(-1.0),) * 2, cached_tokens=1)
        scene.clock.now += 1.5
        assert ids(await another(scene)) == [running.id], "the one that ran is tried first"
        again = submits(scene.owner)[0]
        assert (again.generated, again.resumed) == ((7, 8), True)
        assert (again.id, again.prompt, again.sampling) == (running.id, (1, 2, 3), running.request.sampling)
        assert (again.speculate, again.prediction) == (False, (4, 5))
        scene.admit(running, cached_tokens=3)
        gain(scene, running, 9, 10)
        first, second = submits(scene.owner)[1:]
        assert [first.id, second.id] == [waiting.id, later.id]
        assert (first.resumed, first.generated, first.max_wait_s) == (False, (), 2.5)
        scene.finish(running)
        deltas = await read(running)
        assert [token for delta in deltas for token in delta.tokens] == [7, 8, 9, 10]
        assert (running.cached_tokens, running.completion_tokens) == (1, 4), "what was told first holds"
        scene.admit(waiting)
        for generation in (waiting, later):
            scene.finish(generation)
    assert scene.notes.of("admitted") == [("chat", 0.25), ("chat", 0.25)], "once each"
    assert scene.notes.of("died") == [("crash",)]
    assert len(scene.notes.of("replayed")) == 3
    assert scene.free
    status = status_of(scene.client)["engine"]
    assert (status["deaths"]["crash"], status["replayed"], status["held"]) == (1, 3, 0)
    await scene.client.stop()


@in_loop
async def test_scores_of_a_prompt_that_were_told_are_counted_for_the_next_engine():
    scene = await Scene().begin()
    with scene.reserve() as reservation:
        (generation,) = reservation.submit([ask(1, prompt_logprobs=0)])
        scene.admit(generation, prompt_logprobs=(TokenLogprob(-1.0),))
        assert submits(await another(scene))[0].scored == 1
        scene.finish(generation)
    await scene.client.stop()


@in_loop
async def test_after_a_kill_by_an_operator_everything_goes_on_at_once():
    scene = await Scene(running=3).begin()
    with scene.reserve(rows=3) as reservation:
        generations = reservation.submit([ask(i) for i in range(3)])
        for generation in generations:
            scene.admit(generation, tokens=(1,))
        assert ids(await another(scene, KILL)) == [generation.id for generation in generations]
        for generation in generations:
            scene.finish(generation)
    assert scene.client.dispatch.quarantine.condemned == 0
    await scene.client.stop()


@in_loop
async def test_a_poison_is_found_and_refused_and_the_others_go_on(caplog):
    """D4: two restarts."""
    scene = await Scene(running=4).begin()
    with scene.reserve() as first, scene.reserve() as second, scene.reserve() as foe:
        (a,), (b,) = first.submit([ask(1)]), second.submit([ask(2)])
        scene.admit(a, tokens=(1,))
        scene.admit(b, tokens=(2,))
        (poison,) = foe.submit([ask(66)])
        scene.owner.joined.add(poison.id)
        assert ids(await another(scene)) == [poison.id], "new, and maybe in its first step: the likeliest"
        assert submits(scene.owner)[0].resumed, "its wait is over"
        assert ids(await another(scene)) == [a.id, b.id]
        with pytest.raises(Quarantined) as ended:
            await asyncio.wait_for(poison.admitted(), WAIT_S)
        assert (ended.value.http_status, ended.value.grpc_status) == (422, "FAILED_PRECONDITION")
        for generation in (a, b):
            gain(scene, generation, 5)
            scene.finish(generation)
            await read(generation)
        with scene.reserve() as again, pytest.raises(Quarantined):
            again.submit([ask(66)])
        with scene.reserve() as other:
            scene.finish(other.submit([ask(67)])[0])
    assert scene.free
    assert scene.ended == {"quarantined": 1, "length": 3, "unused": 1}
    assert scene.notes.of("refused") == [("request_quarantined",)]
    assert scene.notes.of("quarantined") == [()]
    status = status_of(scene.client)["engine"]
    assert (status["deaths_explained"], status["quarantined"], status["quarantine_size"]) == (2, 1, 1)
    await scene.client.stop()
    assert [line for record in caplog.records if "observer" not in (line := record.getMessage())] == [
        "engine lost (the engine process ended: killed by SIGABRT); starting it again in 0.0 s (restart 1); running "
        "requests pause until then, new ones get 503; a request that does this again is found and refused",
        "the engine is ready again (restart 1); sequences that go on with it: 3",
        "request req-1 took the engine down and is quarantined (deaths: 2); it and the same request again get 422 "
        "request_quarantined, for 60 min or until the server is restarted; report it with the lines above",
        "engine lost (the engine process ended: killed by SIGABRT); starting it again in 0.0 s (restart 2); running "
        "requests pause until then, new ones get 503; a request that does this again is found and refused",
        "the engine is ready again (restart 2); sequences that go on with it: 2",
    ]


@in_loop
async def test_copies_of_a_poison_end_with_it():
    """`n` of one request, or of several clients."""
    scene = await Scene(running=4).begin()
    with scene.reserve(rows=3) as reservation:
        copies = reservation.submit([ask(66)] * 2 + [ask(1)])
        scene.owner.joined |= {copy_.id for copy_ in copies}
        for _ in range(2):
            await another(scene)
            last = submits(scene.owner)[-1].id
            if last == copies[2].id and len(ids(scene.owner)) == 1:
                gain(scene, copies[2], 1, 2)
        await another(scene)
        for copy_ in copies[:2]:
            with pytest.raises(Quarantined):
                await read(copy_)
        scene.finish(copies[2])
    assert scene.free
    await scene.client.stop()


@in_loop
async def test_newcomers_are_held_back_while_a_suspect_is_tried():
    scene = await Scene(running=3, waiting=3).begin()
    with scene.reserve(rows=2) as reservation, scene.reserve() as late:
        a, b = reservation.submit([ask(1), ask(2)])
        scene.admit(a, tokens=(1,))
        scene.admit(b, tokens=(1,))
        assert ids(await another(scene)) == [b.id]
        (newcomer,) = late.submit([ask(3)])
        assert ids(scene.owner) == [b.id]
        assert status_of(scene.client)["engine"]["held"] == 2
        scene.finish(b)
        assert ids(scene.owner) == [b.id, a.id], "the end of the one on trial is the next one's turn"
        gain(scene, a, 5, 6)
        assert ids(scene.owner) == [b.id, a.id, newcomer.id]
        for generation in (a, newcomer):
            scene.finish(generation)
    assert scene.free
    await scene.client.stop()


@in_loop
async def test_one_cleared_runs_beside_the_next_trial():
    """The one that had joined last is tried alone; one that was not there goes on at once."""
    scene = await Scene(running=4).begin()
    with scene.reserve(rows=3) as reservation:
        a, b, c = reservation.submit([ask(1), ask(2), ask(3)])
        for generation in (a, b, c):
            scene.admit(generation, tokens=(1,))
        await another(scene)
        gain(scene, c, 2, 3)
        assert ids(scene.owner) == [c.id, b.id]
        assert ids(await another(scene)) == [a.id, b.id], "both were in flight at each death, a was not"
        gain(scene, b, 2, 3)
        assert ids(scene.owner) == [a.id, b.id, c.id]
        assert ids(await another(scene)) == [a.id, b.id], "of b and c, b had passed beside a: it was c"
        with pytest.raises(Quarantined):
            await read(c)
        for generation in (a, b):
            scene.finish(generation)
    await scene.client.stop()


@in_loop
async def test_after_a_trial_all_keep_their_seniority():
    """Suspects are sent the newest first, which must not turn round who gives way to whom."""
    scene = await Scene(running=3).begin()
    with scene.reserve(rows=3) as reservation:
        generations = reservation.submit([ask(i) for i in range(3)])
        for generation in generations:
            scene.admit(generation, tokens=(1,))
        await another(scene)
        for generation in reversed(generations):
            gain(scene, generation, 2, 3)
        assert ids(scene.owner) == [generation.id for generation in reversed(generations)]
        assert [submit.arrival for submit in submits(scene.owner)] == [3, 2, 1]
        for generation in generations:
            scene.finish(generation)
    await scene.client.stop()


@pytest.mark.parametrize("how", ["told", "not told"])
@in_loop
async def test_a_group_that_had_begun_has_begun(how):
    """D2: the others' waits do not end, also where the one that ran has ended."""
    scene = await Scene(running=1, waiting=1).begin()
    with scene.reserve(rows=2) as reservation:
        ran, waits = reservation.submit([ask(1), ask(2)])
        if how == "told":
            scene.admit(ran)
            scene.finish(ran)
        scene.owner.joined.add(ran.id)
        await another(scene)
        if how == "not told":
            scene.finish(ran)
        assert submits(scene.owner)[-1].id == waits.id
        assert submits(scene.owner)[-1].resumed
        scene.finish(waits)
    assert scene.free
    await scene.client.stop()


@in_loop
async def test_what_no_step_contained_is_nobodys_fault():
    """D4: it was sent to an engine that died or hung before it took it in, however often."""
    scene = await Scene().begin()
    with scene.reserve() as reservation:
        (innocent,) = reservation.submit([ask(1)])
        for _ in range(3):
            await another(scene)
        assert [submit.resumed for submit in submits(scene.owner)] == [False]
        scene.finish(innocent)
        await read(innocent)
    assert scene.client.dispatch.quarantine.condemned == 0
    await scene.client.stop()


# While the engine is away ------------------------------------------------------------------------------------------


@in_loop
async def test_cancels_during_an_outage_are_honoured_at_once():
    """B3, B6: also those that the lost engine did not come to apply, and a stop string's, which is a good end."""
    scene = await Scene(running=4).begin()
    with scene.reserve(rows=4) as reservation:
        early, left, stopped, stays = reservation.submit([ask(i) for i in range(4)])
        for generation in (early, left, stopped, stays):
            scene.admit(generation, tokens=(1,))
        early.cancel()
        await another(scene, KILL, ready=False)
        assert early.ended
        left.cancel()
        stopped.cancel(CancelReason.STOP)
        assert scene.client.busy == 1
        with pytest.raises(RequestCancelled):
            await read(left)
        assert (await read(stopped))[-1].finish.reason is FinishReason.STOP  # type: ignore[union-attr]
        scene.owner.ready()
        assert ids(scene.owner) == [stays.id]
        assert not any(isinstance(message, Cancel) for message in scene.owner.sent)
        scene.finish(stays)
    assert scene.free
    assert scene.ended == {"cancelled": 2, "stop": 1, "length": 1}
    await scene.client.stop()


@in_loop
async def test_a_reader_that_stalled_does_not_come_back(monkeypatch):
    monkeypatch.setattr(generation_module, "MAX_UNREAD_BYTES", 4000)
    scene = await Scene().begin()
    with scene.reserve() as reservation:
        (generation,) = reservation.submit([ask(1)])
        scene.admit(generation, tokens=(1,) * (max_unread_tokens(None) + 1))
        assert ids(await another(scene, KILL)) == []
    assert scene.free
    await scene.client.stop()


# Suspects whose clients have left ----------------------------------------------------------------------------------


@pytest.mark.parametrize("left", ["in flight", "held", "on trial"])
@in_loop
async def test_a_poison_whose_client_leaves_is_found(left):
    """D4: its client is told at once, whenever it leaves; the place stays taken until the verdict."""
    scene = await Scene(running=2).begin()
    with scene.reserve() as reservation, scene.reserve() as other:
        (innocent,), (poison,) = other.submit([ask(1)]), reservation.submit([ask(66)])
        for generation in (innocent, poison):
            scene.admit(generation, tokens=(1,))
        if left == "in flight":
            poison.cancel()
            assert cancels(scene.owner) == [poison.id]
        await another(scene, ready=False)
        if left == "held":
            poison.cancel()
        scene.owner.ready()
        assert ids(scene.owner) == [poison.id]
        poison.cancel()
        with pytest.raises(RequestCancelled):
            await read(poison)
        assert (cancels(scene.owner), scene.client.busy) == ([], 2)
        assert ids(await another(scene)) == [innocent.id]
        assert (scene.client.dispatch.quarantine.condemned, scene.client.busy) == (1, 1)
        scene.finish(innocent)
    assert scene.free
    assert scene.ended == {"quarantined": 1, "length": 1}
    await scene.client.stop()


@in_loop
async def test_a_suspect_whose_client_has_left_is_taken_back_once_it_has_passed():
    """What it gains meanwhile is kept for the next engine and not for a reader."""
    scene = await Scene(running=2).begin()
    with scene.reserve() as reservation, scene.reserve() as other:
        (stays,), (gone,) = other.submit([ask(2)]), reservation.submit([ask(1)])
        for generation in (stays, gone):
            scene.admit(generation, tokens=(1,))
        gone.cancel()
        assert ids(await another(scene)) == [gone.id]
        gain(scene, gone, 2)
        assert (gone.completion_tokens, cancels(scene.owner)) == (2, [])
        gain(scene, gone, 3)
        assert cancels(scene.owner) == [gone.id]
        assert ids(scene.owner) == [gone.id, stays.id]
        assert scene.owner.sent.index(Cancel(id=gone.id)) == 1, "before the next one joins it"
        gain(scene, gone, 4, 5)
        scene.finish(gone, FinishReason.CANCELLED)
        assert scene.client.busy == 1
        with pytest.raises(RequestCancelled):
            await read(gone)
        scene.finish(stays)
    assert scene.free
    assert scene.ended == {"cancelled": 1, "length": 1}
    await scene.client.stop()


@in_loop
async def test_a_trial_that_goes_to_its_end_without_a_client_keeps_the_clients_outcome():
    """A stop string's, which is a good end."""
    scene = await Scene().begin()
    with scene.reserve() as reservation:
        (generation,) = reservation.submit([ask(1)])
        scene.admit(generation, tokens=(1,))
        generation.cancel(CancelReason.STOP)
        await another(scene)
        assert (await read(generation))[-1].finish.reason is FinishReason.STOP  # type: ignore[union-attr]
        scene.finish(generation)
    assert scene.free
    assert scene.ended == {"stop": 1}
    await scene.client.stop()


@in_loop
async def test_one_that_was_turned_away_from_the_deadly_step_is_tried(monkeypatch):
    """D2, D4: its wait was over before the engine, which hung in its first step, was given up."""
    monkeypatch.setattr(waits_module, "SLACK_S", 0.01)
    scene = await Scene(max_wait_s=0.01).begin()
    with scene.reserve() as reservation:
        (poison,) = reservation.submit([ask(66)])
        scene.owner.joined.add(poison.id)
        with pytest.raises(Busy):
            await asyncio.wait_for(poison.admitted(), WAIT_S)
        assert ids(await another(scene)) == [poison.id]
        await another(scene)
    assert scene.free
    assert (scene.ended, scene.client.dispatch.quarantine.condemned) == ({"quarantined": 1}, 1)
    await scene.client.stop()


@in_loop
async def test_a_drain_does_not_wait_for_trials_without_a_client():
    """C3: neither for one that is held nor for the one that runs."""
    scene = await Scene(running=3).begin()
    with scene.reserve(rows=3) as reservation:
        held, stays, tried = reservation.submit([ask(1), ask(2), ask(3)])
        for generation in (held, stays, tried):
            scene.admit(generation, tokens=(1,))
        held.cancel()
        assert ids(await another(scene)) == [tried.id]
        tried.cancel()
        assert (cancels(scene.owner), scene.client.busy) == ([], 3)
        scene.client.drain()
        assert (cancels(scene.owner), scene.client.busy) == ([tried.id], 2)
        scene.finish(tried, FinishReason.CANCELLED)
        assert ids(scene.owner) == [tried.id, stays.id]
        scene.finish(stays)
        await asyncio.wait_for(scene.client.idle(), WAIT_S)
    assert scene.free
    assert scene.ended == {"cancelled": 2, "length": 1}
    await scene.client.stop()


@in_loop
async def test_a_death_while_it_drains_ends_who_has_no_client():
    """C3."""
    scene = await Scene(running=2).begin()
    with scene.reserve(rows=2) as reservation:
        stays, gone = reservation.submit([ask(1), ask(2)])
        for generation in (stays, gone):
            scene.admit(generation, tokens=(1,))
        scene.client.drain()
        gone.cancel()
        assert ids(await another(scene)) == [stays.id]
        stays.cancel()
        assert cancels(scene.owner) == [stays.id]
        scene.finish(stays, FinishReason.CANCELLED)
        await asyncio.wait_for(scene.client.idle(), WAIT_S)
    assert scene.free
    await scene.client.stop()


@in_loop
async def test_kills_from_outside_keep_nobody_without_a_client():
    """They prove nothing, so there is nothing to find out about it."""
    scene = await Scene(running=2).begin()
    with scene.reserve(rows=2) as reservation:
        early, late = reservation.submit([ask(1), ask(2)])
        for generation in (early, late):
            scene.admit(generation, tokens=(1,))
        await another(scene, KILL)
        early.cancel()
        assert ids(await another(scene, KILL, ready=False)) == []
        assert scene.client.busy == 1
        late.cancel()
        assert scene.client.busy == 0
        scene.owner.ready()
    assert scene.free
    await scene.client.stop()


@in_loop
async def test_a_stop_ends_trials_without_a_client():
    """C3."""
    scene = await Scene().begin()
    with scene.reserve() as reservation:
        (generation,) = reservation.submit([ask(1)])
        scene.admit(generation, tokens=(1,))
        generation.cancel()
        await another(scene, ready=False)
        with pytest.raises(RequestCancelled):
            await read(generation)
        assert scene.client.busy == 1
        await asyncio.wait_for(scene.client.stop(), WAIT_S)
    assert scene.free
    assert scene.ended == {"cancelled": 1}


@in_loop
async def test_a_wait_that_ends_during_an_outage_is_told_when_the_engine_is_expected(monkeypatch):
    """D2: an outage does not lengthen a wait. One that ran is not asked."""
    monkeypatch.setattr(waits_module, "SLACK_S", 0.1)
    scene = await Scene(running=1, waiting=2, max_wait_s=0.02).begin()
    with scene.reserve() as first, scene.reserve() as second:
        (running,) = first.submit([ask(1)])
        scene.admit(running, tokens=(1,))
        (waiting,) = second.submit([ask(2)])
        await another(scene, ready=False)
        with pytest.raises(EngineUnavailable, match="restarting") as refused:
            await asyncio.wait_for(waiting.admitted(), WAIT_S)
        left_s, told_s = scene.client.supervisor.outage.left_s(), refused.value.retry_after_s
        assert told_s is not None
        assert left_s < told_s < left_s + 3 * FIRST_GUESS_S, "then it is the turn of those before it"
        assert refused.value.ticket, "its place in line is kept"
        assert scene.client.busy == 1, "nobody has it: its place is free"
        scene.owner.ready()
        assert ids(scene.owner) == [running.id]
        scene.finish(running)
    assert scene.notes.of("refused") == [("engine_unavailable",)]
    await scene.client.stop()


@in_loop
async def test_a_wait_that_ends_during_a_trial_is_a_busy_server(monkeypatch):
    monkeypatch.setattr(waits_module, "SLACK_S", 0.1)
    scene = await Scene(running=2, waiting=2, max_wait_s=0.02).begin()
    with scene.reserve() as first, scene.reserve() as second:
        (running,) = first.submit([ask(1)])
        scene.admit(running, tokens=(1,))
        await another(scene)
        (waiting,) = second.submit([ask(2)])
        with pytest.raises(Busy):
            await asyncio.wait_for(waiting.admitted(), WAIT_S)
        scene.finish(running)
    assert scene.free
    await scene.client.stop()


@in_loop
async def test_an_idle_engine_that_hangs_is_unavailable_to_its_first_request(monkeypatch):
    """D21: not busy. When to come again counts the rest of its patience, and a load."""
    monkeypatch.setattr(waits_module, "SLACK_S", 0.1)
    scene = Scene(max_wait_s=0.02, deaf=True)
    scene.client.supervisor._timeouts = Timeouts(1e6, 100.0)
    scene.client.supervisor._heartbeat.hang_after_s = 1e6
    await scene.begin()
    scene.clock.now += 1.0
    with scene.reserve() as reservation:
        (generation,) = reservation.submit([ask(1)])
        with pytest.raises(EngineUnavailable, match="does not answer") as refused:
            await asyncio.wait_for(generation.admitted(), WAIT_S)
        assert refused.value.retry_after_s == pytest.approx(1e6, rel=0.01)
        assert scene.client.busy == 1, "the owner has it"
        scene.finish(generation, FinishReason.CANCELLED)
    assert scene.free
    await scene.client.stop()


@in_loop
async def test_a_stop_during_an_outage_ends_everyone_once():
    """C3."""
    scene = await Scene(running=2).begin()
    with scene.reserve() as reservation:
        (generation,) = reservation.submit([ask(1)])
        scene.admit(generation, tokens=(1,))
        await another(scene, ready=False)
        await asyncio.wait_for(scene.client.stop(), WAIT_S)
        with pytest.raises(ServerStopping):
            await read(generation)
    assert scene.free
    assert scene.ended == {"lost": 1}


@in_loop
async def test_starts_that_fail_for_good_end_what_was_held():
    """B7: one terminal error."""
    scene = await Scene(running=1, waiting=2).begin()
    with scene.reserve(rows=2) as reservation:
        running, waiting = reservation.submit([ask(1), ask(2)])
        scene.admit(running, tokens=(1,))
        for _ in range(supervisor_module.MAX_FAILED_STARTS):
            await another(scene, ready=False)
            assert not running.ended
        scene.owner.end()
        await asyncio.wait_for(scene.client.supervisor.failed(), WAIT_S)
        with pytest.raises(EngineDied):
            await read(running)
        with pytest.raises(EngineUnavailable):
            await read(waiting)
    assert scene.free
    await scene.client.stop()


@in_loop
async def test_a_sequence_that_is_killed_each_time_it_is_alone_is_given_up(caplog):
    """Without a proof: the same request is taken again."""
    scene = await Scene().begin()
    with scene.reserve() as reservation:
        (generation,) = reservation.submit([ask(66)])
        scene.admit(generation, tokens=(1,))
        for _ in range(5):
            await another(scene, KILL)
        with pytest.raises(EngineDied, match="out of memory"):
            await read(generation)
    with scene.reserve() as again:
        scene.finish(again.submit([ask(66)])[0])
    assert scene.free
    assert scene.client.dispatch.quarantine.condemned == 0
    await scene.client.stop()
    assert all("memory ran out" in record.getMessage() for record in caplog.records if "lost" in record.getMessage())
    (line,) = [record.getMessage() for record in caplog.records if "engine_died" in record.getMessage()]
    assert "memory ran out" in line


@in_loop
async def test_a_hang_is_a_death_like_another():
    """C4."""
    scene = await Scene().begin()
    with scene.reserve() as reservation:
        (generation,) = reservation.submit([ask(66)])
        scene.admit(generation, tokens=(1,))
        for _ in range(2):
            scene.clock.now += HANG_S * 2
            scene.owner = await scene.yard.next()
            scene.owner.ready()
        with pytest.raises(Quarantined):
            await read(generation)
    assert scene.notes.of("died") == [("hang",), ("hang",)]
    await scene.client.stop()


@in_loop
async def test_a_job_is_lost_with_its_engine():
    scene = await Scene().begin()
    job = asyncio.create_task(scene.client.jobs.run("echo"))
    await settle()
    await another(scene, ready=False)
    with pytest.raises(EngineDied, match="SIGABRT"):
        await asyncio.wait_for(job, WAIT_S)
    with pytest.raises(EngineUnavailable) as refused:
        await scene.client.jobs.run("echo")
    assert refused.value.retry_after_s is not None
    await scene.client.stop()


@in_loop
async def test_a_place_whose_caller_was_answered_comes_free_with_the_engine(monkeypatch):
    monkeypatch.setattr(waits_module, "SLACK_S", 0.1)
    scene = await Scene(running=1, waiting=2, max_wait_s=0.02).begin()
    with scene.reserve() as first, scene.reserve() as second:
        (running,) = first.submit([ask(1)])
        scene.admit(running, tokens=(1,))
        (waiting,) = second.submit([ask(2)])
        with pytest.raises(Busy):
            await asyncio.wait_for(waiting.admitted(), WAIT_S)
        assert scene.client.busy == 2, "the owner, stuck in a step, has not given it back"
        await another(scene)
        assert scene.client.busy == 1
        scene.finish(running)
    assert scene.free
    await scene.client.stop()


# Who was in flight -------------------------------------------------------------------------------------------------


def test_the_likeliest_culprit_comes_first():
    """Those that were not told, then prompts, then what decodes, the newest first; who only waited is none of them."""

    def generation(i: int, tokens: int | None, **fields: Any) -> Generation:
        request = msgspec.structs.replace(ask(i, **fields), id=str(i), arrival=i + 1)
        made = Generation(request, kind="chat", tag="t", now=0.0, cancel=lambda *_: None)
        if tokens is not None:
            made.push(Output(id=str(i), admitted=True, tokens=tuple(range(tokens))), 1.0)
        return made

    crowd = [
        generation(0, 4),
        generation(1, 0),
        generation(2, 9),
        generation(3, 0),
        generation(4, None, priority=5),
        generation(5, None),
        generation(6, None),
    ]
    assert [g.id for g in in_flight(crowd, {1, 2, 3, 4, 6, 7})] == ["6", "5", "3", "1", "2", "0"]
    assert [g.id for g in in_flight(crowd, {1, 2, 5, 99})] == ["4", "1", "0"]


def test_accepted_drafts_are_counted_up_to_any_token():
    """A step gives its accepted drafts, the token behind them, and those that a grammar forces. The engine that follows
    goes on behind them."""
    request = msgspec.structs.replace(ask(0), id="0", arrival=1)
    made = Generation(request, kind="chat", tag="t", now=0.0, cancel=lambda *_: None)
    made.push(Output(id="0", admitted=True, tokens=(1,)), 1.0)
    made.push(Output(id="0", tokens=(2, 3, 4, 5, 6), drafted=4, accepted=2), 1.0)
    made.push(Output(id="0", tokens=(7,), drafted=3), 1.0)
    made.track(Output(id="0", tokens=(8, 9), drafted=1, accepted=1))
    assert [made.accepted_among(tokens) for tokens in range(10)] == [0, 0, 1, 2, 2, 2, 2, 2, 3, 3]
    assert made.drafted == 8
