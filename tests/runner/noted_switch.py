"""A stand-in for the switch of MLX's CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager


class NotedSwitch:
    """A switch that counts how often single launches were asked for, and says whether graphs are `off`."""

    def __init__(self) -> None:
        self.single = 0
        self.off = False

    def single_launches(self) -> AbstractContextManager[None]:
        @contextmanager
        def counted() -> Iterator[None]:
            self.single += 1
            self.off = True
            try:
                yield
            finally:
                self.off = False

        return counted()
