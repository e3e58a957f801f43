"""The limits of one API key."""

from __future__ import annotations

import pytest

from treadle.errors import (
    Busy,
    EngineUnavailable,
    InvalidRequest,
    Quarantined,
    RateLimited,
    RequestCancelled,
    ServerStopping,
    TreadleError,
)
from treadle.fronts.accounts import Account, Bucket
from treadle.keys import KeyLimits
from treadle.telemetry.access_log import RequestRecord


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def record(name: str = "r") -> RequestRecord:
    return RequestRecord(id=name, method="POST", path="/", started=0.0, public_id=name)


def account(clock: Clock, **limits: int) -> Account:
    return Account("alice", KeyLimits(**limits), clock.now)


def served(it: Account, clock: Clock, *, rows: int = 1, tokens: int = 0, prompt: int = 0, answer: int = 0) -> None:
    line = record()
    with it.serve(line, rows=rows, tokens=tokens, clock=clock):
        line.prompt_tokens, line.completion_tokens = prompt, answer


def test_a_bucket_holds_one_minute_and_refills_steadily() -> None:
    bucket = Bucket(60, 0.0)
    assert bucket.level(1000.0) == 60
    bucket.take(60, 1000.0)
    assert bucket.seconds_until(1.0, 1000.0) == pytest.approx(1.0)
    assert bucket.level(1000.5) == pytest.approx(0.5)
    bucket.take(-100, 1001.0)
    assert bucket.level(1001.0) == 60, "never more than it holds"
    assert bucket.seconds_until(1.0, 1001.0) == 0


def test_requests_a_minute() -> None:
    clock = Clock()
    it = account(clock, requests_per_minute=2)
    for _ in range(2):
        served(it, clock)
    with pytest.raises(RateLimited, match="'alice' has used its 2 requests a minute") as raised:
        it.check(clock.now)
    assert raised.value.retry_after_s == pytest.approx(30.0)
    clock.now += 30.0
    served(it, clock)
    with pytest.raises(RateLimited):
        served(it, clock)
    assert it.usage().refused == 2
    assert it.usage().requests == 3


def test_tokens_a_minute_are_charged_as_they_are_known() -> None:
    clock = Clock()
    it = account(clock, tokens_per_minute=600)
    line = record()
    with it.serve(line, rows=1, tokens=500, clock=clock):
        it.check(clock.now)
        served(it, clock, tokens=200)  # the level is below zero while both run
        line.prompt_tokens, line.completion_tokens = 450, 250
    with pytest.raises(RateLimited, match="600 tokens a minute") as raised:
        it.check(clock.now)
    assert raised.value.retry_after_s == pytest.approx((1 + 100) / 10)
    clock.now += 11
    it.check(clock.now)
    assert it.usage().tokens == 700


def test_what_is_known_before_the_end_is_charged_once() -> None:
    clock = Clock()
    it = account(clock, tokens_per_minute=600)
    line = record()
    with it.serve(line, rows=1, tokens=500, clock=clock) as settle:
        line.prompt_tokens, line.completion_tokens = 450, 50
        for _ in range(2):
            settle()
            assert it.headers(clock.now)[1] == (b"x-ratelimit-remaining-tokens", b"100")
        line.completion_tokens = 60
    assert it.headers(clock.now)[1] == (b"x-ratelimit-remaining-tokens", b"90")


def test_what_was_charged_before_a_refusal_is_given_back() -> None:
    clock = Clock()
    it = account(clock, tokens_per_minute=600)
    line = record()

    def refused() -> None:
        with it.serve(line, rows=1, tokens=20, clock=clock) as settle:
            line.prompt_tokens = 30
            settle()
            raise Busy("no place")

    with pytest.raises(Busy):
        refused()
    assert it.headers(clock.now)[1] == (b"x-ratelimit-remaining-tokens", b"600")
    assert it.usage().tokens == 0


def test_a_prompt_longer_than_a_minutes_worth_is_served_once_the_bucket_is_full() -> None:
    clock = Clock()
    it = account(clock, tokens_per_minute=10)
    served(it, clock, tokens=1000, prompt=1000)
    with pytest.raises(RateLimited) as raised:
        it.check(clock.now)
    assert raised.value.retry_after_s == pytest.approx(991 * 6)


def test_sequences_at_once() -> None:
    clock = Clock()
    it = account(clock, max_running=2)
    with it.serve(record("a"), rows=2, tokens=1, clock=clock):
        assert it.usage().running == 2
        with pytest.raises(RateLimited, match="has 2 sequences, of 2"):
            it.check(clock.now)
    assert it.usage().running == 0
    with pytest.raises(InvalidRequest, match="asks for 3 sequences and this API key may run 2") as raised:
        it.check(clock.now, rows=3)
    assert raised.value.param == "n"
    with pytest.raises(InvalidRequest) as raised:
        it.check(clock.now, rows=3, prompts=3)
    assert raised.value.param == "prompt"


def test_a_request_that_fails_gives_back_what_it_did_not_use() -> None:
    clock = Clock()
    it = account(clock, tokens_per_minute=100, max_running=1)
    with pytest.raises(KeyError), it.serve(record(), rows=1, tokens=90, clock=clock):
        raise KeyError
    assert it.headers(clock.now)[1] == (b"x-ratelimit-remaining-tokens", b"100")
    it.check(clock.now)


@pytest.mark.parametrize("error", [Busy, EngineUnavailable, ServerStopping, Quarantined])
def test_a_request_that_was_turned_away_gives_all_of_it_back(error: type[TreadleError]) -> None:
    clock = Clock()
    it = account(clock, requests_per_minute=1, tokens_per_minute=100)
    line = record()
    line.prompt_tokens = 95  # it was tokenized, waited, and was displaced
    with pytest.raises(error), it.serve(line, rows=1, tokens=90, clock=clock):
        raise error("no")
    left = dict(it.headers(clock.now))
    assert (left[b"x-ratelimit-remaining-requests"], left[b"x-ratelimit-remaining-tokens"]) == (b"1", b"100")
    assert (it.usage().requests, it.usage().tokens) == (0, 0)
    served(it, clock)


@pytest.mark.parametrize(
    ("error", "answer", "ran"),
    [(Busy, 7, True), (RequestCancelled, 0, False), (InvalidRequest, 0, False), (Quarantined, 0, True)],
)
def test_what_ran_or_was_the_clients_doing_is_charged(error: type[TreadleError], answer: int, ran: bool) -> None:
    """A client that leaves just before the end pays for what was generated."""
    clock = Clock()
    it = account(clock, requests_per_minute=1, tokens_per_minute=100)
    line = record()
    line.prompt_tokens, line.completion_tokens, line.ran = 30, answer, ran
    with pytest.raises(error), it.serve(line, rows=1, tokens=20, clock=clock):
        raise error("no")
    left = dict(it.headers(clock.now))
    assert left[b"x-ratelimit-remaining-requests"] == b"0"
    assert left[b"x-ratelimit-remaining-tokens"] == b"%d" % (70 - answer)
    assert (it.usage().requests, it.usage().tokens) == (1, 30 + answer)


def test_headers_are_those_that_sdks_know() -> None:
    clock = Clock()
    it = account(clock, requests_per_minute=60, tokens_per_minute=600, max_running=9)
    served(it, clock, prompt=5, answer=5)
    assert dict(it.headers(clock.now)) == {
        b"x-ratelimit-limit-requests": b"60",
        b"x-ratelimit-remaining-requests": b"59",
        b"x-ratelimit-reset-requests": b"1000ms",
        b"x-ratelimit-limit-tokens": b"600",
        b"x-ratelimit-remaining-tokens": b"590",
        b"x-ratelimit-reset-tokens": b"1000ms",
    }
    assert Account().headers(0.0) == []


def test_new_limits_hold_from_now_on_and_the_same_change_nothing() -> None:
    clock = Clock()
    it = account(clock, requests_per_minute=1)
    served(it, clock)
    it.limit(KeyLimits(requests_per_minute=1), clock.now)
    with pytest.raises(RateLimited):
        it.check(clock.now)
    it.limit(KeyLimits(requests_per_minute=5), clock.now)
    it.check(clock.now)
    it.limit(KeyLimits(), clock.now)
    for _ in range(100):
        served(it, clock)


def test_a_change_of_one_limit_forgives_nothing() -> None:
    clock = Clock()
    it = account(clock, requests_per_minute=3, tokens_per_minute=600)
    served(it, clock, prompt=500, answer=300)
    it.limit(KeyLimits(requests_per_minute=3, tokens_per_minute=600, max_running=4), clock.now)
    left = dict(it.headers(clock.now))
    assert (left[b"x-ratelimit-remaining-requests"], left[b"x-ratelimit-reset-tokens"]) == (b"2", b"80000ms")
    it.limit(KeyLimits(requests_per_minute=5, tokens_per_minute=700), clock.now)
    left = dict(it.headers(clock.now))
    assert left[b"x-ratelimit-remaining-requests"] == b"4", "a rise adds its difference"
    with pytest.raises(RateLimited) as raised:
        it.check(clock.now)
    assert raised.value.retry_after_s == pytest.approx(101 * 60 / 700), "the overdraft of 200, less the rise"
    it.limit(KeyLimits(requests_per_minute=2, tokens_per_minute=70), clock.now)
    left = dict(it.headers(clock.now))
    assert left[b"x-ratelimit-remaining-requests"] == b"2", "a cut leaves what fits"
    with pytest.raises(RateLimited) as raised:
        it.check(clock.now)
    assert raised.value.retry_after_s == pytest.approx(101 * 60 / 70), "and no debt but what there was"
