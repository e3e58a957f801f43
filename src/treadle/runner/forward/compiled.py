"""LRU cache of compiled forward passes, by input shapes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

MOST = 768
"""Compiled passes to keep, at least those of the warm-up of 1,024 sequences: each takes about half a megabyte."""


class CompiledPasses:
    """Compiled functions by the shapes they are for; the least recently used is dropped first.

    A compiled function of MLX's that is called with ever new shapes keeps a program for each, and searches all of them
    at every call. One function for each set of shapes can be dropped.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._known: OrderedDict[Hashable, Callable[..., Any]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def get(self, shapes: Hashable, make: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
        """The function for `shapes`, made by `make` where there is none."""
        program = self._known.pop(shapes, None) or make()
        self._known[shapes] = program
        if len(self._known) > self._most:
            self._known.popitem(last=False)
        return program

    def clear(self) -> None:
        self._known.clear()
