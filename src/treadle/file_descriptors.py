"""Reserve of file descriptors, for work that must not fail for lack of one: the launch of the engine's process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

SPARE = 16
"""A launch takes half as many at once: a socket pair, /dev/null, a pipe that reports a failed exec, a pidfd."""


class DescriptorReserve:
    """Reserve of `count` descriptors of /dev/null, opened early and closed while `released`, so that other files can be
    opened in their place."""

    def __init__(self, count: int = SPARE) -> None:
        self._count = count
        self._held: list[int] = []
        self._fill()

    def __len__(self) -> int:
        return len(self._held)

    @contextlib.contextmanager
    def released(self) -> Iterator[None]:
        """Context manager: `count` descriptors are free within the block, and the reserve is filled again after it, as
        far as the system allows."""
        self.close()
        try:
            yield
        finally:
            self._fill()

    def close(self) -> None:
        """Close all descriptors of the reserve."""
        while self._held:
            os.close(self._held.pop())

    def _fill(self) -> None:
        with contextlib.suppress(OSError):
            while len(self._held) < self._count:
                self._held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
