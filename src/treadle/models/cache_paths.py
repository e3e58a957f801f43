"""Paths of a model in the hub's cache, in the layout of `huggingface_hub`."""

from __future__ import annotations

import re
from pathlib import Path

SHORTEST_COMMIT = 7
"""Digits of a commit that name it, as git writes it."""
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHORT = re.compile(rf"[0-9a-f]{{{SHORTEST_COMMIT},39}}")
PARTIAL = ".incomplete"


def repository(cache: Path, model: str) -> Path:
    """Return the folder of `model`: blobs, refs and snapshots."""
    return cache / f"models--{model.replace('/', '--')}"


def locks_of(cache: Path, model: str) -> Path:
    """Return the folder of the lock files of `model`."""
    return cache / ".locks" / repository(cache, model).name


def commits(cache: Path, model: str) -> list[str]:
    """Return the commits of `model` that have a snapshot, whole or partial."""
    try:
        names = [path.name for path in (repository(cache, model) / "snapshots").iterdir() if path.is_dir()]
    except OSError:
        return []
    return sorted(name for name in names if _COMMIT.fullmatch(name))


def whole_revision(cache: Path, model: str, revision: str | None) -> str | None:
    """Return the commit with a snapshot that `revision` is the beginning of; other revisions as they are."""
    if revision is None or not _SHORT.fullmatch(revision) or (repository(cache, model) / "refs" / revision).exists():
        return revision
    found = [commit for commit in commits(cache, model) if commit.startswith(revision)]
    return found[0] if len(found) == 1 else revision


def ref(cache: Path, model: str, name: str) -> str:
    """Return the commit of a branch or a tag that was downloaded; "" if it was not."""
    try:
        return (repository(cache, model) / "refs" / name).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def blob_size(path: Path) -> int:
    """Return the size of a file in bytes; 0 if it does not exist."""
    try:
        return path.stat().st_size
    except OSError:
        return 0
