"""Log lines of the text processes: collected there, sent to the server with a result, and logged by the server.

The text processes have no standard error of their own to log to, and one process alone should write the log. Lines from
WARNING up are collected, Python's warnings included. Lines of a job whose worker is killed are lost; `FaultLog` reports
the kill.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

from .fault_log import LOG_EVERY_S
from .messages import LogLine, LogLines

MAX_LINES = 8
"""Lines of one job; further ones are counted."""

MAX_CHARS = 1000
MAX_REMEMBERED = 256


class LineCollector(logging.Handler):
    """Root handler of a text process. `take` returns the lines since the last call."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._lines: list[LogLine] = []
        self._dropped = 0
        self._taking = threading.Lock()

    def install(self) -> None:
        """Handle all lines of this process, and Python's warnings."""
        logging.getLogger().addHandler(self)
        logging.captureWarnings(True)

    def emit(self, record: logging.LogRecord) -> None:
        with self._taking:
            if len(self._lines) >= MAX_LINES:
                self._dropped += 1
                return
            fields = getattr(record, "fields", {})
            self._lines.append(LogLine(record.name, record.levelno, _message(record), _plain_values(fields)))

    def take(self) -> LogLines | None:
        """Return the lines since the last call, and forget them; None if there are none."""
        if not self._lines:
            return None
        with self._taking:
            lines, self._lines = LogLines(tuple(self._lines), self._dropped), []
            self._dropped = 0
        return lines


class WorkerLog:
    """Log of the lines that workers send with their results. Runs on the event loop.

    Hostile clients must not fill the log: each distinct line is logged once, and lines of one job at most in
    LOG_EVERY_S seconds. The field `dropped` counts new lines that were left out before.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._logged_at = float("-inf")
        self._logged: dict[LogLine, None] = {}  # the newest MAX_REMEMBERED, in order
        self._dropped = 0

    def write(self, lines: LogLines) -> None:
        """Log the lines of a job, within the bounds."""
        new = [line for line in dict.fromkeys(lines.lines) if line not in self._logged]
        now = self._clock()
        if now - self._logged_at < LOG_EVERY_S:
            self._dropped += len(new) + lines.dropped  # and not remembered: they are logged where they come again
            return
        for line in new:
            self._logged_at = now
            self._remember(line)
            _log(line, self._dropped)
            self._dropped = 0
        self._dropped += lines.dropped

    def _remember(self, line: LogLine) -> None:
        if len(self._logged) >= MAX_REMEMBERED:
            del self._logged[next(iter(self._logged))]
        self._logged[line] = None


def log_load(lines: LogLines) -> None:
    """Log the lines of loading a model."""
    for line in lines.lines:
        _log(line)


def _log(line: LogLine, dropped: int = 0) -> None:
    logger = logging.getLogger(line.logger)
    if logger.isEnabledFor(line.level):
        fields = dict(line.fields) | ({"dropped": dropped} if dropped else {})
        logger.handle(
            logger.makeRecord(line.logger, line.level, "", 0, line.message, (), None, extra={"fields": fields})
        )


def _message(record: logging.LogRecord) -> str:
    """Return a record's message, with the exception that it reports."""
    error = record.exc_info[1] if record.exc_info else None
    cause = "" if error is None else f" ({type(error).__name__}: {error})"
    return " ".join(f"{record.getMessage()}{cause}".split())[:MAX_CHARS]


def _plain_values(fields: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    plain = (bool, int, float, type(None))
    return tuple((key, value if isinstance(value, plain) else str(value)[:MAX_CHARS]) for key, value in fields.items())
