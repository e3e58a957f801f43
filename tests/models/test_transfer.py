"""Progress of a download: percent, bytes, rate and time left over all files."""

from __future__ import annotations

import pytest

from treadle.models.transfer import DownloadProgress, Transfer, duration


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_all_files_count_together() -> None:
    progress = DownloadProgress("o/m", {"a": 600, "b": 400})
    progress.place("a", 100)
    progress.receive("b", 50)
    assert progress.snapshot() == Transfer("o/m", 150, 1000)


def test_the_rate_is_that_of_the_network_over_the_last_ten_seconds() -> None:
    progress = DownloadProgress("o/m", {"a": 10_000}, clock := Clock())
    progress.place("a", 5000)  # of an earlier attempt
    for second in range(1, 31):
        clock.now_s = second
        progress.receive("a", 100 if second <= 15 else 10)
        seen = progress.snapshot()
    assert seen.rate == pytest.approx(10)
    assert seen.left_s == pytest.approx((10_000 - 5000 - 1500 - 150) / 10)


def test_nothing_is_said_of_a_rate_before_a_second_has_passed() -> None:
    progress = DownloadProgress("o/m", {"a": 10_000}, clock := Clock())
    progress.receive("a", 5000)
    clock.now_s = 0.5
    assert progress.snapshot().left_s is None


def test_a_note_lasts_until_bytes_come_in() -> None:
    progress = DownloadProgress("o/m", {"a": 100})
    progress.note("the connection was lost: trying again in 2 s")
    assert str(progress.snapshot()).endswith("0 of 100 B, the connection was lost: trying again in 2 s")
    progress.receive("a", 1)
    assert progress.snapshot().note == ""


@pytest.mark.parametrize(
    ("transfer", "text"),
    [
        (Transfer("o/m", 0, 2_800_000_000), "downloading o/m: 0 %, 0.0 of 2.6 GiB"),
        (
            Transfer("o/m", 1_200_000_000, 2_800_000_000, 35e6),
            "downloading o/m: 42 %, 1.1 of 2.6 GiB, 33 MiB/s, 46 s left",
        ),
        (
            Transfer("o/m", 2_799_999_999, 2_800_000_000, 1e9),
            "downloading o/m: 99 %, 2.6 of 2.6 GiB, 954 MiB/s, 0 s left",
        ),
        (Transfer("o/m", 10, 10, 5.0), "downloading o/m: 100 %, 10 of 10 B"),
        (Transfer("o/m", 0, 0), "downloading o/m: 100 %, 0 of 0 B"),
    ],
)
def test_a_transfer_is_one_line(transfer: Transfer, text: str) -> None:
    assert str(transfer) == text


def test_durations() -> None:
    assert [duration(s) for s in (0, 89, 90, 3000, 7500)] == ["0 s", "89 s", "2 min", "50 min", "2 h 5 min"]
