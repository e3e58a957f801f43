"""Models on this disk: those in the hub's cache, whole or in part, and the converted demo. Found, judged, removed."""

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
from .cache_paths import PARTIAL, blob_size, locks_of, repository
from .folder import Source


class State(StrEnum):
    """What can be done with a model."""

    READY = "ready"
    PARTIAL = "partial"
    REFUSED = "refused"


@dataclass(frozen=True)
class Entry:
    """One model. `size_bytes` are on disk, partial files included; `whole_bytes` is None where nothing says how much
    there will be. `reason` says what is missing or why it can't be served. `used` and `modified` are POSIX times: when
    it was last served by Treadle or downloaded, and when its files last changed."""

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


def entries(hub_cache: Path | None = None, demo_root: Path | None = None) -> list[Entry]:
    """Every model, by name. Nothing is imported or asked over a network; headers of weights are read."""
    homes = sorted((hub_cache or hub.cache_folder()).glob("models--*--*"))
    found = [_hub_entry(home) for home in homes if home.is_dir()]
    return [*_demo_entries(demo_root), *found]


def find(model: str, hub_cache: Path | None = None) -> Entry | None:
    """The hub model of that name; None where nothing of it is cached."""
    home = repository(hub_cache or hub.cache_folder(), model)
    return _hub_entry(home) if hub.is_id(model) and home.is_dir() else None


def find_demo(root: Path | None = None) -> Entry | None:
    """The converted demo; None where it is not."""
    return next(_demo_entries(root), None)


def _demo_entries(root: Path | None) -> Iterator[Entry]:
    home = (root or cache.default_root()) / demo.NAME
    if home.is_dir():
        yield _judged(_entry("demo", Source.DEMO, home, home, [home]))


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
        return replace(_described(entry), state=State.PARTIAL, reason=_missing_text(entry, missing))
    return _judged(entry)


def _snapshots(home: Path) -> list[Path]:
    """Every snapshot, that of `main` first, then the newest."""
    main = ""
    with contextlib.suppress(OSError):
        main = (home / "refs" / "main").read_text(encoding="ascii").strip()
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
    """Bytes of all files that a download fetches, and the names of those that are missing, by the listing that the
    hub's client keeps; (None, []) where it kept none."""
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]

    from .remote import PATTERNS

    folder = entry.folder
    if folder is None:
        return None, []
    try:
        tree = get_cached_repo_tree(entry.model, revision=folder.name, cache_dir=entry.home.parent)
    except Exception:  # none is kept, or the client's own format has changed: the checks go by the files alone
        return None, []
    files = list(filter_repo_objects(tree, allow_patterns=PATTERNS, key=lambda file: file.path))
    return sum(file.size for file in files), [file.path for file in files if not (folder / file.path).exists()]


def _missing_text(entry: Entry, missing: list[str]) -> str:
    what = f"{len(missing)} file{'s' * (len(missing) > 1)} missing" if missing else "nothing but pieces"
    return f"{what}: '{command()} pull {entry.model}' fetches the rest"


def _judged(entry: Entry) -> Entry:
    """The entry with its config's facts, once checks of its folder say whether it could be served."""
    folder = entry.folder
    assert folder is not None
    entry = _described(entry)
    try:
        folder_checks.check(folder)
    except ModelError as error:
        reason = error.message.replace(f"{folder}{os.sep}", "").replace(str(folder), "it")
        return replace(entry, state=State.REFUSED, reason=reason)
    return entry


def _described(entry: Entry) -> Entry:
    config: Any = {}
    if entry.folder is not None:
        with contextlib.suppress(OSError, ValueError, RecursionError):
            config = json.loads((entry.folder / "config.json").read_text(encoding="utf-8"))
    if not isinstance(config, dict):
        return entry
    return replace(entry, architecture=str(config.get("model_type") or ""), weights=stored_as(config))


def stored_as(config: Mapping[str, Any]) -> str:
    """How the weights are stored, by the config: "4 bits", "fp8", "bfloat16"; empty where it does not say."""
    places = [config, config.get("text_config") or {}]
    for place in places:
        for name in ("quantization", "quantization_config"):
            how = place.get(name)
            if isinstance(how, dict) and how.get("bits"):
                return f"{how['bits']} bits"
            if isinstance(how, dict) and (how.get("mode") or how.get("quant_method")):
                return str(how.get("mode") or how["quant_method"])
    return str(next((p[n] for p in places for n in ("dtype", "torch_dtype") if p.get(n)), ""))


def in_use_by(entry: Entry) -> str:
    """What a running process does with the model, as far as locks tell; empty when nothing."""
    folders = [entry.home, *(entry.home / "snapshots").glob("*")]
    if any(in_use.is_held(folder) for folder in folders):
        return "a running treadle serves it"
    locks = locks_of(entry.home.parent, entry.model)
    if any(in_use.is_held(lock) for lock in locks.glob("*.lock")):
        return "a running process downloads it"
    return ""


def remove(entry: Entry, commit: str | None = None) -> int:
    """Remove the model, or of a hub model one commit, from the disk; the bytes that came free. Raises ModelError when
    it is in use or something could not be removed."""
    if doing := in_use_by(entry):
        raise ModelError(f"{entry.model} can't be removed: {doing}; stop that first")
    before = _held_bytes(entry.home)
    if entry.source is Source.HUB and entry.revisions:
        _remove_revisions(entry, [commit] if commit else list(entry.revisions))
    if commit is None or entry.revisions == (commit,):
        _remove_home(entry)
    return before - _held_bytes(entry.home)


def _remove_revisions(entry: Entry, commits: list[str]) -> None:
    """By the hub's own client, which knows what files revisions (and models) share."""
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


def _held_bytes(home: Path) -> int:
    return sum(blob_size(path) for path in home.rglob("*") if path.is_file() and not path.is_symlink())
