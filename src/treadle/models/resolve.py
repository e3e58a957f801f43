"""From the `model` setting to a checked folder: the demo, a folder here, or a hub id."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ..config import Settings
from ..errors import ModelError
from ..installation import Problem
from . import demo, folder_checks, hub
from .folder import ModelFolder, Source
from .transfer import Transfer

DEMO = "demo"
_SHOWN = 200


def resolve(
    settings: Settings, progress: Callable[[str], None], watch: Callable[[Transfer], None] | None = None
) -> ModelFolder:
    """The model folder that `settings` ask for, converted or downloaded first where needed, and checked.

    `progress` gets short lines for people; `watch` gets a download's state four times a second, and without it
    `progress` gets a line of it now and then. May take minutes. Raises ModelError, in one line with cause and fix.
    Nothing is looked up in a folder's name: `./demo` is a folder, `demo` is the demo.
    """
    found = locate(settings, progress, watch)
    return replace(found, config=folder_checks.check(found.path))


def locate(
    settings: Settings, progress: Callable[[str], None], watch: Callable[[Transfer], None] | None = None
) -> ModelFolder:
    """Like `resolve`, with the folder's files not looked at yet: who loads it has to call `trust.check`."""
    path, name, source = _located(settings, progress, watch)
    return ModelFolder(path, name, source, {})


def check_named(settings: Settings) -> None:
    """Raise ModelError where `model` is neither a folder, nor has the form of a hub id, nor is the demo. Cheap: the
    folder is not read, and no hub is asked."""
    model, here = settings.model, _expanded(settings.model)
    if model == DEMO or os.path.isdir(here):
        return
    if not hub.is_id(model):
        raise ModelError(_not_found(model, here))


def lacks(model: str) -> Problem | None:
    """What has to be installed before `model` can be resolved."""
    return demo.lacks() if model == DEMO else None


def _located(
    settings: Settings, progress: Callable[[str], None], watch: Callable[[Transfer], None] | None
) -> tuple[Path, str, Source]:
    check_named(settings)
    model = settings.model
    here = _expanded(model)
    if model != DEMO and os.path.isdir(here):
        _refuse_revision(settings)
        path = here.resolve()
        return path, path.name or DEMO, Source.FOLDER
    if model == DEMO:
        _refuse_revision(settings)
        return demo.folder(progress), demo.NAME, Source.DEMO
    found = hub.download(model, progress, revision=settings.revision, offline=settings.offline, watch=watch)
    return found, model, Source.HUB


def _refuse_revision(settings: Settings) -> None:
    if settings.revision is not None:
        raise ModelError(f"revision is for hub ids, and '{settings.model}' is not one: leave it out", param="revision")


def _expanded(model: str) -> Path:
    try:
        return Path(model).expanduser()
    except RuntimeError:  # a home folder of nobody
        return Path(model)


def _not_found(model: str, here: Path) -> str:
    shown = repr(model if len(model) <= _SHOWN else model[:_SHOWN] + "...")
    if os.path.isfile(here):
        return f"{shown} is a file: give the folder that holds config.json, the weights and tokenizer.json"
    if here.is_absolute() or model.startswith((".", "~")):
        return f"there is no folder {shown}"
    if _is_nearly_demo(model):
        return f"{shown} is no folder here and not a hub id (owner/name): did you mean 'demo'?"
    return f"{shown} is no folder here and not a hub id (owner/name): give one of them, or 'demo'"


def _is_nearly_demo(model: str) -> bool:
    """Whether `model` is a slip in the demo's name, or the name under which it is served."""
    return bool(difflib.get_close_matches(model.lower(), (DEMO, demo.NAME), n=1, cutoff=0.75))
