"""How many BLAS threads run beside others: a governor with a clock and counters of our own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from treadle.runner.device import blas_threads
from treadle.runner.device.blas_threads import CALM_LOOKS, INTERVAL_S, ThreadGovernor, machine_busy_s

LOOK_S = 2 * INTERVAL_S
TICKS = os.sysconf("SC_CLK_TCK")


class Machine:
    """A machine on which others and we have used some CPU seconds by now."""

    def __init__(self, most: int, cpus: int, *, readable: bool = True) -> None:
        self.now = self.others_s = self.own_s = 0.0
        self.readable = readable
        self.looks = 0
        self.set: list[int] = []
        self.governor = ThreadGovernor(
            self.set.append,
            most,
            cpus=cpus,
            clock=lambda: self.now,
            busy_s=self.busy_s,
            own_s=lambda: self.own_s,
        )

    def busy_s(self) -> float | None:
        self.looks += 1
        return self.others_s + self.own_s if self.readable else None

    def after(self, seconds: float, *, others: float = 0.0, own: float = 0.0) -> int:
        """The threads for a step that comes `seconds` later, `others` and we being so many cores busy meanwhile."""
        self.now += seconds
        self.others_s += others * seconds
        self.own_s += own * seconds
        self.governor.before_step()
        assert self.governor.threads == self.set[-1]
        return self.governor.threads

    def calm(self) -> int:
        """The threads after looks enough to go up, nobody else being there."""
        return [self.after(LOOK_S) for _ in range(CALM_LOOKS)][-1]


def test_it_starts_with_one_thread_and_says_so() -> None:
    machine = Machine(4, 4)
    assert machine.set == [machine.governor.threads] == [1]


def test_it_goes_up_after_some_calm_looks_and_not_earlier() -> None:
    machine = Machine(4, 4)
    assert [machine.after(LOOK_S) for _ in range(CALM_LOOKS)] == [1] * (CALM_LOOKS - 1) + [4]


def test_it_goes_down_at_the_first_look_that_finds_others() -> None:
    machine = Machine(2, 2)
    assert machine.calm() == 2
    assert machine.after(LOOK_S, others=1.0) == 1


def test_one_busy_look_starts_the_wait_for_calm_again() -> None:
    machine = Machine(2, 2)
    before = [machine.after(LOOK_S) for _ in range(CALM_LOOKS - 1)]
    assert {*before, machine.after(LOOK_S, others=1.0)} == {1}
    assert [machine.after(LOOK_S) for _ in range(CALM_LOOKS)] == [1] * (CALM_LOOKS - 1) + [2]


def test_what_we_use_ourselves_does_not_count() -> None:
    machine = Machine(4, 4)
    assert machine.calm() == 4
    assert machine.after(LOOK_S, own=4.0) == 4


@pytest.mark.parametrize(("others", "left"), [(0.0, 4), (0.4, 4), (0.6, 3), (1.0, 3), (2.6, 1), (4.0, 1), (9.0, 1)])
def test_others_get_the_cores_they_use(others: float, left: int) -> None:
    machine = Machine(4, 4)
    machine.calm()
    assert machine.after(LOOK_S, others=others) == left


def test_busy_cores_that_we_do_not_need_are_no_reason_to_go_down() -> None:
    """With a quota of two cores on a machine of sixteen, ten busy ones leave us ours."""
    machine = Machine(2, 16)
    machine.calm()
    assert machine.after(LOOK_S, others=10.0) == 2
    assert machine.after(LOOK_S, others=15.0) == 1


def test_it_looks_no_more_often_than_its_interval() -> None:
    machine = Machine(2, 2)
    before = machine.looks
    for _ in range(9):
        machine.after(INTERVAL_S / 10, others=2.0)
    assert machine.looks == before
    machine.after(INTERVAL_S / 5)
    assert machine.looks == before + 1


def test_one_thread_never_looks() -> None:
    machine = Machine(1, 8)
    before = machine.looks
    assert machine.after(LOOK_S, others=8.0) == 1
    assert machine.looks == before


def test_a_machine_that_does_not_tell_is_taken_as_idle() -> None:
    assert Machine(4, 4, readable=False).calm() == 4


def test_a_clock_that_stands_still_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blas_threads, "INTERVAL_S", 0.0)
    machine = Machine(4, 4)
    assert [machine.after(0.0) for _ in range(2 * CALM_LOOKS)] == [1] * 2 * CALM_LOOKS


# /proc/stat ---------------------------------------------------------------------------------------------------------

STAT = """\
cpu  1000 20 300 9000 50 6 7 80 500 1
cpu0 100 2 30 900 5 1 2 8 50 0
cpu1 200 4 60 800 5 1 2 8 50 0
cpu10 7 0 0 1 0 0 0 0 0 0
intr 12345 0 0
"""


def test_busy_is_all_but_idle_and_waiting_and_guests_are_not_counted_twice(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text(STAT)
    assert machine_busy_s(stat, {0}) == (100 + 2 + 30 + 1 + 2 + 8) / TICKS
    assert machine_busy_s(stat, {1, 10}) == (200 + 4 + 60 + 1 + 2 + 8 + 7) / TICKS


@pytest.mark.parametrize("text", ["", "cpu 1 2\n", "cpu0 1 2 3\n", "cpu0 a b c d e f g h\n", "cpu1 1 1 1 1 1 1 1 1\n"])
def test_a_file_of_another_kind_tells_nothing(tmp_path: Path, text: str) -> None:
    stat = tmp_path / "stat"
    stat.write_text(text)
    assert machine_busy_s(stat, {0}) is None


def test_a_missing_file_tells_nothing(tmp_path: Path) -> None:
    assert machine_busy_s(tmp_path / "none") is None


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="Linux only")
def test_this_machine_tells() -> None:
    busy_s = machine_busy_s()
    assert busy_s is not None
    assert busy_s > 0
