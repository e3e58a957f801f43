"""The door: it admits or refuses at once, its books are exact, and it says when to come again."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from treadle.core.forecast import FIRST_GUESS_S, Lease
from treadle.core.gate import Gate, GateLimits
from treadle.core.gate_counters import WAIT_BUCKETS_S
from treadle.core.refusals import Refusal
from treadle.core.virtual_queue import Arrival
from treadle.errors import (
    Busy,
    ContextLengthExceeded,
    EngineUnavailable,
    InsufficientScope,
    InvalidRequest,
    NotAuthenticated,
    RateLimited,
    ServerStopping,
    TooManyWrongKeys,
    TreadleError,
)


def gate(running: int = 2, waiting: int = 1, tokens: int = 0) -> Gate:
    limits = GateLimits(running, waiting, max_wait_s=4.0, tokens=tokens)
    it = Gate(limits, EngineUnavailable("loading", retry_after_s=2.0))
    it.open_(limits)
    return it


SAME = 1  # a fingerprint: one client that comes again and again


def enter(it: Gate, rows: int = 1, tokens: int = 10, now: float = 0.0, prompts: int = 1) -> Lease:
    arrival = Arrival(fingerprint=SAME, repeat=True)
    return it.admit(rows=rows, tokens=tokens, now=now, arrival=arrival, prompts=prompts)


def look(it: Gate, now: float) -> None:
    it.check_room(now, Arrival(fingerprint=SAME, repeat=True))


# Coming and going


def test_it_is_closed_until_it_is_opened() -> None:
    """C1"""
    it = Gate(GateLimits(1, 1, 4.0), EngineUnavailable("loading", retry_after_s=2.0))
    with pytest.raises(EngineUnavailable, match="loading") as refusal:
        enter(it)
    assert refusal.value.retry_after_s == 2.0
    assert it.rows == 0
    it.open_(GateLimits(1, 1, 4.0))
    it.check_open(0.0)
    enter(it)


def test_closing_refuses_with_the_error_given_and_lets_those_inside_leave() -> None:
    """C3"""
    it = gate()
    lease = enter(it)
    it.close(ServerStopping("going down", retry_after_s=5.0))
    for ask in (lambda: enter(it), lambda: it.check_open(0.0)):
        with pytest.raises(ServerStopping, match="going down") as refusal:
            ask()
        assert refusal.value.retry_after_s == 5.0
    it.release(lease, "stop", 1.0)
    assert it.rows == 0
    assert it.statistics()["refused"] == {"server_stopping": 2}


def test_while_it_is_closed_retry_after_counts_down_to_when_it_should_open() -> None:
    """C2: who comes later during a restart is not told to wait for the whole of it."""
    it = gate()
    clock = [12.0]
    it.close(EngineUnavailable("restarting"), back_s=lambda: 20.0 - clock[0], now=12.0)

    def told(now: float) -> float | None:
        clock[0] = now
        with pytest.raises(EngineUnavailable) as refusal:
            it.check_room(now)
        return refusal.value.retry_after_s

    assert [told(now) for now in (12.0, 17.5, 19.0)] == pytest.approx([8.0, 2.5, 1.0], rel=0.04)
    with pytest.raises(EngineUnavailable) as refusal:
        it.check_open(19.0)
    assert (refusal.value.retry_after_s, refusal.value.ticket) == (1.0, ""), "nobody is known who comes back"


def test_each_refusal_is_an_error_of_its_own() -> None:
    closing = EngineUnavailable("loading")
    it = Gate(GateLimits(1, 1, 4.0), closing)
    with pytest.raises(EngineUnavailable) as refusal:
        enter(it)
    assert refusal.value is not closing


def test_running_and_waiting_places_are_taken_and_then_it_is_busy_at_once() -> None:
    """D1, D2"""
    it = gate(running=2, waiting=1)
    for _ in range(3):
        enter(it)
    with pytest.raises(Busy, match="every slot and every place in the queue is taken; try again in about") as refusal:
        enter(it)
    assert refusal.value.code == "text_generation_busy"
    assert refusal.value.retry_after_s == pytest.approx(FIRST_GUESS_S, rel=0.6)
    assert it.rows == 3


def test_a_look_at_the_door_takes_nothing() -> None:
    """D1: a refusal before anything is known of the request."""
    it = gate(running=1, waiting=0)
    look(it, 0.0)
    lease = enter(it)
    with pytest.raises(Busy):
        look(it, 0.0)
    it.release(lease, "stop", 1.0)
    look(it, 1.0)
    it.close(ServerStopping("stopping"))
    with pytest.raises(ServerStopping):
        look(it, 1.0)
    assert it.rows == 0
    assert it.statistics()["refused"] == {"queue_full": 1, "server_stopping": 1}


def test_no_waiting_places_refuse_all_that_can_not_run() -> None:
    it = gate(running=1, waiting=0)
    enter(it)
    with pytest.raises(Busy):
        enter(it)


def test_rows_are_counted_not_requests() -> None:
    it = gate(running=2, waiting=2)
    enter(it, rows=3)
    with pytest.raises(Busy):
        enter(it, rows=2)
    enter(it, rows=1)
    assert it.rows == 4


def test_more_rows_than_places_can_never_fit() -> None:
    it = gate(running=2, waiting=1)
    with pytest.raises(InvalidRequest, match=r"asks for 4 sequences .* holds 3 \(2 running and 1 waiting\)") as refusal:
        enter(it, rows=4)
    assert refusal.value.param == "n"
    with pytest.raises(InvalidRequest) as refusal:
        enter(it, rows=6, prompts=3)
    assert refusal.value.param == "n", "each prompt has two choices"
    with pytest.raises(InvalidRequest) as refusal:
        enter(it, rows=4, prompts=4)
    assert refusal.value.param == "prompt"
    assert it.statistics()["refused"] == {"too_many_rows": 3}


def test_tokens_are_reserved_and_given_back() -> None:
    it = gate(running=10, tokens=100)
    lease = enter(it, tokens=60)
    with pytest.raises(Busy, match="tokens of the requests at work leave no room"):
        enter(it, tokens=41)
    enter(it, tokens=40)
    assert it.tokens == 100
    it.release(lease, "stop", 1.0)
    assert it.tokens == 40
    assert it.statistics()["refused"] == {"tokens": 1}


def test_an_estimate_above_the_limit_is_taken_as_the_limit() -> None:
    it = gate(tokens=100)
    lease = enter(it, tokens=5000)
    assert lease.tokens == 100
    it.resize(lease, tokens=70, now=0.0)
    assert it.tokens == 70


def test_rows_of_a_visit_leave_one_by_one_with_their_part() -> None:
    it = gate(running=5, tokens=100)
    lease = enter(it, rows=3, tokens=100)
    left = []
    for _ in range(3):
        it.release(lease, "length", 1.0)
        left.append((it.rows, it.tokens))
    assert left == [(2, 67), (1, 34), (0, 0)]


# The exact size


def test_a_correction_replaces_the_estimate() -> None:
    it = gate(tokens=100)
    lease = enter(it, tokens=50)
    it.resize(lease, tokens=90, now=0.0)
    assert (it.tokens, lease.tokens) == (90, 90)
    it.resize(lease, tokens=10, now=0.0)
    assert (it.tokens, lease.tokens) == (10, 10)


def test_a_correction_that_no_longer_fits_is_busy_and_keeps_the_estimate() -> None:
    it = gate(tokens=100)
    enter(it, tokens=50)
    lease = enter(it, tokens=40)
    with pytest.raises(Busy) as refusal:
        it.resize(lease, tokens=51, now=0.0)
    assert refusal.value.retry_after_s is not None
    assert (it.tokens, lease.tokens) == (90, 40)
    it.release(lease, "unused", 0.0)
    assert it.tokens == 50


@pytest.mark.parametrize("rows", [1, 2])
def test_a_correction_that_can_never_fit_says_so(rows: int) -> None:
    it = gate(tokens=100)
    lease = enter(it, rows=rows, tokens=50)
    words = "maximum context length is 100 tokens. However, you requested 101 tokens"
    with pytest.raises(ContextLengthExceeded, match=words):
        it.resize(lease, tokens=101, now=0.0)
    assert it.tokens == 50
    assert it.statistics()["refused"] == {"too_long": 1}


def test_a_smaller_correction_fits_also_where_more_is_reserved_than_there_is() -> None:
    """The limit may have shrunk with a restart of the engine."""
    it = gate(tokens=100)
    enter(it, tokens=60)
    lease = enter(it, tokens=40)
    it.open_(GateLimits(2, 1, 4.0, tokens=70))
    it.resize(lease, tokens=30, now=0.0)
    assert it.tokens == 90


def test_without_a_token_limit_any_size_is_fine() -> None:
    it = gate(tokens=0)
    lease = enter(it, tokens=10**9)
    it.resize(lease, tokens=10**12, now=0.0)
    assert it.tokens == 10**12


# Books


def test_the_books_show_every_outcome() -> None:
    """D3"""
    it = gate(running=2, waiting=2, tokens=1000)
    for outcome in ("stop", "cancelled", "expired", "unused", "lost"):
        lease = enter(it)
        it.release(lease, outcome, 0.5)
    enter(it, rows=2, tokens=30)
    it.refuse(Refusal.WAIT_OVER)
    books = it.statistics()
    assert books["accepted"] == 7
    assert books["ended"] == {"stop": 1, "cancelled": 1, "expired": 1, "unused": 1, "lost": 1}
    assert books["refused"] == {"wait_over": 1}
    assert (books["rows"], books["tokens_reserved"]) == (2, 30)
    assert (books["capacity"], books["max_waiting"], books["max_wait_s"]) == (2, 2, 4.0)
    assert books["max_tokens_reserved"] == 1000


OF_FRONTS = {
    Refusal.RATE_LIMITED,
    Refusal.INSUFFICIENT_SCOPE,
    Refusal.NOT_AUTHENTICATED,
    Refusal.TOO_MANY_WRONG_KEYS,
}
OF_CONNECTIONS = {
    Refusal.CONNECTIONS,
    Refusal.PEER_CONNECTIONS,
    Refusal.CALLS,
    Refusal.PEER_CALLS,
    Refusal.STREAMS,
    Refusal.PEER_STREAMS,
    Refusal.MESSAGE_TIMEOUT,
    Refusal.BODY_BYTES,
}
"""Reasons for which the fronts refuse before a request comes to the gate."""


def test_each_refusal_is_told_with_the_reason_that_the_books_have() -> None:
    """D3: status and metrics count the same refusals in the same words."""
    told: list[Refusal] = []
    limits = GateLimits(running=1, waiting=1, max_wait_s=4.0, tokens=100)
    it = Gate(limits, EngineUnavailable("loading"), told.append)

    def refused(ask: Callable[[], object]) -> None:
        with pytest.raises(TreadleError):
            ask()

    refused(lambda: it.check_room(0.0))
    it.open_(limits)
    lease = enter(it, tokens=90)
    refused(lambda: enter(it, tokens=20))
    refused(lambda: enter(it, rows=3))
    refused(lambda: it.resize(lease, tokens=101, now=0.0))
    enter(it)
    refused(lambda: it.check_room(0.0))
    it.refuse(Refusal.WAIT_OVER)
    it.close(ServerStopping("going down"))
    refused(lambda: it.check_open(0.0))
    assert Counter(map(str, told)) == it.statistics()["refused"]
    others = {Refusal.WAIT_TOO_LONG, Refusal.PROMISED, Refusal.DISPLACED, Refusal.QUARANTINED, Refusal.TEXT_BUSY}
    others.add(Refusal.IMAGE_BUSY)
    assert {*told, *others} == {*Refusal} - OF_FRONTS - OF_CONNECTIONS, (
        "the tests of forecasts, promises, shares, replay, text workers and images have the others"
    )


def test_the_reasons_for_which_nothing_is_taken_are_the_codes_of_their_errors() -> None:
    assert (EngineUnavailable.code, ServerStopping.code) == (Refusal.ENGINE_UNAVAILABLE, Refusal.SERVER_STOPPING)
    kinds = (RateLimited, InsufficientScope, NotAuthenticated, TooManyWrongKeys)
    assert {kind.code for kind in kinds} == OF_FRONTS


def test_waits_are_told_by_length() -> None:
    it = gate(running=5)
    lease = enter(it, rows=5)
    for wait_s in (0.0, 0.01, 0.02, 7.0, 31.0):
        it.started(lease, wait_s, 0.0)
    told = it.statistics()["wait_s"]
    assert (told["count"], told["sum"]) == (5, 38.03)
    assert {top: n for top, n in told["buckets"].items() if n} == {"0.01": 2, "0.05": 1, "10.0": 1, "inf": 1}
    assert len(told["buckets"]) == len(WAIT_BUCKETS_S) + 1


@pytest.mark.parametrize("seed", range(30))
def test_the_books_are_exact_under_any_sequence(seed: int) -> None:
    chance = random.Random(seed)
    limits = GateLimits(chance.randint(1, 5), chance.randint(0, 5), 4.0, tokens=chance.choice((0, 200)))
    it = Gate(limits, EngineUnavailable("closed"))
    it.open_(limits)
    inside: list[Lease] = []
    entered = left = refused = 0
    for now in range(600):
        try:
            match chance.choice("eeelllc"):
                case "e":
                    rows = chance.randint(1, 3)
                    inside.append(it.admit(rows=rows, tokens=chance.randint(1, 120), now=now))
                    entered += rows
                case "c" if inside:
                    it.resize(chance.choice(inside), tokens=chance.randint(1, 260), now=now)
                case "l" if inside:
                    lease = chance.choice(inside)
                    it.release(lease, chance.choice(("stop", "cancelled", "unused", "expired")), now)
                    left += 1
        except TreadleError:
            refused += 1
        inside = [lease for lease in inside if lease.rows]
        assert it.rows == sum(lease.rows for lease in inside) == entered - left <= limits.places
        assert it.tokens == sum(lease.tokens for lease in inside)
        assert not limits.tokens or it.tokens <= limits.tokens
    books = it.statistics()
    assert books["accepted"] == entered
    assert sum(books["ended"].values()) == left
    assert sum(books["refused"].values()) == refused
    for lease in inside:
        for _ in range(lease.rows):
            it.release(lease, "stop", 1000)
    assert (it.rows, it.tokens) == (0, 0)
