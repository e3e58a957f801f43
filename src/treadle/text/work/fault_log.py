"""Log lines about requests that cost a worker its process."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ...errors import TreadleError

log = logging.getLogger(__name__)

LOG_EVERY_S = 1.0


class LimitedLog:
    """Warnings, at most one line in LOG_EVERY_S seconds: hostile clients must not fill the log."""

    def __init__(self, clock: Callable[[], float], logger: logging.Logger = log) -> None:
        self._clock = clock
        self._logger = logger
        self._logged_at = float("-inf")

    def write(self, text: str, *values: object) -> None:
        """Log a line, with `values` in it."""
        if self._clock() - self._logged_at >= LOG_EVERY_S:
            self._logged_at = self._clock()
            self._logger.warning(text, *values)


class FaultLog(LimitedLog):
    """Logger of faults, within the same limit."""

    def warn(self, fault: str, error: TreadleError, more: str = "") -> None:
        """Log a fault and the status that its request got. `more` ends the line."""
        self.write(
            "%s, which got %d; its process was replaced; if ordinary requests do this, use another template or model%s",
            fault,
            error.http_status,
            more,
        )
