"""In-flight table: the sequences in the owner's steps, in shared memory that outlives the owner.

The owner writes it before the first step of each new sequence. After its death the client reads the sequences that may
have been in a step, without relying on a message that may be lost. The table is a superset: finished sequences remain
until the next one joins. Sequences are identified by `Submit.arrival`.

Memory layout: signed 64-bit integers, terminated by a zero.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from array import array
from collections.abc import Iterable
from itertools import islice, takewhile

MAX_SEQUENCES = 16384
"""Capacity. Further sequences are not written, and therefore never suspected."""
_SIZE = 8 * (MAX_SEQUENCES + 1)


class InFlightTable:
    """The table in `memory`, as mapped by `map_table`; by default in this process's memory, for an owner on a
    thread."""

    def __init__(self, memory: mmap.mmap | None = None) -> None:
        self._rows = memoryview(memory or bytearray(_SIZE)).cast("q")

    def write(self, arrivals: Iterable[int]) -> None:
        """Replace all entries."""
        rows = array("q", islice(arrivals, MAX_SEQUENCES))
        rows.append(0)
        self._rows[: len(rows)] = rows

    def read(self) -> frozenset[int]:
        """Return the sequences that may be in a step."""
        return frozenset(takewhile(bool, self._rows))


def allocate() -> int:
    """Return a zero-filled descriptor to map in two processes: a memfd, or an unlinked file where there is none."""
    fd = _descriptor()
    try:
        os.write(fd, bytes(_SIZE))  # the whole size, as a full disk would later raise SIGBUS
    except OSError:
        os.close(fd)
        raise
    return fd


def map_table(fd: int) -> InFlightTable:
    """Map the table at `fd`, which may be closed afterwards."""
    return InFlightTable(mmap.mmap(fd, _SIZE))


def _descriptor() -> int:
    with contextlib.suppress(AttributeError, OSError):
        return os.memfd_create("treadle-in-flight")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
