"""What a process of its own explores."""

from __future__ import annotations

import time

from .explorer import Found, explore
from .scenarios import SCENARIOS


def timed(task: tuple[str, int | None]) -> tuple[Found, float]:
    """Explore a scenario by its name; what was found, and the seconds of this process."""
    began = time.process_time()
    return explore(SCENARIOS[task[0]], most=task[1]), time.process_time() - began
