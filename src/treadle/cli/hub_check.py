"""Doctor's findings about a model that is only on the hub: existence, access, disk space, tokenizer, and a sketch for
the remaining checks. Asks for names, sizes, small files and headers; no weights are downloaded."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import Settings
from ..errors import ModelError, TreadleError
from ..installation import command
from ..models import folder_checks, hub, hub_errors
from ..units import size
from .findings import Finding, Mark

if TYPE_CHECKING:
    from ..models.remote import Listing

_SECTION = "Model"


def examine(settings: Settings, scratch: Path) -> tuple[list[Finding], bool]:
    """Return the findings, and whether the folder `scratch` now holds a sketch of the model that can be examined like a
    folder. Takes seconds; each request has a time limit."""
    from ..models import remote

    model = settings.model
    try:
        listing = _with_retries(lambda: remote.list_files(model, settings.revision))
        _sketch(listing, scratch)
    except ModelError as error:
        return [_failure(settings, error.message.replace(str(scratch), model))], False
    except Exception as error:  # any error of the hub's client is the finding
        return [
            _failure(settings, hub_errors.explain(model, settings.revision, False, error, hub.cache_folder()))
        ], False
    on_hub = Finding(
        _SECTION,
        "model",
        f"{model} is on the hub and not wholly on this disk",
        fix=f"{command()} pull {model}" + (f" --revision {settings.revision}" if settings.revision else ""),
        facts={"name": model, "source": "hub", "cached": False, "commit": listing.commit},
    )
    return [on_hub, _download(listing), _tokenizer(settings, scratch)], True


def _sketch(listing: Listing, scratch: Path) -> None:
    from ..models import config_sketch

    folder_checks.refuse_formats(listing.model, listing.names)
    _with_retries(lambda: config_sketch.write_sketch(listing, scratch))
    folder_checks.check(scratch)


def _with_retries(attempt: Any) -> Any:
    from ..models.fetch import SHORT_RETRY_DELAYS_S, retry

    return retry(attempt, lambda wait_s, error: time.sleep(wait_s), SHORT_RETRY_DELAYS_S)


def _failure(settings: Settings, reason: str) -> Finding:
    facts = {"name": settings.model, "source": "hub", "cached": False}
    return Finding(_SECTION, "model", reason, Mark.FAIL, facts=facts)


def _download(listing: Listing) -> Finding:
    from ..models.cache_paths import repository
    from ..models.fetch import bytes_on_disk

    files, cache = listing.needed_files(), hub.cache_folder()
    total = sum(file.size for file in files)
    blobs = repository(cache, listing.model) / "blobs"
    cached = sum(bytes_on_disk(blobs, file) for file in files)
    free = hub.free_bytes(cache)
    facts = {"total_bytes": total, "here_bytes": cached, "free_bytes": free, "files": len(files), "cache": str(cache)}
    value = f"{size(total)} in {len(files)} files" + (f", {size(cached)} of it here already" if cached else "")
    value += f"; {size(free)} free in {cache}"
    if total - cached > free:
        fix = f"free some ('{command()} models' lists what can go), or set HF_HOME to a folder on another disk"
        return Finding(_SECTION, "download", value, Mark.FAIL, fix, facts)
    return Finding(_SECTION, "download", value, facts=facts)


def _tokenizer(settings: Settings, scratch: Path) -> Finding:
    """Return the finding about the chat template; the tokenizer itself is only read from the disk."""
    from ..text.folder import FolderConfig
    from ..text.templates import find_template

    try:
        template = find_template(FolderConfig.read(scratch), settings.chat_template)
    except TreadleError as error:
        return Finding(_SECTION, "tokenizer", error.message.replace(str(scratch), settings.model), Mark.FAIL)
    if template is None:
        fix = f"{command()} serve --chat-template FILE, or use /v1/completions only"
        value = "tokenizer.json, no chat template: chats are refused"
        return Finding(_SECTION, "tokenizer", value, Mark.WARN, fix, {"chat_template": False})
    return Finding(_SECTION, "tokenizer", "tokenizer.json, with a chat template", facts={"chat_template": True})
