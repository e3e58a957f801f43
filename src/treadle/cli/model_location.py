"""Location of the model and its fitness to be served, without loading it: on this disk, or from the hub's listing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from ..config import Settings
from ..errors import ModelError
from ..models import ModelFolder, demo, hub, resolve
from ..models.resolve import DEMO
from ..units import size
from ..weight_names import weight_files
from . import hub_check
from .findings import Finding, Mark

MODEL = "Model"


@dataclass(frozen=True)
class ModelLocation:
    """`folder` can be examined in place of the model: its own, or the `sketch` of one that is still on the hub; None if
    there is neither. `draft` and `scorer` are the folders of the draft model and the scorer, where all are on this
    disk."""

    findings: tuple[Finding, ...]
    folder: Path | None = None
    sketch: bool = False
    draft: Path | None = None
    scorer: Path | None = None


def find(settings: Settings, scratch: Path) -> ModelLocation:
    """Look for the model that `settings` name. The hub is asked for a hub model that is not cached, unless `offline` is
    set, and a sketch of it is made in the folder `scratch`."""
    if settings.model == DEMO and not demo.is_converted():
        return ModelLocation((_unconverted_demo(),))
    if _is_on_hub(settings.model) and (reason := _not_cached(settings)):
        if settings.offline:
            facts = {"name": settings.model, "source": "hub", "cached": False}
            return ModelLocation((Finding(MODEL, "model", reason, Mark.FAIL, facts=facts),))
        findings, has_sketch = hub_check.examine(settings, scratch)
        return ModelLocation(tuple(findings), scratch if has_sketch else None, sketch=has_sketch)
    try:
        folder = resolve(replace(settings, offline=True), lambda stage: None)
    except ModelError as error:
        return ModelLocation((Finding(MODEL, "model", error.message, Mark.FAIL),))
    draft = None if folder.draft is None else folder.draft.path
    scorer = None if folder.scorer is None else folder.scorer.path
    return ModelLocation((_found(folder),), folder.path, draft=draft, scorer=scorer)


def _unconverted_demo() -> Finding:
    if (missing := demo.missing_packages()) is not None:
        return Finding(MODEL, "model", missing.message, Mark.FAIL, missing.fix)
    value = f"{demo.NAME} is installed, and converted at the first start (once, under a minute, 0.5 GiB of disk)"
    return Finding(MODEL, "model", value, facts={"name": demo.NAME, "source": DEMO, "converted": False})


def _is_on_hub(model: str) -> bool:
    return model != DEMO and hub.is_id(model) and not Path(model).expanduser().is_dir()


def _not_cached(settings: Settings) -> str:
    try:
        hub.download(settings.model, lambda stage: None, revision=settings.revision, offline=True)
    except ModelError as error:
        return error.message
    return ""


def _found(folder: ModelFolder) -> Finding:
    size_bytes = sum(path.stat().st_size for path in weight_files(folder.path))
    facts = {
        "name": folder.name,
        "source": folder.source.value,
        "path": str(folder.path),
        "architecture": folder.config.get("model_type"),
        "size_bytes": size_bytes,
    }
    value = f"{folder.name} ({folder.config.get('model_type')}, {size(size_bytes)} of weights) in {folder.path}"
    return Finding(MODEL, "model", value, facts=facts)
