"""Probe of a freshly loaded model: one run of it for its logits and cache sizes."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from ...errors import ModelError
from .. import mlxlm
from ..kv.cost import KvCost, kv_cost
from ..mlxlm import MlxLm
from .config_oddities import not_finite, read_config
from .reference import Reference

_log = logging.getLogger(__name__)

_TOKENS = (1, 2, 3, 4, 5, 6)


@dataclass(frozen=True)
class Probe:
    """The number of logits, their type, and the cost of a sequence in mlx-lm's caches; `reference` is what backends are
    compared with."""

    vocabulary: int
    logits: Any
    kv: KvCost
    reference: Reference


def probe(library: MlxLm, model: Any, context: int, folder: Path) -> Probe:
    """Run one sequence in mlx-lm's caches. What the model's code raises comes through. Raises ModelError, which names
    `folder`, where the logits are no numbers."""
    caches = library.new_caches(model)
    logits = model(mx.array([_TOKENS], mx.int32), cache=caches)[0, -1:]
    mx.eval(logits, mlxlm.states(caches))
    _check_numbers(logits, folder)
    cost = kv_cost(library.leaves(caches), len(_TOKENS), context)
    selection = None if library.windows(model) is None else library.selection(model)
    reference = Reference(library, model, context, selection=selection)
    return Probe(int(logits.shape[-1]), logits.dtype, cost, reference)


def _check_numbers(logits: Any, folder: Path) -> None:
    """Raise ModelError for logits (B, V) that hold NaN or infinity; minus infinity, for tokens that can't come, is
    fine. Warn where all are equal."""
    logits = logits.astype(mx.float32)
    largest, smallest = mx.max(logits, axis=-1), mx.min(logits, axis=-1)
    wrong = mx.any(mx.isnan(logits)) | mx.any(~mx.isfinite(largest))
    if wrong.item():
        named = not_finite(read_config(folder))
        cause = f" ({', '.join(named)})" if named else " such as rope_theta"
        raise ModelError(
            f"{folder}: the model's first logits are not finite: its weights, or numbers of its config.json{cause}, "
            "are NaN or out of range; download it again (`treadle rm`, then `treadle pull`), or use another"
        )
    if mx.all(largest == smallest).item():
        _log.warning(
            "%s: all logits of the model's first tokens are equal: its weights may be empty, and answers are random; "
            "download it again, or use another",
            folder,
        )
