"""Atomic build of a folder in the user's cache: it is either complete or absent.

Rules: one process builds at a time (a file lock, released when its holder dies); a build is written to a temporary
folder beside the target, synced and renamed; a manifest records each file's size and sha256. A folder whose files do
not match the sizes in its manifest is built again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..environment import cache_folder
from ..errors import ModelError
from ..file_locks import try_lock

MANIFEST = "treadle-manifest.json"
_POLL_S = 0.2


def default_root() -> Path:
    """Return this program's folder in the user's cache."""
    return cache_folder(os.environ)


def is_whole(folder: Path, version: str) -> bool:
    """Whether `folder` is a complete build of this `version` and every file has its recorded size."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        sizes = {name: entry["bytes"] for name, entry in manifest["files"].items()}
        if manifest["version"] != version or not sizes:
            return False
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def verify(folder: Path) -> list[str]:
    """Return the names of files whose sha256 differs from the manifest; reads every byte. Raises OSError,
    ValueError."""
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
    """Return `folder`, built with `build(temporary folder)` unless it is already complete.

    `build` may return the sha256 of files by name; files without one are read again. Raises ModelError when the cache
    can't be written or another process holds the lock for longer than `lock_s` seconds.
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
    for stale in folder.parent.glob(f"{prefix}*"):  # left by a killed process: we hold the lock
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
    """Return the sha256 of a file in hex."""
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
        if not try_lock(file.fileno()):
            progress(f"another process is building {folder.name}: waiting for it")
            while not try_lock(file.fileno()):
                if time.monotonic() >= deadline:
                    raise ModelError(f"another process has held {path} for {lock_s:.0f} s: end it and try again")
                time.sleep(_POLL_S)
        yield
