"""Timeouts of an owner."""

from __future__ import annotations

from dataclasses import dataclass

RELOAD_S = 60.0
RELOAD_TIMES = 5.0


@dataclass(frozen=True)
class Timeouts:
    """Timeouts in seconds."""

    hang_after_s: float = 30.0
    start_timeout_s: float = 1800.0

    def load_timeout_s(self, measured_s: float | None) -> float:
        """Return the time limit of each stage of a load. `measured_s`: duration of the last load, None if there was
        none."""
        if measured_s is None:
            return self.start_timeout_s
        return min(self.start_timeout_s, max(RELOAD_S, RELOAD_TIMES * measured_s))
