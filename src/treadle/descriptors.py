"""File descriptors in reserve, for work that must not fail for lack of one: the launch of the engine's process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

SPARE = 16
"""A launch takes half as many at once: a socket pair, /dev/null, a pipe that reports a failed exec, a pidfd."""


class Spare:
    """`count` descriptors of /dev/null, opened early and closed while `lent`, so that others may be opened instead."""

    def __init__(self, count: int = SPARE) -> None:
        self._count = count
        self._held: list[int] = []
        self._fill()

    def __len__(self) -> int:
        return len(self._held)

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Within the block that many descriptors are free. Afterwards as many as can be had are in reserve again."""
        self.close()
        try:
            yield
        finally:
            self._fill()

    def close(self) -> None:
        """Give them all back."""
        while self._held:
            os.close(self._held.pop())

    def _fill(self) -> None:
        with contextlib.suppress(OSError):
            while len(self._held) < self._count:
                self._held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
