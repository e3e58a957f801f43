"""Marks on model folders that a process uses, so that nobody removes them meanwhile: a shared lock on the folder
itself, which ends with the process. Where folders can't be locked (some network file systems) there are no marks."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path


class Hold:
    """A mark that lasts until `close`, or until the process ends."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def close(self) -> None:
        """Take the mark away. Idempotent."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def hold(folder: Path) -> Hold | None:
    """Mark `folder` as in use; None where that can't be done."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            os.close(handle)
            raise
        return Hold(handle)
    return None


def mark_used(folder: Path) -> None:
    """Set the time of `folder` itself, by which the inventory tells the last use: times of access are stale where the
    disk is mounted with relatime."""
    with contextlib.suppress(OSError):
        os.utime(folder)


def is_held(path: Path) -> bool:
    """Whether a process holds a lock on `path`, a marked folder or a lock file. False where that can't be known."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(handle)
    return False
