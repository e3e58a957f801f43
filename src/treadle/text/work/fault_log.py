"""Log lines about requests that cost a text worker its process."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ...errors import TreadleError

log = logging.getLogger(__name__)

LOG_EVERY_S = 1.0


class FaultLog:
    """Logger of faults, at most one line in LOG_EVERY_S seconds: hostile clients must not fill the log."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._logged_at = float("-inf")

    def warn(self, fault: str, error: TreadleError, more: str = "") -> None:
        """Log a fault and the status that its request got. `more` ends the line."""
        if self._clock() - self._logged_at >= LOG_EVERY_S:
            self._logged_at = self._clock()
            log.warning(
                "%s, which got %d; its process was replaced; if ordinary requests do this, use another template or "
                "model%s",
                fault,
                error.http_status,
                more,
            )
