"""Filter of grpc.aio's own log: at most a line each TELL_EVERY_S, and never the value of a client's metadata.

It writes a line with a traceback for each value that is not UTF-8, keys among them, and for some calls whose client
leaves: as many as clients like.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

TELL_EVERY_S = 1.0
LOGGER = logging.getLogger("grpc._cython.cygrpc")
NO_TEXT = "Invalid encoding on"


class LogFilter(logging.Filter):
    """A filter of LOGGER."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._told = -TELL_EVERY_S
        self._missing = 0

    def filter(self, record: logging.LogRecord) -> bool:
        now = self._clock()
        if now - self._told < TELL_EVERY_S:
            self._missing += 1
            return False
        message = record.getMessage()
        if message.startswith(NO_TEXT):
            message, record.exc_info = "a call's metadata is not UTF-8: its values are taken as they are", None
        record.msg = message if not self._missing else f"{message} ({self._missing} more lines of gRPC since the last)"
        record.args = ()
        self._told, self._missing = now, 0
        return True
