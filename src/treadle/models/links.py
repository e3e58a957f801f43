"""Snapshot folders in the hub's cache, built from a checked listing, in the layout of `huggingface_hub`.

`snapshot_download` requests names and etags from the server again and uses them as paths. Using the checked listing
keeps later answers of the server from choosing paths.
"""

from __future__ import annotations

import contextlib
import json
import uuid
from pathlib import Path

from huggingface_hub import constants
from huggingface_hub.file_download import _create_symlink
from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

from .cache_paths import locks_of, repository
from .remote import Listing, RemoteFile

_SHA256_DIGITS = 64


def snapshot_folder(cache: Path, listing: Listing) -> Path:
    """Return the folder into which the files of `listing` are linked."""
    return repository(cache.expanduser().resolve(), listing.model) / "snapshots" / listing.commit


def link(cache: Path, listing: Listing, files: list[RemoteFile]) -> None:
    """Link downloaded `files` into the snapshot. Raises OSError."""
    folder, blobs = snapshot_folder(cache, listing), repository(cache, listing.model) / "blobs"
    for file in files:
        place, blob = folder / file.name, blobs / file.etag
        place.parent.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(locks_of(cache, listing.model) / f"{file.etag}.lock"):
            if not place.exists():
                shared = sum(other.etag == file.etag for other in files) > 1
                blob.stat()  # raises if the blob is missing: a dangling link would count as a download
                _create_symlink(str(blob), str(place), new_blob=not shared)


def record(cache: Path, listing: Listing, revision: str | None) -> None:
    """Record the commit of `revision` and its files for later offline use. Ignores a cache that can't be written."""
    home, name = repository(cache, listing.model), revision or constants.DEFAULT_REVISION
    tree = {"format_version": 1, "files": {file.name: _entry(file) for file in listing.files}}
    record_path = home / "trees" / f"{listing.commit}.json"
    with contextlib.suppress(OSError):
        if not record_path.exists():  # the library's own record has more fields
            _write(record_path, json.dumps(tree, indent=1))
    if name != listing.commit:
        with contextlib.suppress(OSError):
            _write(home / "refs" / name, listing.commit)


def _entry(file: RemoteFile) -> dict[str, object]:
    """Format a file as in the library's recorded listings."""
    if len(file.etag) < _SHA256_DIGITS:
        return {"size": file.size, "blob_id": file.etag}
    return {"size": file.size, "blob_id": "", "lfs_sha256": file.etag, "lfs_size": file.size}


def _write(path: Path, text: str) -> None:
    """Write `path` atomically, unless it already contains `text`."""
    with contextlib.suppress(FileNotFoundError):
        if path.read_text(encoding="utf-8") == text:
            return
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{uuid.uuid4().hex}.tmp")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)
