"""Locks on open files, which the system frees when their process ends."""

from __future__ import annotations

import fcntl


def try_lock(handle: int) -> bool:
    """Lock the open file `handle` for this process until it is closed; False where another has locked it. Raises
    OSError where it can't be locked."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
