"""Inventory of models on this disk, in the hub's cache and the converted demo: list, check, remove."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from ..errors import ModelError
from ..installation import command
from . import cache, demo, folder_checks, hub, in_use
from .cache_paths import PARTIAL, blob_size, locks_of, ref, repository
from .folder import Source
from .hub_errors import MAIN


class State(StrEnum):
    """State of a model: servable, incomplete, or refused by a check."""

    READY = "ready"
    PARTIAL = "partial"
    REFUSED = "refused"


@dataclass(frozen=True)
class Entry:
    """One model.

    `size_bytes`: on disk, including partial files. `whole_bytes`: size of the complete model, None if unknown.
    `reason`: the missing files, or why the model can't be served. `revision`: the commit that must be named to serve
    it, where the cache has none for `main`. `used`: POSIX time of the last download or use by Treadle. `modified`:
    POSIX time of the last change of its files.
    """

    model: str
    source: Source
    home: Path
    folder: Path | None
    size_bytes: int
    used: float
    modified: float
    state: State
    reason: str = ""
    whole_bytes: int | None = None
    partial_bytes: int = 0
    architecture: str = ""
    weights: str = ""
    revisions: tuple[str, ...] = ()
    revision: str = ""


def entries(hub_cache: Path | None = None, demo_root: Path | None = None) -> list[Entry]:
    """Return all models by name. Reads the headers of weights; imports no model code and uses no network."""
    homes = sorted((hub_cache or hub.cache_folder()).glob("models--*--*"))
    found = [_hub_entry(home) for home in homes if home.is_dir()]
    return [*_demo_entries(demo_root), *found]


def find(model: str, hub_cache: Path | None = None) -> Entry | None:
    """Return the hub model of that name; None if it is not in the cache."""
    home = repository(hub_cache or hub.cache_folder(), model)
    return _hub_entry(home) if hub.is_id(model) and home.is_dir() else None


def find_demo(root: Path | None = None) -> Entry | None:
    """Return the converted demo; None if it is not converted."""
    return next(_demo_entries(root), None)


def _demo_entries(root: Path | None) -> Iterator[Entry]:
    home = (root or cache.default_root()) / demo.NAME
    if home.is_dir():
        yield _with_checks(_entry("demo", Source.DEMO, home, home, [home]))


def _hub_entry(home: Path) -> Entry:
    model = home.name.removeprefix("models--").replace("--", "/", 1)
    snapshots = _snapshots(home)
    folder = next(iter(snapshots), None)
    entry = _entry(model, Source.HUB, home, folder, [home / "blobs", home / "snapshots"])
    partial = sum(blob_size(path) for path in (home / "blobs").glob(f"*{PARTIAL}"))
    entry = replace(entry, partial_bytes=partial, revisions=tuple(path.name for path in snapshots))
    whole, missing = _expected(entry)
    entry = replace(entry, whole_bytes=whole)
    if folder is None or missing:
        return replace(_with_config(entry), state=State.PARTIAL, reason=_missing_text(entry, missing))
    if folder.name != ref(home.parent, model, MAIN):
        entry = replace(entry, revision=folder.name)
    return _with_checks(entry)


def _snapshots(home: Path) -> list[Path]:
    """Return all snapshots, that of `main` first, then by age, newest first."""
    main = ref(home.parent, home.name.removeprefix("models--").replace("--", "/", 1), MAIN)
    try:
        found = [path for path in (home / "snapshots").iterdir() if path.is_dir()]
    except OSError:
        return []
    return sorted(found, key=lambda path: (path.name != main, -path.stat().st_mtime))


def _entry(model: str, source: Source, home: Path, folder: Path | None, places: list[Path]) -> Entry:
    served = [home, *(home / "snapshots").glob("*")]  # `in_use.mark_used` sets their times
    files = [path for place in places for path in place.rglob("*") if path.is_file() and not path.is_symlink()]
    files += [path for place in places for path in place.glob("*") if path.is_symlink() and path.is_file()]
    facts = [path.stat() for path in files] or [home.stat()]
    modified = max(fact.st_mtime for fact in facts)
    return Entry(
        model,
        source,
        home,
        folder,
        size_bytes=sum(fact.st_size for fact in facts) if files else 0,
        used=max(modified, *(path.stat().st_mtime for path in served if path.is_dir())),
        modified=modified,
        state=State.READY,
    )


def _expected(entry: Entry) -> tuple[int | None, list[str]]:
    """Return the total bytes of the model's files and the names of missing ones, from the listing kept by the hub's
    client; (None, []) if there is no listing."""
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]

    from .remote import PATTERNS

    folder = entry.folder
    if folder is None:
        return None, []
    try:
        tree = get_cached_repo_tree(entry.model, revision=folder.name, cache_dir=entry.home.parent)
    except Exception:  # no listing, or in another format: rely on the checks of the files
        return None, []
    files = list(filter_repo_objects(tree, allow_patterns=PATTERNS, key=lambda file: file.path))
    return sum(file.size for file in files), [file.path for file in files if not (folder / file.path).exists()]


def _missing_text(entry: Entry, missing: list[str]) -> str:
    gap = f"{len(missing)} file{'s' * (len(missing) > 1)} missing" if missing else "nothing but pieces"
    return f"{gap}: '{command()} pull {entry.model}' fetches the rest"


def _with_checks(entry: Entry) -> Entry:
    """Add fields of the config, and the result of the folder's checks."""
    folder = entry.folder
    assert folder is not None
    entry = _with_config(entry)
    try:
        folder_checks.check(folder)
    except ModelError as error:
        reason = error.message.replace(f"{folder}{os.sep}", "").replace(str(folder), "it")
        return replace(entry, state=State.REFUSED, reason=reason)
    return entry


def _with_config(entry: Entry) -> Entry:
    config: Any = {}
    if entry.folder is not None:
        with contextlib.suppress(OSError, ValueError, RecursionError):
            config = json.loads((entry.folder / "config.json").read_text(encoding="utf-8"))
    if not isinstance(config, dict):
        return entry
    return replace(entry, architecture=str(config.get("model_type") or ""), weights=weight_format(config))


def weight_format(config: Mapping[str, Any]) -> str:
    """Return the storage format of the weights from the config: "4 bits", "fp8", "bfloat16"; "" if it is not given."""
    places = [part for part in (config, config.get("text_config")) if isinstance(part, Mapping)]
    for place in places:
        for name in ("quantization", "quantization_config"):
            how = place.get(name)
            if isinstance(how, dict) and how.get("bits"):
                return f"{how['bits']} bits"
            if isinstance(how, dict) and (how.get("mode") or how.get("quant_method")):
                return str(how.get("mode") or how["quant_method"])
    return str(next((p[n] for p in places for n in ("dtype", "torch_dtype") if p.get(n)), ""))


def usage(entry: Entry) -> str:
    """Return how a running process uses the model, judged by locks; "" if none does."""
    folders = [entry.home, *(entry.home / "snapshots").glob("*")]
    if any(in_use.is_locked(folder) for folder in folders):
        return "a running treadle serves it"
    locks = locks_of(entry.home.parent, entry.model)
    if any(in_use.is_locked(lock) for lock in locks.glob("*.lock")):
        return "a running process downloads it"
    return ""


def remove(entry: Entry, commit: str | None = None) -> int:
    """Remove the model, or only `commit` of a hub model. Returns the freed bytes. Raises ModelError when the model is
    in use or a file can't be removed."""
    if doing := usage(entry):
        raise ModelError(f"{entry.model} can't be removed: {doing}; stop that first")
    before = _disk_bytes(entry.home)
    if entry.source is Source.HUB and entry.revisions:
        _remove_revisions(entry, [commit] if commit else list(entry.revisions))
    if commit is None or entry.revisions == (commit,):
        _remove_home(entry)
    return before - _disk_bytes(entry.home)


def _remove_revisions(entry: Entry, commits: list[str]) -> None:
    """Remove revisions with the hub's client, which keeps files shared with other revisions and models."""
    from huggingface_hub import scan_cache_dir

    found = scan_cache_dir(entry.home.parent)
    known = {revision.commit_hash for repo in found.repos for revision in repo.revisions}
    found.delete_revisions(*[commit for commit in commits if commit in known]).execute()


def _remove_home(entry: Entry) -> None:
    try:
        for path in (entry.home, locks_of(entry.home.parent, entry.model)):
            if path.exists():
                shutil.rmtree(path)
        entry.home.with_name(f"{entry.home.name}.lock").unlink(missing_ok=True)  # the demo's
    except OSError as error:
        raise ModelError(f"can't remove {error.filename or entry.home}: {error.strerror}") from error


def _disk_bytes(home: Path) -> int:
    return sum(blob_size(path) for path in home.rglob("*") if path.is_file() and not path.is_symlink())
