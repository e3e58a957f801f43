"""Pixels in shared memory, as the front of a server has them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from treadle import shared_memory

_FIRST = 1 << 20
_NUMBERS = itertools.count(_FIRST)


def left_over() -> list[str]:
    """The names of this process's shared memory that is no SharedPixels'."""
    mine = shared_memory.name_of(os.getpid(), 0).removeprefix("/").removesuffix("0")
    names = [name for name in os.listdir(shared_memory.FOLDER) if name.startswith(mine)]
    return [name for name in names if int(name.removeprefix(mine)) < _FIRST]


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
