"""Heartbeat: silence, pings, and a suspended supervisor."""

from __future__ import annotations

from tests.support.owners import Clock
from treadle.engine.heartbeat import PING_S, Heartbeat


def test_silence_counts_from_the_latest_of_debt_word_and_awakening():
    clock = Clock(0.0)
    heart = Heartbeat(30.0, clock)
    clock.now = 10.0
    assert heart.silent_s(4.0) == 6.0
    heart.on_message()
    clock.now = 12.0
    assert heart.silent_s(4.0) == 2.0
    clock.now = 50.0
    heart.on_check(20.0)
    clock.now = 51.0
    assert heart.silent_s(4.0) == 1.0


def test_a_deaf_owner_is_found_within_the_bound_of_its_last_word():
    """R3: 30 s at most, at the defaults."""
    clock = Clock(0.0)
    heart = Heartbeat(30.0, clock)
    heart.on_message()
    pings = []
    while not heart.unanswered_s():
        if heart.should_ping():
            pings.append(clock.now)
        clock.now += 1.0
        assert clock.now <= 31.0
    assert pings == [PING_S]


def test_one_that_answers_is_asked_again():
    clock = Clock(0.0)
    heart = Heartbeat(8.0, clock)
    pings = 0
    for _ in range(40):
        clock.now += 1.0
        if heart.should_ping():
            pings += 1
            heart.on_message()
        assert not heart.unanswered_s()
    assert pings == 20


def test_a_watcher_that_was_stopped_judges_nobody():
    """Pings and their answers lay in the socket meanwhile."""
    clock = Clock(0.0)
    heart = Heartbeat(8.0, clock)
    clock.now = 3.0
    assert heart.should_ping()
    clock.now = 1000.0
    heart.on_check(997.0)
    assert not heart.unanswered_s()
    clock.now += 5.0
    assert not heart.unanswered_s()
    clock.now += 2.0
    assert heart.unanswered_s(), "it stays silent though it is watched again"
    heart.reset()
    assert not heart.unanswered_s()
