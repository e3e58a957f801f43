"""Memory has one way to be written."""

from __future__ import annotations

import pytest

from treadle.config import Settings
from treadle.units import count, duration, portion, size


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1023.8 * 1024, "1.0 MiB"),
        (9.96 * 2**20, "10 MiB"),
        (536_870_912, "512 MiB"),
        (3 << 29, "1.5 GiB"),
        (5 << 40, "5.0 TiB"),
        (3000 << 40, "3000.0 TiB"),
    ],
)
def test_bytes_are_written_in_binary_units(count: float, text: str) -> None:
    assert size(count) == text


@pytest.mark.parametrize("count", [1, 2 << 10, 7 << 20, 8 << 30])
def test_what_is_shown_can_be_given_to_a_flag(count: int) -> None:
    assert Settings.from_mapping({"max-body-bytes": size(count)}).max_body_bytes == count


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1.0, "1 ms"),
        (0.0, "1 ms"),
        (0.0304, "30 ms"),
        (0.9994, "999 ms"),
        (0.9995, "1.0 s"),
        (9.94, "9.9 s"),
        (9.95, "10 s"),
        (119.4, "119 s"),
        (119.5, "2 min"),
        (3600, "60 min"),
    ],
)
def test_a_wait_is_never_nothing_and_has_the_unit_of_its_size(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_part_has_the_unit_of_the_whole() -> None:
    assert portion(0, 100) == "0 of 100 B"
    assert portion(900 << 10, 61 << 20) == "0.9 of 61 MiB"
    assert portion(1_200_000_000, 2_800_000_000) == "1.1 of 2.6 GiB"


@pytest.mark.parametrize(("number", "text"), [(12, "12"), (95_000, "95 K"), (268e6, "268 M"), (8.03e9, "8.03 B")])
def test_counts_for_people(number: float, text: str) -> None:
    assert count(number) == text
