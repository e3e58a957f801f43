"""Cache on disk of compiled kernels (cubins), which keeps what was used last.

Rules: a cubin is code that the device runs for this user, so the folder must be the user's own and closed to writers of
other accounts; each access checks the folder that it has open. A file is written beside its place and renamed, and
holds a digest of its name and contents: a torn or damaged one is no hit.
"""

from __future__ import annotations

import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path

MOST_BYTES = 256 << 20
"""The size from which on files are dropped: some thousand cubins, of a hundred models."""
_SUFFIX = ".cubin"
_MAGIC = b"treadle cubin 1\n"
_DIGEST = 32
_MOST_FILE = 16 << 20
_ABANDONED_S = 3600.0  # a part that is older was left by a killed process
_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class CacheUnusable(Exception):
    """The folder can't be used, or may not be trusted."""


class CubinCache:
    """Cubins in `folder` by their keys (hexadecimal), at most `most_bytes` of them."""

    def __init__(self, folder: Path, most_bytes: int = MOST_BYTES) -> None:
        self.folder = folder
        self._most_bytes = most_bytes

    def get(self, key: str) -> bytes | None:
        """Return the cubin of `key`, which counts as used now; None without one. Raises CacheUnusable."""
        with self._opened() as folder:
            name = key + _SUFFIX
            data = _contents(key, _read(name, folder))
            if data is not None:
                with suppress(OSError):  # on a read-only disk nothing is dropped either
                    os.utime(name, dir_fd=folder)
            return data

    def put(self, key: str, cubin: bytes) -> None:
        """Keep `cubin`, and drop the least recently used ones beyond the limit. Raises CacheUnusable."""
        with self._opened() as folder:
            part = f".{key}.{secrets.token_hex(8)}"
            try:
                self._write(part, key, cubin, folder)
            except OSError:
                with suppress(OSError):
                    os.unlink(part, dir_fd=folder)
                raise
            self._evict(folder)

    def _write(self, part: str, key: str, cubin: bytes, folder: int) -> None:
        handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder)
        with os.fdopen(handle, "wb") as file:
            file.write(_MAGIC + _checksum(key, cubin) + cubin)
        os.rename(part, key + _SUFFIX, src_dir_fd=folder, dst_dir_fd=folder)

    @contextmanager
    def _opened(self) -> Iterator[int]:
        """A descriptor of the folder, made where there is none. Faults of the disk inside the block are CacheUnusable,
        too."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise CacheUnusable(f"{self.folder}: {error.strerror or error}") from error
        try:
            self._check(os.fstat(folder))
            yield folder
        except OSError as error:
            raise CacheUnusable(f"{self.folder}: {error.strerror or error}") from error
        finally:
            os.close(folder)

    def _check(self, facts: os.stat_result) -> None:
        if facts.st_uid != os.geteuid():
            raise CacheUnusable(f"{self.folder} belongs to another user")
        if facts.st_mode & _OTHERS:
            raise CacheUnusable(f"{self.folder} can be written by other users (mode {facts.st_mode & 0o777:o})")

    def _evict(self, folder: int) -> None:
        """Drop files in the order of their last use until the limit is kept, and those that killed processes left."""
        files, before = _files(folder), time.time() - _ABANDONED_S
        total = sum(size for _, name, size in files if name.endswith(_SUFFIX))
        for used, name, size in sorted(files):
            if name.endswith(_SUFFIX):
                if total <= self._most_bytes:
                    continue
                total -= size
            elif not name.startswith(".") or used > before:
                continue
            with suppress(FileNotFoundError):  # another process drops files, too
                os.unlink(name, dir_fd=folder)


def _files(folder: int) -> list[tuple[float, str, int]]:
    """Return the last use, the name and the size of each plain file."""
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                facts = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(facts.st_mode):
                    found.append((facts.st_mtime, entry.name, facts.st_size))
    return found


def _read(name: str, folder: int) -> bytes:
    """Return the bytes of a plain file of this user; none where there is no such file."""
    try:
        handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except FileNotFoundError:
        return b""
    with os.fdopen(handle, "rb") as file:
        facts = os.fstat(handle)
        return file.read(_MOST_FILE) if stat.S_ISREG(facts.st_mode) and facts.st_uid == os.geteuid() else b""


def _contents(key: str, whole: bytes) -> bytes | None:
    """Return the cubin in a file's bytes; None where they are not whole."""
    start = len(_MAGIC) + _DIGEST
    cubin = whole[start:]
    return cubin if cubin and whole[:start] == _MAGIC + _checksum(key, cubin) else None


def _checksum(key: str, cubin: bytes) -> bytes:
    return sha256(key.encode() + cubin).digest()
