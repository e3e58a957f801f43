"""Checks of `treadle doctor` that a draft model and a scorer share: memory beside the served model, and backends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from ..core.compute_path import Backend
from ..errors import ModelError
from ..units import size
from .estimate import Estimate, estimate

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .device_probe import ProbeRequest

OWN_BACKENDS = (Backend.PAGED, Backend.CONTIGUOUS)
"""Backends whose sequences are cut back, and have positions, as such models need."""


def estimate_alone(request: ProbeRequest, folder: str, kind: str, usable_bytes: int) -> Estimate:
    """Return the estimate of the model in `folder`, to which the limits of `request` do not apply."""
    alone = msgspec.structs.replace(request, folder=folder, context=None, memory=None, kv_bits=None)
    return estimate(alone, kind, usable_bytes)


def check_weights(model: Mapping[str, Any], second: Estimate, usable_bytes: int) -> None:
    """Raise ModelError where the weights of the served `model` and of the `second` one don't fit together."""
    both = int(model["weight_bytes"]) + second.weight_bytes
    if usable_bytes and both > usable_bytes:
        raise ModelError(f"the weights of both take {size(both)}, and {size(usable_bytes)} are free")
