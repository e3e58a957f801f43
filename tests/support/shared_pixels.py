"""Pixels in shared memory, as the front of a server has them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from treadle import shared_memory

_NUMBERS = itertools.count(1 << 20)


class SharedPixels:
    """Makes shared memory for arrays, which `close` removes."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def put(self, pixels: np.ndarray) -> str:
        """The name of memory that holds `pixels`."""
        name = shared_memory.name_of(os.getpid(), next(_NUMBERS))
        with shared_memory.create(name, pixels.nbytes) as view:
            view[: pixels.nbytes] = pixels.tobytes()
        self.names.append(name)
        return name

    def close(self) -> None:
        for name in self.names:
            shared_memory.unlink(name)


@contextmanager
def shared_pixels() -> Iterator[SharedPixels]:
    made = SharedPixels()
    try:
        yield made
    finally:
        made.close()
