"""Timer of consecutive calls."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx


def seconds(run: Callable[[int], Any], times: int = 40) -> float:
    """Return the seconds of one run, the best of three tries of `times` runs each, enqueued by the host while the
    device computes earlier ones: if the host is slower than the device, this is the host's time."""
    mx.eval([run(i) for i in range(4)])
    tries = []
    for _ in range(3):
        began = time.perf_counter()
        mx.eval([run(i) for i in range(times)])
        tries.append((time.perf_counter() - began) / times)
    return min(tries)
