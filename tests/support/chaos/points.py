"""Records of a run: problems, and quiet points."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from .server import Usage


@dataclass(frozen=True)
class Problem:
    segment: int
    what: str
    request: int | None = None

    @property
    def kind(self) -> str:
        """Words of the problem without their numbers, the same for problems of one kind."""
        return re.sub(r"[0-9a-f]{8,}|\d+(\.\d+)?", "N", self.what)[:160]


@dataclass(frozen=True)
class Quiet:
    """A quiet point: resources of both processes, and the work done by then."""

    at: float
    epoch: int  # of the server's process
    server: Usage
    engine: Usage | None
    engine_pid: int | None
    requests: int
    tokens: int
    latencies: Sequence[float]  # of whole answers since the last one, in seconds
