"""Lookahead of KV backends whose caches are MLX arrays, by device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx


def lookahead(device: str) -> int:
    """Return the number of steps that may be started before one is read. The CPU computes with the cores that would
    prepare the next step."""
    return 0 if device == "cpu" else 1


def evaluation(ahead: int) -> Callable[[Any], None]:
    """Return the evaluation of what steps leave or find in caches: with lookahead it must not wait for the device, as a
    step is in flight."""
    return mx.async_eval if ahead else _evaluate


def _evaluate(arrays: Any) -> None:
    mx.eval(arrays)
