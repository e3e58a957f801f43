"""Refusals of sequences that come to the scheduler and can't be served."""

from __future__ import annotations

from .finishes import failed, too_big
from .image import fault_of_images
from .messages import Finish, Submit
from .scheduler_limits import SchedulerLimits
from .sequence import Sequence


def refusal_of(seq: Sequence, limits: SchedulerLimits) -> Finish | None:
    """Return the finish of a new sequence that the engine can't serve; None for all others."""
    if fault := _fault_of(seq.request, limits):
        return failed("invalid_request", fault)
    return too_big(seq, limits.capacity) if 0 < limits.capacity < seq.max_num_tokens else None


def _fault_of(request: Submit, limits: SchedulerLimits) -> str:
    if not request.prompt:
        return "the prompt is empty: send at least one token"
    if request.pooling is not None and request.max_tokens:
        return "a pooled sequence generates nothing: max_tokens must be 0"
    if request.images and not limits.vision.layers:
        return "this model takes no images"
    most = limits.prefill_tokens if limits.vision.whole else 0
    return fault_of_images(request.images, len(request.prompt), most)
