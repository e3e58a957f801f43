"""A folder in the user's cache that is either whole or not there.

Rules: one process builds at a time (a lock file that dies with its holder); a build goes to a temporary folder beside
the target and is renamed when every byte is on disk; a manifest names each file's size and sha256. A folder that does
not match its manifest's sizes is built again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..errors import ModelError

MANIFEST = "treadle-manifest.json"
_POLL_S = 0.2


def default_root() -> Path:
    """The user's cache folder for this program."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "treadle"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "treadle"


def is_whole(folder: Path, version: str) -> bool:
    """Whether `folder` was finished by a build of this `version` and every file still has its size."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        sizes = {name: entry["bytes"] for name, entry in manifest["files"].items()}
        if manifest["version"] != version or not sizes:
            return False
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def verify(folder: Path) -> list[str]:
    """The names of files whose contents are not what was written; reads every byte. Raises OSError, ValueError."""
    files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
    return [name for name, entry in files.items() if file_sha256(folder / name) != entry["sha256"]]


def build_once(
    folder: Path,
    version: str,
    build: Callable[[Path], dict[str, str]],
    progress: Callable[[str], None],
    *,
    lock_s: float = 600.0,
) -> Path:
    """`folder`, built by `build(temporary folder)` unless it is already whole.

    `build` returns the sha256 of the files that it knows; the others are read again. Raises ModelError when the cache
    can't be written or another process holds the lock longer than `lock_s`.
    """
    if is_whole(folder, version):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder, progress, lock_s):
            if not is_whole(folder, version):
                _build(folder, version, build)
    except OSError as error:
        cause = f"{error.strerror or error} ({error.filename or folder})"
        raise ModelError(
            f"can't write the model cache {folder.parent}: {cause}; make room or set XDG_CACHE_HOME"
        ) from error
    return folder


def _build(folder: Path, version: str, build: Callable[[Path], dict[str, str]]) -> None:
    prefix = f".{folder.name}-"
    for stale in folder.parent.glob(f"{prefix}*"):  # of a process that was killed: the lock is ours
        shutil.rmtree(stale, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
    try:
        part = work / "new"
        part.mkdir()
        _write_manifest(part, version, build(part))
        if folder.exists():
            folder.rename(work / "old")
        part.rename(folder)
        _sync(folder.parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _write_manifest(folder: Path, version: str, known: dict[str, str]) -> None:
    files: dict[str, Any] = {}
    for path in sorted(folder.iterdir()):
        digest = known.get(path.name) or file_sha256(path)
        files[path.name] = {"bytes": path.stat().st_size, "sha256": digest}
        _sync(path)
    manifest = folder / MANIFEST
    manifest.write_text(json.dumps({"version": version, "files": files}, indent=2) + "\n", encoding="utf-8")
    _sync(manifest)
    _sync(folder)


def file_sha256(path: Path) -> str:
    """The sha256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def _locked(folder: Path, progress: Callable[[str], None], lock_s: float) -> Iterator[None]:
    path = folder.parent / f"{folder.name}.lock"
    deadline = time.monotonic() + lock_s
    with path.open("a") as file:
        if not _try_lock(file.fileno()):
            progress(f"another process is building {folder.name}: waiting for it")
            while not _try_lock(file.fileno()):
                if time.monotonic() >= deadline:
                    raise ModelError(f"another process has held {path} for {lock_s:.0f} s: end it and try again")
                time.sleep(_POLL_S)
        yield


def _try_lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
