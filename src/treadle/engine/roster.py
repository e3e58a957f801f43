"""Roster of the sequences that are in the owner's steps, in memory that both sides share and that outlives the owner.

The owner writes it before the first step that contains a new row, so that at a death the other side knows all that may
have been in a step, without a message that may be lost. It is a superset: rows that have ended since are in it until
the next row joins. Sequences are told by their `Submit.arrival`.

Memory layout: signed 64-bit integers, a zero after the last one.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from array import array
from collections.abc import Iterable
from itertools import islice, takewhile

MOST_ROWS = 16384
"""Rows that fit. Further ones are not written, and so never suspected."""
_SIZE = 8 * (MOST_ROWS + 1)


class Roster:
    """`memory` is what `shared` maps; without it, memory of this process, for an owner on one of its threads."""

    def __init__(self, memory: mmap.mmap | None = None) -> None:
        self._rows = memoryview(memory or bytearray(_SIZE)).cast("q")

    def write(self, arrivals: Iterable[int]) -> None:
        """Replace all entries."""
        rows = array("q", islice(arrivals, MOST_ROWS))
        rows.append(0)
        self._rows[: len(rows)] = rows

    def read(self) -> frozenset[int]:
        """The sequences that may be in a step."""
        return frozenset(takewhile(bool, self._rows))


def allocate() -> int:
    """A descriptor of zeros, to be mapped here and in another process: memory where the system has it for that, else an
    unlinked file."""
    fd = _descriptor()
    try:
        os.write(fd, bytes(_SIZE))  # all of it, as a full disk could not be told of later
    except OSError:
        os.close(fd)
        raise
    return fd


def shared(fd: int) -> Roster:
    """The roster at `fd`, which may be closed afterwards."""
    return Roster(mmap.mmap(fd, _SIZE))


def _descriptor() -> int:
    with contextlib.suppress(AttributeError, OSError):
        return os.memfd_create("treadle-roster")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
