"""Engine deaths: back-off, explained deaths, crash-loop detection."""

from __future__ import annotations

from treadle.engine.deaths import BACKOFF_S, MAX_DEATHS, STABLE_S, WINDOW_S, Cause, Deaths


def quick(deaths: Deaths, now: float = 0.0, cause: Cause = Cause.CRASH) -> None:
    deaths.add(cause, lived_s=1.0, now=now)


def test_quick_deaths_are_backed_off_and_a_settled_life_starts_afresh():
    deaths, waits = Deaths(), []
    for _ in range(8):
        quick(deaths)
        waits.append(deaths.backoff_s(0))
    assert waits == [*BACKOFF_S, BACKOFF_S[-1], BACKOFF_S[-1]]
    deaths.add(Cause.CRASH, lived_s=STABLE_S + 1, now=0.0)
    assert deaths.backoff_s(0) == 0.0
    assert deaths.backoff_s(2) == BACKOFF_S[2], "starts that fail are backed off too"


def test_explained_deaths_neither_delay_a_restart_nor_make_a_loop():
    deaths = Deaths()
    for now in range(5 * MAX_DEATHS):
        quick(deaths, now)
        quick(deaths, now)
        deaths.explain(2)
        assert (deaths.backoff_s(0), deaths.crash_loop_reason(now)) == (0.0, "")
    assert (deaths.total, deaths.explained) == (10 * MAX_DEATHS, 10 * MAX_DEATHS)


def test_too_many_unexplained_deaths_within_the_window_are_a_loop():
    deaths = Deaths()
    for i in range(MAX_DEATHS - 1):
        quick(deaths, float(i), Cause.HANG)
    assert deaths.crash_loop_reason(10.0) == ""
    quick(deaths, WINDOW_S)
    assert "no request is to blame" in deaths.crash_loop_reason(WINDOW_S)
    assert deaths.crash_loop_reason(WINDOW_S + 1) == "", "the first one was too long ago"
    assert deaths.by_cause == {Cause.HANG: MAX_DEATHS - 1, Cause.CRASH: 1}
    deaths.explain(99)
    assert deaths.crash_loop_reason(WINDOW_S) == ""
