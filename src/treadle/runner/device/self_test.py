"""Kernels are tried before they are used, as nobody knows every device and compiler."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from ..base import RunnerBroken
from .guard import mlx_runtime

_log = logging.getLogger(__name__)
T = TypeVar("T")


def self_tested(what: str, otherwise: str, make: Callable[[], T], why_not: Callable[[T], str]) -> T | None:
    """What `make` makes; None, with one warning that begins with `otherwise`, where `why_not` names what is wrong with
    it, or MLX can't make or run it. `what` is tried."""
    try:
        made = make()
        with mlx_runtime(f"trying {what}"):
            reason = why_not(made)
    except (ValueError, RuntimeError, RunnerBroken) as error:
        reason = f"{type(error).__name__}: {error}"
    if reason:
        _log.warning("%s: %s", otherwise, reason)
        return None
    return made
