"""Usage locks of model folders, which prevent their removal while a process serves them.

A usage lock is a shared lock on the folder itself and ends with the process. File systems that can't lock folders (some
network file systems) have none.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from ..file_locks import try_lock


class UsageLock:
    """A shared lock of a folder, held until `close` or the end of the process."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def close(self) -> None:
        """Release the lock. Idempotent."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def lock_folder(folder: Path) -> UsageLock | None:
    """Lock `folder` as in use; None when it can't be locked."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            os.close(handle)
            raise
        return UsageLock(handle)
    return None


def mark_used(folder: Path) -> None:
    """Set the modification time of `folder`, which the inventory reports as its last use. Access times are unreliable:
    disks mounted with relatime do not update them."""
    with contextlib.suppress(OSError):
        os.utime(folder)


def is_locked(path: Path) -> bool:
    """Whether a process holds a lock on `path`, a model folder or a lock file. False when that can't be determined."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        return not try_lock(handle)
    except OSError:
        return False
    finally:
        os.close(handle)
