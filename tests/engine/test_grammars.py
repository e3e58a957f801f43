"""Constrained sequences in the engine's loop: its sleep while grammars are compiled, its suspects, and its client."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import pytest

from tests.engine.test_loop import Hand, ask, expected
from tests.support.aio import in_loop
from tests.support.faults import WAIT_S, FaultyRunner, builds
from treadle.core.grammar_state import PENDING, READY, GrammarState, GrammarStatus
from treadle.core.messages import Cancel, Constraint, Finish, FinishReason, Ping, Stop, Stopped, Submit, WaitReason
from treadle.engine.admission import AdmissionLimits
from treadle.engine.client import EngineClient
from treadle.engine.in_flight_table import InFlightTable
from treadle.engine.inline import InlineOwner
from treadle.engine.loop import EngineLoop
from treadle.engine.mailbox import Mailbox
from treadle.engine.owner import OwnerLimits, scheduler_for
from treadle.engine.status import status_of
from treadle.engine.thread import ThreadOwner
from treadle.errors import Busy, InvalidGrammar

GRAMMAR = Constraint(kind="lark", grammar="start: /a/", param="structured_outputs.grammar")
FAILED = GrammarStatus(GrammarState.FAILED, "line 1: unknown name")


class CompilingHand(Hand):
    """A hand whose runner knows no grammar yet."""

    def __init__(self, max_running: int = 4) -> None:
        super().__init__(max_running)
        self.runner.grammars[GRAMMAR.grammar] = PENDING

    def compiled(self, status: GrammarStatus = READY) -> CompilingHand:
        self.runner.grammars[GRAMMAR.grammar] = status
        self.runner.grammar_changed()
        return self


def test_a_sequence_waits_for_its_grammar_and_is_no_work_meanwhile() -> None:
    hand = CompilingHand()
    hand.put(ask("a", constraint=GRAMMAR)).step()
    assert not hand.loop.has_work
    assert hand.loop.scheduler.live == 1
    assert [output.waits_for for output in hand.outputs] == [WaitReason.GRAMMAR]
    hand.compiled().step().until_idle()
    assert hand.tokens("a") == expected(ask("a"))


def test_a_grammar_that_fails_is_the_requests_fault() -> None:
    hand = CompilingHand()
    hand.put(ask("a", constraint=GRAMMAR)).step()
    hand.compiled(FAILED).step()
    assert hand.end("a") == Finish(reason=FinishReason.ERROR, code="invalid_grammar", message="line 1: unknown name")
    assert hand.runner.steps == 0


def test_the_table_names_it_before_its_grammar_is_asked_for() -> None:
    table = InFlightTable()
    runner = FaultyRunner()
    seen: list[frozenset[int]] = []

    def looks(constraint: Constraint) -> GrammarStatus:
        seen.append(table.read())
        return PENDING

    scheduler = scheduler_for(runner.capabilities(), OwnerLimits(2, 64), runner.match_prefix, looks)
    mailbox = Mailbox()
    loop = EngineLoop(runner, scheduler, mailbox, lambda message: None, lambda: 0.0, table)
    mailbox.put(ask("a", constraint=GRAMMAR, arrival=7))
    loop.run_once()
    assert seen == [{7}]


def test_the_wait_for_messages_ends_when_the_next_one_expires() -> None:
    hand = CompilingHand()
    assert hand.loop.grammar_wait_s is None
    hand.put(ask("a", constraint=GRAMMAR)).step()
    hand.now = 59.0
    assert hand.loop.grammar_wait_s == 1.0
    hand.now = 61.0
    assert hand.loop.grammar_wait_s == 0.0
    hand.step()
    assert hand.end("a").reason is FinishReason.EXPIRED
    assert hand.loop.grammar_wait_s is None


class Running:
    """A loop that runs on a thread, with a runner whose grammar is not compiled. `turns` counts its iterations."""

    def __init__(self) -> None:
        self.hand = CompilingHand()
        self.turns = 0
        loop = self.hand.loop
        loop._clock = time.monotonic
        once = loop.run_once

        def counted(wait_s: float | None = 0.0) -> None:
            self.turns += 1
            once(wait_s)

        loop.run_once = counted  # type: ignore[method-assign]
        self.thread = threading.Thread(target=loop.run)
        self.thread.start()

    def until(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not holds():
            assert time.monotonic() < deadline, "not reached"
            time.sleep(0.001)

    def stop(self) -> None:
        self.hand.put(Stop())
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()
        assert isinstance(self.hand.said[-1], Stopped)


@pytest.fixture
def running() -> Running:
    return Running()


def test_the_idle_loop_sleeps_and_is_woken_by_a_compiled_grammar(running: Running) -> None:
    hand = running.hand
    hand.put(ask("a", constraint=GRAMMAR))
    running.until(lambda: bool(hand.outputs))
    turns = running.turns
    time.sleep(0.05)
    assert running.turns - turns <= 1, "it does not turn without a rest"
    hand.compiled()
    running.until(lambda: bool(hand.ends("a")))
    assert hand.tokens("a") == expected(ask("a"))
    running.stop()


def test_the_sleeping_loop_takes_messages_and_expires_in_time(running: Running) -> None:
    hand = running.hand
    hand.put(Submit(id="a", prompt=(1,), max_tokens=1, constraint=GRAMMAR, max_wait_s=0.2))
    hand.put(ask("b", constraint=GRAMMAR))
    running.until(lambda: len(hand.outputs) == 2)
    hand.put(Ping(), Cancel(id="b"))
    running.until(lambda: bool(hand.ends("b")))
    running.until(lambda: bool(hand.ends("a")))
    assert hand.end("a").reason is FinishReason.EXPIRED
    running.stop()


def test_a_stop_ends_a_sequence_that_waits_for_its_grammar(running: Running) -> None:
    running.hand.put(ask("a", constraint=GRAMMAR))
    running.until(lambda: bool(running.hand.outputs))
    running.stop()
    assert running.hand.end("a").code == "server_stopping"


def test_a_wake_is_not_lost_if_nobody_waits_yet() -> None:
    mailbox = Mailbox()
    mailbox.wake()
    assert mailbox.wait(WAIT_S)
    assert mailbox.take(None) == []
    assert not mailbox.wait(0.001)


# The client ---------------------------------------------------------------------------------------------------------

REQUEST = Submit(id="", prompt=(1, 2), max_tokens=3, constraint=GRAMMAR)


@pytest.mark.parametrize("threaded", [False, True])
@in_loop
async def test_the_client_shows_why_it_waits_and_raises_for_a_wrong_grammar(threaded: bool) -> None:
    runner = FaultyRunner()
    runner.grammars[GRAMMAR.grammar] = PENDING
    limits = OwnerLimits(max_running=2, prefill_tokens=64)
    client = EngineClient(
        lambda: ThreadOwner(builds(runner), limits) if threaded else InlineOwner(builds(runner), limits, pump=True),
        AdmissionLimits(2, 2, 5.0),
    )
    await asyncio.wait_for(client.start(), WAIT_S)
    for status in (READY, FAILED):
        runner.grammars[GRAMMAR.grammar] = PENDING
        with client.reserve(rows=1, prompt_tokens=2, completion_tokens=3, kind="chat", tag="t") as reservation:
            (generation,) = reservation.submit([REQUEST])
            async with asyncio.timeout(WAIT_S):
                while status_of(client)["requests"][0]["waits_for"] != "grammar":
                    await asyncio.sleep(0.001)
                assert status_of(client)["engine"]["statistics"]["awaiting_grammar"] == 1
                runner.grammars[GRAMMAR.grammar] = status
                threading.Thread(target=runner.grammar_changed).start()
                if status is FAILED:
                    with pytest.raises(InvalidGrammar, match="unknown name") as raised:
                        await generation.admitted()
                    assert raised.value.param == GRAMMAR.param
                else:
                    await generation.admitted()
                    assert all(request["waits_for"] is None for request in status_of(client)["requests"])
                    assert len([token async for delta in generation for token in delta.tokens]) == 3
    await client.stop()


@in_loop
async def test_an_inline_owner_that_pumps_expires_it_in_time() -> None:
    runner = FaultyRunner()
    runner.grammars[GRAMMAR.grammar] = PENDING
    limits = OwnerLimits(max_running=2, prefill_tokens=64)
    client = EngineClient(lambda: InlineOwner(builds(runner), limits, pump=True), AdmissionLimits(2, 2, 0.05))
    await asyncio.wait_for(client.start(), WAIT_S)
    with client.reserve(rows=1, prompt_tokens=2, completion_tokens=3, kind="chat", tag="t") as reservation:
        (generation,) = reservation.submit([REQUEST])
        with pytest.raises(Busy):
            await asyncio.wait_for(generation.admitted(), WAIT_S)
    await client.stop()
