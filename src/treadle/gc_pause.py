"""Pause of garbage collection while a process of Treadle's own imports its modules."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collections() -> Iterator[None]:
    """Collect no garbage in the block, and exclude the objects made in it from each later collection. Imports leave
    next to no garbage, but collections among them take a tenth of their time, and each later one would visit all
    modules."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
