"""Checks of what a hub or mirror sends before any of it becomes a path or a size on this disk.

`HF_ENDPOINT` may name any server. Commit, file names, checksums and sizes are refused unless they have the form that
the Hugging Face hub gives them. Pulls and `treadle doctor` share these checks.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from pathlib import PurePosixPath

from ..errors import ModelError

COMMIT = re.compile(r"[0-9a-f]{40}")
_ETAG = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_CURE = "use another hub or mirror (HF_ENDPOINT)"
_LONGEST_PART = 255  # bytes; the limit of common file systems
_LARGEST = 1 << 43  # bytes; file systems in common use end at 16 TiB


def commit(model: str, value: object, revision: str | None) -> str:
    """The commit of a listing. Raises ModelError unless it is 40 hex digits, and those asked for where `revision` is
    a commit itself."""
    if not isinstance(value, str) or not COMMIT.fullmatch(value):
        raise ModelError(f"the hub names {shown(value)} as the commit of {model}, not 40 hex digits: {_CURE}")
    if revision and COMMIT.fullmatch(revision) and value != revision:
        raise ModelError(f"the hub answers with commit {value} of {model} instead of {revision}: {_CURE}")
    return value


def names(model: str, given: Iterable[object]) -> None:
    """Raise ModelError where a file name could not lie in the model's own folder, or two exclude each other."""
    seen: set[str] = set()
    for name in given:
        if trouble := _trouble(name):
            raise ModelError(f"the hub lists a file of {model} whose name {trouble}, {shown(name)}: {_CURE}")
        if name in seen:
            raise ModelError(f"the hub lists {shown(name)} of {model} twice: {_CURE}")
        seen.add(str(name))
    for name in sorted(seen):
        if both := [str(above) for above in PurePosixPath(name).parents if str(above) in seen]:
            raise ModelError(f"the hub lists {shown(both[0])} of {model} as a file and as a folder: {_CURE}")


def content(model: str, name: str, size: object, etag: object) -> None:
    """Raise ModelError unless size and checksum of file `name` are usable."""
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size < _LARGEST:
        raise ModelError(f"the hub gives {shown(size)} as the size of {model}'s file {name}: {_CURE}")
    if not isinstance(etag, str) or not _ETAG.fullmatch(etag):
        raise ModelError(
            f"the hub gives {shown(etag)} as the checksum (etag) of {model}'s file {name}, not 40 or 64 hex digits: "
            f"{_CURE}"
        )


def revision(text: str) -> None:
    """Raise ModelError where a revision could not be the name of a branch, tag or commit."""
    if trouble := _trouble(text):
        raise ModelError(f"{shown(text)} is no revision, as it {trouble}: give a branch, a tag or a commit")


def _trouble(name: object) -> str:
    """What keeps `name` from being a relative path of plain components; empty for nothing."""
    if not isinstance(name, str):
        return "is not text"
    if any(unicodedata.category(letter) in ("Cc", "Cs") for letter in name):
        return "has a control character"
    if name.startswith("/") or "\\" in name or re.match(r"[A-Za-z]:", name):
        return "is absolute or has a backslash"
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts):
        return "has an empty component, '.' or '..'"
    return "is too long" if any(len(part.encode()) > _LONGEST_PART for part in parts) else ""


def shown(value: object) -> str:
    """A server's value in a message: ASCII, 80 characters at most."""
    try:
        text = ascii(value)
    except ValueError:  # an integer beyond Python's limit of digits
        text = type(value).__name__
    return text if len(text) <= 80 else text[:77] + "..."
