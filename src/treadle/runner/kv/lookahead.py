"""Lookahead of KV backends whose caches are MLX arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx


def lookahead(device: str) -> int:
    """Return the number of steps over mlx-lm's caches that may be started before one is read. On a CPU none: keeping
    what a step may take back costs there what it saves."""
    return 0 if device == "cpu" else 1


def evaluation(ahead: int) -> Callable[[Any], None]:
    """Return the evaluation of what steps leave or find in caches: with lookahead it must not wait for the device, as a
    step is in flight."""
    return _begin if ahead else _evaluate


def _begin(arrays: Any) -> None:
    mx.async_eval(arrays)  # type: ignore[no-untyped-call]


def _evaluate(arrays: Any) -> None:
    mx.eval(arrays)
