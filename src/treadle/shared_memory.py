"""Named shared memory between processes of one user: written once, then read.

The objects are POSIX shared memory, in the memory of the machine and beyond any folder. `multiprocessing.shared_memory`
would start a process that removes objects when their first user exits; here one process owns the names.

A name begins with its owner's. On Linux, which lists objects, an owner holds a lock on an object with its own name: its
mark. Process ids alone would not tell owners apart, as several containers, or one that starts again, may have the same
memory and the same ids.
"""

from __future__ import annotations

import _posixshmem  # type: ignore[import-not-found]
import contextlib
import itertools
import mmap
import os
import re
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path

from .file_locks import try_lock

PREFIX = "/treadle-"
FOLDER = Path("/dev/shm")
"""Where Linux lists the objects."""
_NAME = re.compile(r"(treadle-[0-9a-f]{1,8}\.[0-9a-f]{6})(-\d{1,8})?")
_MODE = 0o600


class Owner:
    """Owner of names in this process, alive until `close`. Raises OSError where there is no shared memory."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._lock: int | None = None
        self._mark = ""
        while not self._mark:
            self._take(f"{PREFIX}{os.getpid():x}.{secrets.token_hex(3)}")

    def new_name(self) -> str:
        """Return a name that nothing had before. macOS takes at most 31 characters."""
        return f"{self._mark}-{next(self._numbers)}"

    def close(self) -> None:
        """Remove the mark. Idempotent. The objects are to be removed before."""
        if self._lock is not None:
            unlink(self._mark)
            os.close(self._lock)
            self._lock = None

    def _take(self, mark: str) -> None:
        """Create the mark and lock it, unless another process has it, or takes it for that of a dead owner. Only
        Linux lists objects, so there are no marks elsewhere."""
        if sys.platform == "linux":
            try:
                handle = _posixshmem.shm_open(mark, os.O_CREAT | os.O_EXCL | os.O_RDWR, mode=_MODE)
            except FileExistsError:
                return
            if not try_lock(handle) or not os.fstat(handle).st_nlink:
                os.close(handle)
                return
            self._lock = handle
        self._mark = mark


@contextlib.contextmanager
def create(name: str, size: int) -> Iterator[memoryview]:
    """Create an object of `size` bytes and give its memory to the block; it stays when the block ends well. Raises
    OSError where the machine has no memory for it: writing to memory that is not there would kill the process."""
    handle = _posixshmem.shm_open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR, mode=_MODE)
    try:
        _allocate(handle, size)
        mapped = mmap.mmap(handle, size)
        view = memoryview(mapped)
        yield view
        view.release()
        mapped.close()
    except BaseException:  # its traceback may hold views of the memory, which is then unmapped with the last of them
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
    """Remove the objects of owners that were killed, and return their number. Linux alone lists objects; macOS keeps
    them until it is started anew."""
    owned: dict[str, list[str]] = {}
    for match in filter(None, map(_NAME.fullmatch, _listed())):
        owned.setdefault(match[1], []).extend([match[0]] if match[2] else [])
    return sum(_remove(f"/{mark}", names) for mark, names in owned.items())


def _remove(mark: str, names: list[str]) -> int:
    """Remove an owner's objects and its mark, unless it is alive or another user's. Return their number."""
    handle: int | None = None
    try:
        handle = _posixshmem.shm_open(mark, os.O_RDONLY)
        if not try_lock(handle):
            os.close(handle)
            return 0
    except FileNotFoundError:
        pass  # it was closed, and left objects
    except PermissionError:
        return 0
    try:
        for name in (mark, *(f"/{name}" for name in names)):
            unlink(name)
    finally:
        if handle is not None:
            os.close(handle)
    return len(names)


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
