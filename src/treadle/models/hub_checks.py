"""Checks of a hub's or mirror's answers before they are used as paths and sizes on this disk.

`HF_ENDPOINT` may name any server. Commits, file names, checksums and sizes are refused unless they have the form used
by the Hugging Face hub. Downloads and `treadle doctor` share these checks.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from pathlib import PurePosixPath

from ..errors import ModelError

COMMIT = re.compile(r"[0-9a-f]{40}")
_ETAG = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_FIX = "use another hub or mirror (HF_ENDPOINT)"
_MAX_COMPONENT = 255  # bytes; the limit of common file systems
_MAX_SIZE = 1 << 43  # bytes; file systems in common use end at 16 TiB


def check_commit(model: str, value: object, revision: str | None) -> str:
    """Return the commit of a listing. Raises ModelError unless it is 40 hex digits, and equal to `revision` if that is
    a commit."""
    if not isinstance(value, str) or not COMMIT.fullmatch(value):
        raise ModelError(f"the hub names {quote(value)} as the commit of {model}, not 40 hex digits: {_FIX}")
    if revision and COMMIT.fullmatch(revision) and value != revision:
        raise ModelError(f"the hub answers with commit {value} of {model} instead of {revision}: {_FIX}")
    return value


def check_names(model: str, given: Iterable[object]) -> None:
    """Raise ModelError for a file name outside the model's folder, a duplicate, or a file that is also a folder."""
    seen: set[str] = set()
    for name in given:
        if fault := _name_fault(name):
            raise ModelError(f"the hub lists a file of {model} whose name {fault}, {quote(name)}: {_FIX}")
        if name in seen:
            raise ModelError(f"the hub lists {quote(name)} of {model} twice: {_FIX}")
        seen.add(str(name))
    for name in sorted(seen):
        if both := [str(above) for above in PurePosixPath(name).parents if str(above) in seen]:
            raise ModelError(f"the hub lists {quote(both[0])} of {model} as a file and as a folder: {_FIX}")


def check_content(model: str, name: str, size: object, etag: object) -> None:
    """Raise ModelError unless the size and checksum of file `name` are valid."""
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size < _MAX_SIZE:
        raise ModelError(f"the hub gives {quote(size)} as the size of {model}'s file {name}: {_FIX}")
    if not isinstance(etag, str) or not _ETAG.fullmatch(etag):
        raise ModelError(
            f"the hub gives {quote(etag)} as the checksum (etag) of {model}'s file {name}, not 40 or 64 hex digits: "
            f"{_FIX}"
        )


def check_revision(text: str) -> None:
    """Raise ModelError unless the text can name a branch, tag or commit."""
    if fault := _name_fault(text):
        raise ModelError(f"{quote(text)} is no revision, as it {fault}: give a branch, a tag or a commit")


def _name_fault(name: object) -> str:
    """Return why `name` is not a safe relative path; "" if it is one."""
    if not isinstance(name, str):
        return "is not text"
    if any(unicodedata.category(letter) in ("Cc", "Cs") for letter in name):
        return "has a control character"
    if name.startswith("/") or "\\" in name or re.match(r"[A-Za-z]:", name):
        return "is absolute or has a backslash"
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts):
        return "has an empty component, '.' or '..'"
    return "is too long" if any(len(part.encode()) > _MAX_COMPONENT for part in parts) else ""


def quote(value: object) -> str:
    """Quote a server's value for a message: ASCII, at most 80 characters."""
    try:
        text = ascii(value)
    except ValueError:  # an integer beyond Python's limit of digits
        text = type(value).__name__
    return text if len(text) <= 80 else text[:77] + "..."
