"""Check that a draft model fits the model that it is to draft for, without reading weights, in the probe's child."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.compute_path import Backend
from ..errors import ModelError
from ..models import folder_checks
from ..text.same_tokens import check_same_tokens
from .head_fit import head_estimate
from .second_model import OWN_BACKENDS, check_weights, estimate_alone

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .device_probe import ProbeRequest
    from .estimate import Estimate

CURE = "give a smaller model of the same family or an EAGLE-3 head of this model, or leave --draft out"


def draft_fit(request: ProbeRequest, model: Mapping[str, Any], kind: str, usable_bytes: int) -> Estimate:
    """Return the estimate of the draft model, or the EAGLE-3 head, in `request` beside `model`, that of the served one.
    Raises ModelError where the start would refuse it."""
    assert request.folder is not None
    assert request.draft is not None
    target, folder = Path(request.folder), Path(request.draft)
    is_head = folder_checks.is_head(folder)
    if not is_head:
        check_same_tokens(target, folder)
    if reason := _no_verification(model, kind):
        raise ModelError(f"the served model can't verify drafts: {reason}")
    if is_head:
        draft = head_estimate(target, folder, model, kind)
    else:
        draft = estimate_alone(request, request.draft, kind, usable_bytes)
    if not is_head and (reason := _no_drafts(draft)):
        raise ModelError(f"it can't draft tokens: {reason}")
    check_weights(model, draft, usable_bytes)
    return draft


def _no_verification(model: Mapping[str, Any], kind: str) -> str:
    if model["backend"] == Backend.CONTIGUOUS and kind == "cuda":
        return "MLX's own attention on CUDA is planned anew for each length"
    return "" if model["backend"] in OWN_BACKENDS else _own_caches(model["backend"])


def _no_drafts(draft: Estimate) -> str:
    if draft.backend == Backend.ENCODER:
        return "it is an embedding model and generates no text"
    if draft.state_bytes:
        return "it has recurrent layers, whose states can't be cut"
    return "" if draft.backend in OWN_BACKENDS else _own_caches(draft.backend)


def _own_caches(backend: str) -> str:
    return f"mlx-lm's own caches, by which the {backend} backend computes it, can't take back tokens"
