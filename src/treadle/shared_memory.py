"""Named shared memory between processes of one user: written once, then read.

The objects are POSIX shared memory, in the memory of the machine and beyond any folder. `multiprocessing.shared_memory`
would start a process that removes objects when their first user exits; here one process owns the names.
"""

from __future__ import annotations

import _posixshmem  # type: ignore[import-not-found]
import contextlib
import mmap
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

PREFIX = "/treadle-"
FOLDER = Path("/dev/shm")
"""Where Linux lists the objects."""
_NAME = re.compile(r"treadle-(\d{1,10})-\d{1,10}")
_MODE = 0o600


def name_of(owner: int, number: int) -> str:
    """Return the name of object `number` of process `owner`. macOS takes at most 31 characters."""
    return f"{PREFIX}{owner}-{number}"


@contextlib.contextmanager
def create(name: str, size: int) -> Iterator[memoryview]:
    """Create an object of `size` bytes and give its memory to the block; it stays when the block ends well. Raises
    OSError where the machine has no memory for it: writing to memory that is not there would kill the process."""
    handle = _posixshmem.shm_open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR, mode=_MODE)
    try:
        _allocate(handle, size)
        with mmap.mmap(handle, size) as mapped, memoryview(mapped) as view:
            yield view
    except BaseException:
        unlink(name)
        raise
    finally:
        os.close(handle)


@contextlib.contextmanager
def attach(name: str, size: int) -> Iterator[memoryview]:
    """Give the first `size` bytes of an object to the block, read-only. Raises OSError where there is no such object,
    ValueError where it is smaller. No view of the memory may be left when the block ends."""
    handle = _posixshmem.shm_open(name, os.O_RDONLY)
    try:
        with mmap.mmap(handle, size, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as view:
            yield view
    finally:
        os.close(handle)


def unlink(name: str) -> None:
    """Remove a name; its memory is freed when no process uses it any more. Idempotent."""
    with contextlib.suppress(FileNotFoundError):
        _posixshmem.shm_unlink(name)


def remove_left_over() -> int:
    """Remove the objects of servers that were killed, and return their number. Linux alone lists objects; macOS keeps
    them until it is started anew."""
    found = [match for entry in _listed() if (match := _NAME.fullmatch(entry)) is not None]
    dead = [match[0] for match in found if not _is_alive(int(match[1]))]
    for entry in dead:
        with contextlib.suppress(PermissionError):  # of another user
            unlink(f"/{entry}")
    return len(dead)


def _allocate(handle: int, size: int) -> None:
    if sys.platform == "linux":
        os.posix_fallocate(handle, 0, size)
    else:
        os.ftruncate(handle, size)


def _listed() -> list[str]:
    try:
        return os.listdir(FOLDER)
    except OSError:
        return []


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
