"""Probe of a freshly loaded model: runs it once to learn its logits, cache sizes and batching."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from ...errors import ModelError
from .. import mlxlm
from ..kv.cost import KvCost, kv_cost
from ..mlxlm import Caches, MlxLm

_log = logging.getLogger(__name__)

_PREFILLED = (1, 2, 3, 4, 5)
_TOLERANCE = 0.25
"""Mean difference over the logits' spread: half precision stays far below, a wrong position goes far above."""


@dataclass(frozen=True)
class Probe:
    """The number of logits, their type, and the cost of a sequence in mlx-lm's caches. `not_batched` is the reason why
    sequences can't share a forward pass there; empty where they can."""

    vocabulary: int
    logits: Any
    kv: KvCost
    not_batched: str


def probe(library: MlxLm, model: Any, context: int, folder: Path) -> Probe:
    """Run two rows of different lengths alone and in a batch. What the runs raise for a row alone comes through. Raises
    ModelError, which names `folder`, where the logits are no numbers."""
    caches = _rows(library, model)
    alone = [_logits(model, [token], row) for token, row in zip((6, 7), caches, strict=True)]
    mx.eval(alone, [mlxlm.states(row) for row in caches])
    _check_numbers(mx.concatenate(alone), folder)
    cost = kv_cost(library.leaves(caches[0]), len(_PREFILLED) + 1, context)
    return Probe(int(alone[0].shape[-1]), alone[0].dtype, cost, _not_batched(library, model, mx.concatenate(alone)))


def _check_numbers(logits: Any, folder: Path) -> None:
    """Raise ModelError for logits (B, V) that hold NaN or infinity; minus infinity, for tokens that can't come, is
    fine. Warn where all are equal."""
    logits = logits.astype(mx.float32)
    largest, smallest = mx.max(logits, axis=-1), mx.min(logits, axis=-1)
    wrong = mx.any(mx.isnan(logits)) | mx.any(~mx.isfinite(largest))
    if wrong.item():
        raise ModelError(
            f"{folder}: the model's first logits are not finite: its weights, or numbers of its config.json such as "
            "rope_theta, are NaN or out of range; download it again (`treadle rm`, then `treadle pull`), or use another"
        )
    if mx.all(largest == smallest).item():
        _log.warning(
            "%s: all logits of the model's first tokens are equal: its weights may be empty, and answers are random; "
            "download it again, or use another",
            folder,
        )


def _not_batched(library: MlxLm, model: Any, alone: Any) -> str:
    """The reason why two sequences can't share a forward pass; empty where they can."""
    rows = _rows(library, model)
    if not library.can_merge(rows[0]):
        kinds = sorted({type(cache).__name__ for cache in rows[0]})
        return f"its caches can't be merged ({', '.join(kinds)})"
    try:
        batch = mlxlm.merge(rows)
        together = _logits(model, [6, 7], batch)
        mx.eval(together, mlxlm.states(batch))
        mlxlm.extend(batch, mlxlm.merge(_rows(library, model)))
        mlxlm.keep_rows(batch, [1, 0, 3])
        mx.eval(mlxlm.states(mlxlm.extract(batch, 1)))
    except (ValueError, TypeError, AttributeError, IndexError, KeyError, NotImplementedError) as error:
        return f"a batch of two rows failed ({type(error).__name__}: {error})"
    alone, together = alone.astype(mx.float32), together.astype(mx.float32)
    if not (mx.mean(mx.abs(together - alone)) <= _TOLERANCE * mx.std(alone)).item():
        return "two rows gave other logits in a batch than alone"
    return ""


def _rows(library: MlxLm, model: Any) -> list[Caches]:
    """Caches of two rows: one that holds a few tokens, and an empty one."""
    caches = [library.new_caches(model) for _ in range(2)]
    model(mx.array([_PREFILLED], mx.int32), cache=caches[0])
    mx.eval(mlxlm.states(caches[0]))
    return caches


def _logits(model: Any, tokens: list[int], caches: Caches) -> Any:
    return model(mx.array(tokens, mx.int32)[:, None], cache=caches)[:, -1, :]
