"""Passes that were compiled, as many as are worth their memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

MOST = 512
"""A decoder's pass takes about half a megabyte for each set of shapes that it was compiled for."""


class CompiledPasses:
    """Compiled functions by the shapes they are for; the one that was not used for longest goes first.

    A function of MLX's that is called with ever new shapes keeps what it compiled for each of them, and looks through
    all of it at every call; one function for each set of shapes can be dropped.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._known: OrderedDict[Hashable, Callable[..., Any]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def get(self, shapes: Hashable, make: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
        """The function for `shapes`, which `make` makes where it is not known."""
        program = self._known.pop(shapes, None) or make()
        self._known[shapes] = program
        if len(self._known) > self._most:
            self._known.popitem(last=False)
        return program

    def clear(self) -> None:
        self._known.clear()
