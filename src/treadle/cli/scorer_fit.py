"""Check that a scorer fits the model whose prompts it is to score (SpecPrefill), without reading weights, in the
probe's child."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.compute_path import Backend
from ..core.sparse_prompt import longest_scored
from ..errors import ModelError
from ..text.same_tokens import check_same_tokens
from .second_model import OWN_BACKENDS, check_weights, estimate_alone

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .device_probe import ProbeRequest
    from .estimate import Estimate

CURE = "give a smaller model of the same family, or leave --spec-prefill out"


def scorer_fit(request: ProbeRequest, model: Mapping[str, Any], kind: str, usable_bytes: int) -> Estimate:
    """Return the estimate of the scorer in `request` beside `model`, that of the served one. Raises ModelError where
    the start would refuse it, but for attention that only the start sees."""
    assert request.folder is not None
    assert request.scorer is not None
    check_same_tokens(Path(request.folder), Path(request.scorer), "spec_prefill")
    scorer = estimate_alone(request, request.scorer, kind, usable_bytes)
    for what, backend in (("the served model", model["backend"]), ("it", scorer.backend)):
        if backend == Backend.ENCODER:
            raise ModelError(f"{what} is an embedding model and generates no text")
    if model["backend"] not in OWN_BACKENDS:
        raise ModelError(
            f"a prompt of the served model can't be prefilled in part: the {model['backend']} backend takes the number "
            "of cached tokens for the position"
        )
    if scorer.backend not in OWN_BACKENDS:
        raise ModelError(f"it can't score prompts: the {scorer.backend} backend does not show what it attends to")
    if scorer.kv_token_bytes == 0:
        raise ModelError("it can't score prompts: it has no layer with attention to all tokens")
    longest = longest_scored(int(model["context"]), scorer.context)
    if longest < request.scored_min:
        raise ModelError(
            f"`spec_prefill_min` is {request.scored_min}, and the longest prompt that both have a context for has "
            f"{longest} tokens, so none would be scored: give less, or leave `spec_prefill` out"
        )
    check_weights(model, scorer, usable_bytes)
    return scorer
