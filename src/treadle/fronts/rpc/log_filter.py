"""Filter of grpc.aio's own log: at most a line each LOG_EVERY_S, and never the value of a client's metadata.

grpc.aio logs a line with a traceback for each value that is not UTF-8, keys among them, and for some calls whose client
leaves: clients control their number.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

LOG_EVERY_S = 1.0
LOGGER = logging.getLogger("grpc._cython.cygrpc")
BAD_METADATA = "Invalid encoding on"


class LogFilter(logging.Filter):
    """Rate limiter and redactor of LOGGER's records."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._logged_at = -LOG_EVERY_S
        self._suppressed = 0

    def filter(self, record: logging.LogRecord) -> bool:
        now = self._clock()
        if now - self._logged_at < LOG_EVERY_S:
            self._suppressed += 1
            return False
        message = record.getMessage()
        if message.startswith(BAD_METADATA):
            message, record.exc_info = "a call's metadata is not UTF-8: its values are taken as they are", None
        record.msg = (
            message if not self._suppressed else f"{message} ({self._suppressed} more lines of gRPC since the last)"
        )
        record.args = ()
        self._logged_at, self._suppressed = now, 0
        return True
