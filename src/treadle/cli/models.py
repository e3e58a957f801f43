"""`treadle pull`, `treadle models`, `treadle rm`: models on this disk."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..config import Settings
from ..errors import ConfigError, ModelError
from ..installation import command
from ..models import demo, folder_checks, hub, hub_errors, inventory
from ..models.cache_paths import SHORTEST_COMMIT
from ..models.inventory import Entry, State
from ..models.resolve import DEMO, locate
from ..units import size
from .transfers import TransferView

_COLOURS = {State.READY: "green", State.PARTIAL: "yellow", State.REFUSED: "red"}
_WIDE = 1000  # output for programs: no cell may be folded


# pull ---------------------------------------------------------------------------------------------------------------


def pull(model: str, revision: str | None) -> int:
    """Download and check MODEL, or convert the demo, and print its folder on standard output. Returns 0. Raises
    ModelError, and ConfigError for an empty name."""
    _check_given(model)
    if model != DEMO and Path(model).expanduser().is_dir():
        raise ModelError(f"'{model}' is a folder here: there is nothing to pull; '{command()} serve {model}' serves it")
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    began = time.monotonic()
    with _interruptible(), contextlib.closing(TransferView(console)) as view:

        def progress(line: str) -> None:
            view.close()
            console.print(f"  {line}", style="dim", markup=False)

        try:
            folder = locate(Settings(model=model, revision=revision), progress, view.show)
            folder_checks.check_any(folder.path)
        except KeyboardInterrupt as stop:
            view.close()
            console.print(f"Interrupted: '{command()} pull {model}' goes on from what was fetched", markup=False)
            return 128 + (stop.args[0] if stop.args else signal.SIGINT)
    size_bytes = sum(path.stat().st_size for path in folder.path.iterdir() if path.is_file())
    console.print(
        f"{model} is here and whole: {size(size_bytes)}, after {time.monotonic() - began:.1f} s", markup=False
    )
    print(folder.path)
    return 0


def _check_given(model: str) -> None:
    if not model:  # as a path it would be this folder
        raise ConfigError("MODEL is empty: give a hub id such as owner/name, or 'demo'", param="model")


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Context manager in which SIGTERM raises KeyboardInterrupt, as SIGINT does, so that a bar is taken off the
    screen."""

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt(number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# models -------------------------------------------------------------------------------------------------------------


def show(*, everything: bool, as_json: bool) -> int:
    """Print the models on this disk; without `everything` only those that can be served once they are complete."""
    found = inventory.entries()
    listed = [entry for entry in found if everything or entry.state is not State.REFUSED]
    if as_json:
        print(
            json.dumps(
                {"hub_cache": str(hub.cache_folder()), "models": [_to_plain(entry) for entry in listed]}, indent=2
            )
        )
        return 0
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_WIDE)
    if listed:
        console.print(_table(listed))
    else:
        console.print(f"No model in {hub.cache_folder()}. '{command()} pull OWNER/NAME' fetches one.", markup=False)
    if not demo.is_converted() and demo.missing_packages() is None:
        console.print("demo is installed: it is converted at the first start, once", markup=False)
    if hidden := len(found) - len(listed):
        console.print(
            f"{hidden} more that can't be served: '{command()} models --all' says why", style="dim", markup=False
        )
    return 0


def _table(found: list[Entry]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("MODEL", "SIZE", "ARCHITECTURE", "WEIGHTS", "USED", "STATE"):
        table.add_column(name, justify="right" if name == "SIZE" else "left", overflow="fold", no_wrap=name == "SIZE")
    for entry in found:
        cells = (entry.model, _size_text(entry), entry.architecture or "-", entry.weights or "-", _day(entry.used))
        table.add_row(*(Text(cell) for cell in cells), Text(_state_text(entry), _COLOURS[entry.state]))
    return table


def _size_text(entry: Entry) -> str:
    if entry.state is State.PARTIAL and entry.whole_bytes:
        return f"{size(entry.size_bytes)} of {size(entry.whole_bytes)}"
    return size(entry.size_bytes)


def _state_text(entry: Entry) -> str:
    is_named = entry.state is State.READY and entry.revision
    named = f" with --revision {entry.revision[:SHORTEST_COMMIT]}" if is_named else ""
    several = f", {len(entry.revisions)} revisions" if len(entry.revisions) > 1 else ""
    pieces = f", {size(entry.partial_bytes)} of pieces" if entry.partial_bytes and entry.state is State.READY else ""
    return f"{entry.state}{named}{several}{pieces}" + (f": {entry.reason}" if entry.reason else "")


def _day(moment: float) -> str:
    return datetime.fromtimestamp(moment).strftime("%Y-%m-%d")


def _to_plain(entry: Entry) -> dict[str, Any]:
    return {
        "model": entry.model,
        "source": entry.source.value,
        "path": str(entry.folder or entry.home),
        "state": entry.state.value,
        "reason": entry.reason,
        "size_bytes": entry.size_bytes,
        "whole_bytes": entry.whole_bytes,
        "partial_bytes": entry.partial_bytes,
        "architecture": entry.architecture,
        "weights": entry.weights,
        "revisions": list(entry.revisions),
        "revision": entry.revision or None,
        "used": _moment(entry.used),
        "modified": _moment(entry.modified),
    }


def _moment(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).isoformat(timespec="seconds")


# rm -----------------------------------------------------------------------------------------------------------------


def remove(model: str, revision: str | None, *, yes: bool) -> int:
    """Remove MODEL from this disk after a question. Returns 0 when it is gone, 1 if the answer was no. Raises
    ModelError if there is nothing to remove or it is in use, ConfigError for an empty name, or without a terminal to
    ask on."""
    _check_given(model)
    entry = _to_remove(model)
    commit = None if revision is None else _commit(entry, revision)
    subject = f"revision {revision} of {model}" if commit else f"{model}, {size(entry.size_bytes)}"
    if not yes and not _confirmed(f"Remove {subject} from {entry.home}?"):
        print("Nothing was removed")
        return 1
    print(f"Removed {subject}: {size(inventory.remove(entry, commit))} are free again")
    return 0


def _to_remove(model: str) -> Entry:
    entry = inventory.find_demo() if model == DEMO else inventory.find(model)
    if entry is not None:
        return entry
    if model == DEMO:
        raise ModelError("the demo is not on this disk: there is nothing to remove")
    if os.path.isdir(Path(model).expanduser()):
        raise ModelError(f"'{model}' is a folder of yours, which Treadle never removes: do it yourself")
    hint = hub_errors.nearest(model, hub.cache_folder()).replace(", which is cached", "")
    raise ModelError(f"'{model}' is not in {hub.cache_folder()}{hint}: '{command()} models --all' lists what is")


def _commit(entry: Entry, revision: str) -> str:
    """Return the full commit of a branch, a tag or the beginning of a commit."""
    ref = entry.home / "refs" / revision
    if ".." not in revision and ref.is_file():
        return ref.read_text(encoding="ascii").strip()
    found = [commit for commit in entry.revisions if commit.startswith(revision)]
    if len(revision) >= SHORTEST_COMMIT and len(found) == 1:
        return found[0]
    cached = ", ".join(entry.revisions) or "none"
    raise ModelError(f"{entry.model} has no revision {revision} on this disk: there are {cached}")


def _confirmed(question: str) -> bool:
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise ConfigError("there is no terminal to ask on: give --yes to remove without asking", param="yes")
    return typer.confirm(question, prompt_suffix=" ", err=True)
