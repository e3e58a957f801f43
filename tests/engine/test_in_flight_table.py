"""Shared-memory table of the sequences in a step."""

from __future__ import annotations

import os
import tempfile

import pytest

from treadle.engine import in_flight_table as table_module
from treadle.engine.in_flight_table import InFlightTable, allocate, map_table


def test_what_is_written_last_is_read():
    table = InFlightTable()
    assert table.read() == frozenset()
    for rows in ([3, 1, 2], [9], [], [2**40]):
        table.write(iter(rows))
        assert table.read() == set(rows)


def test_rows_beyond_its_size_are_left_out(monkeypatch):
    monkeypatch.setattr(table_module, "MAX_SEQUENCES", 2)
    table = InFlightTable()
    table.write([1, 2, 3])
    assert table.read() == {1, 2}


@pytest.mark.parametrize("error", [None, AttributeError, OSError])
def test_two_maps_of_one_descriptor_are_the_same_memory(monkeypatch, error):
    """Also where the system has no memory without a file."""

    def none(name: str) -> int:
        raise error

    if error is not None:
        monkeypatch.setattr(os, "memfd_create", none, raising=False)
    fd = allocate()
    try:
        ours, theirs = map_table(fd), map_table(fd)
    finally:
        os.close(fd)
    theirs.write([5, 6])
    assert ours.read() == {5, 6}


def test_without_room_for_it_there_is_an_error_and_no_descriptor_left(monkeypatch):
    monkeypatch.setattr(os, "memfd_create", lambda name: os.open(tempfile.gettempdir(), os.O_RDONLY), raising=False)
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    with pytest.raises(OSError, match="descriptor"):
        allocate()
    assert not before or len(os.listdir("/proc/self/fd")) == before
