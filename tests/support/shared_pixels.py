"""Pixels in shared memory, as the front of a server has them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from treadle import shared_memory


def left_over() -> list[str]:
    """The names of this process's shared memory that is no SharedPixels' and no mark."""
    mine = f"{shared_memory.PREFIX.strip('/')}{os.getpid():x}."
    names = [name for name in os.listdir(shared_memory.FOLDER) if name.startswith(mine) and "-" in name[len(mine) :]]
    return [name for name in names if not any(name.startswith(put) for put in _PUT)]


_PUT: set[str] = set()
"""What the names of all SharedPixels begin with."""


class SharedPixels:
    """Makes shared memory for arrays, which `close` removes."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._owner = shared_memory.Owner()
        _PUT.add(self._owner.new_name().strip("/").rpartition("-")[0])

    def put(self, pixels: np.ndarray) -> str:
        """The name of memory that holds `pixels`."""
        name = self._owner.new_name()
        with shared_memory.create(name, pixels.nbytes) as view:
            view[: pixels.nbytes] = pixels.tobytes()
        self.names.append(name)
        return name

    def close(self) -> None:
        for name in self.names:
            shared_memory.unlink(name)
        self._owner.close()


@contextmanager
def shared_pixels() -> Iterator[SharedPixels]:
    made = SharedPixels()
    try:
        yield made
    finally:
        made.close()
