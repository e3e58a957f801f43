"""Models from the Hugging Face hub: resumed downloads into its own cache, a pinned revision, an offline mode."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import ModelError

# Never code, never pickles: what is not on this list is not downloaded.
_PATTERNS = ["model*.safetensors", "*.json", "*.jinja", "tokenizer.model", "*.txt"]
_REPORT_S = 2.0
_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)


def is_id(text: str) -> bool:
    """Whether `text` has the form of a hub id: owner/name."""
    return _ID.fullmatch(text) is not None and not any(bad in text for bad in ("..", "--")) and text[-1] not in ".-"


def download(
    model: str,
    progress: Callable[[str], None],
    *,
    revision: str | None = None,
    offline: bool = False,
    cache_dir: Path | None = None,
    endpoint: str | None = None,
) -> Path:
    """The folder of hub model `model` at `revision`, downloaded where it is not cached yet.

    `progress` may be called from other threads. Raises ModelError when the hub can't be reached, refuses, or (offline)
    nothing is cached.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    progress(f"looking up {model}" + (" in the local cache" if offline else " on the hub"))
    try:
        found = snapshot_download(
            model,
            revision=revision,
            local_files_only=offline,
            allow_patterns=_PATTERNS,
            cache_dir=cache_dir,
            endpoint=endpoint,
            tqdm_class=_reporter(model, progress),
        )
    except HFValidationError as error:
        raise ModelError(f"'{model}' is not a hub id: {error}") from error
    except Exception as error:
        raise ModelError(_reason(model, revision, offline, error)) from error
    return Path(found)


def _reason(model: str, revision: str | None, offline: bool, error: Exception) -> str:
    """One line: what the hub's client could not do, and what to do about it."""
    from huggingface_hub import errors

    at = f" at revision {revision}" if revision else ""
    if isinstance(error, errors.GatedRepoError):
        return f"{model} is gated: accept its terms on the hub, then run 'hf auth login'"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"there is no folder '{model}' here and no such model on the hub (a private one needs 'hf auth login')"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{model} has no revision {revision}"
    if isinstance(error, errors.LocalEntryNotFoundError) and offline:
        return f"{model}{at} is not wholly in the local cache and offline is set: download it once without offline"
    if isinstance(error, errors.LocalEntryNotFoundError):
        return f"can't reach the hub for {model}{at}, and it is not cached: check the network, or give a folder"
    return f"can't download {model}{at}: {_line(error)}; what was fetched is kept, so try again"


def _line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _reporter(model: str, progress: Callable[[str], None]) -> type[Any]:
    """A progress bar class that reports lines of bytes and draws nothing."""
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    class Reporter(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            quiet = {"file": io.StringIO(), "disable": False, "mininterval": _REPORT_S, "leave": False}
            self.said = ""
            super().__init__(*args, **{**options, **quiet})  # type: ignore[no-untyped-call]

        def display(self, msg: str | None = None, pos: int | None = None) -> bool:
            # The hub's client draws several bars at once; this one counts the bytes that reached the disk.
            if self.unit == "B" and self.total and "econstruct" in str(self.desc):
                line = f"downloading {model}: {_size(self.n)} of {_size(self.total)}"
                if line != self.said:
                    self.said = line
                    progress(line)
            return True

    return Reporter


def _size(count: float) -> str:
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"
