"""Resolution of the `model` setting to a checked folder: the demo, a local folder, or a hub id."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from ..config import Settings
from ..errors import ModelError
from ..installation import Problem
from . import demo, folder_checks, hub
from .folder import ModelFolder, Source
from .transfer import Transfer

DEMO = "demo"
_MAX_QUOTED = 200


def resolve(
    settings: Settings, progress: Callable[[str], None], watch: Callable[[Transfer], None] | None = None
) -> ModelFolder:
    """Return the checked model folder of `settings`, converting or downloading it first if necessary, with the folder
    of its draft model and its scorer, which are checked when they are loaded.

    `progress` is called with short lines for people, `watch` with a download's state four times a second; without
    `watch`, `progress` gets a line of it every five seconds. May take minutes. Raises ModelError, in one line with
    cause and fix. `demo` is the demo model even if a folder `demo` exists; `./demo` is the folder.
    """
    found = locate(settings, progress, watch)
    return replace(found, config=folder_checks.check(found.path))


def locate(
    settings: Settings, progress: Callable[[str], None], watch: Callable[[Transfer], None] | None = None
) -> ModelFolder:
    """Like `resolve`, without the folder's checks: call `folder_checks.check` before loading it. The revision is that
    of the model, not of its draft model or its scorer."""
    path, name, source = _locate(settings, progress, watch)
    others = {}
    for param, model in _others(settings).items():
        with _of(param):
            others[param] = locate(_alone(settings, model), progress, watch)
    return ModelFolder(path, name, source, {}, others.get("draft"), others.get("spec_prefill"))


def _others(settings: Settings) -> dict[str, str]:
    """Return the models beside the served one, by the settings that name them."""
    named = {"draft": settings.draft, "spec_prefill": settings.spec_prefill}
    return {param: model for param, model in named.items() if model is not None}


def _alone(settings: Settings, model: str) -> Settings:
    """Return the settings for `model` by itself."""
    keep, least = Settings.spec_prefill_keep, Settings.spec_prefill_min
    return replace(
        settings,
        model=model,
        revision=None,
        speculate="auto",
        draft=None,
        spec_prefill=None,
        spec_prefill_keep=keep,
        spec_prefill_min=least,
    )


def check_named(settings: Settings) -> None:
    """Raise ModelError when `model`, `draft` or `spec_prefill` is neither the demo, nor a folder, nor has the form of a
    hub id. Cheap: reads no files and sends no requests."""
    _check_name(settings.model)
    for param, model in _others(settings).items():
        with _of(param):
            _check_name(model)


def _check_name(model: str) -> None:
    local = _expand(model)
    if model == DEMO or os.path.isdir(local):
        return
    if not hub.is_id(model):
        raise ModelError(_not_found(model, local))


@contextmanager
def _of(param: str) -> Iterator[None]:
    """Name the setting in errors about the model that it names."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"`{param}` can't be used: {error}", param=param) from error


def missing_packages(model: str) -> Problem | None:
    """Describe the packages that must be installed to resolve `model`; None if there are none."""
    return demo.missing_packages() if model == DEMO else None


def _locate(
    settings: Settings, progress: Callable[[str], None], watch: Callable[[Transfer], None] | None
) -> tuple[Path, str, Source]:
    check_named(settings)
    model = settings.model
    local = _expand(model)
    if model != DEMO and os.path.isdir(local):
        _reject_revision(settings)
        path = local.resolve()
        return path, path.name or DEMO, Source.FOLDER
    if model == DEMO:
        _reject_revision(settings)
        return demo.folder(progress), demo.NAME, Source.DEMO
    found = hub.download(model, progress, revision=settings.revision, offline=settings.offline, watch=watch)
    return found, model, Source.HUB


def _reject_revision(settings: Settings) -> None:
    if settings.revision is not None:
        raise ModelError(f"revision is for hub ids, and '{settings.model}' is not one: leave it out", param="revision")


def _expand(model: str) -> Path:
    try:
        return Path(model).expanduser()
    except RuntimeError:  # `~user` without such a user
        return Path(model)


def _not_found(model: str, local: Path) -> str:
    quoted = repr(model if len(model) <= _MAX_QUOTED else model[:_MAX_QUOTED] + "...")
    if os.path.isfile(local):
        return f"{quoted} is a file: give the folder that holds config.json, the weights and tokenizer.json"
    if local.is_absolute() or model.startswith((".", "~")):
        return f"there is no folder {quoted}"
    if _is_nearly_demo(model):
        return f"{quoted} is no folder here and not a hub id (owner/name): did you mean 'demo'?"
    return f"{quoted} is no folder here and not a hub id (owner/name): give one of them, or 'demo'"


def _is_nearly_demo(model: str) -> bool:
    """Whether `model` is a misspelling of "demo" or of the demo's served name."""
    return bool(difflib.get_close_matches(model.lower(), (DEMO, demo.NAME), n=1, cutoff=0.75))
