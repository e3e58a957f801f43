"""Structured logs: one `key=value` line per event, one access line per request, and never a prompt or an answer."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TextIO

ACCESS = "treadle.access"
GRPC = "GRPC"  # in the place of an HTTP method
PROBES = "/health"  # a 503 is their ordinary answer while the server loads or drains


@dataclass(slots=True)
class RequestRecord:
    """What is known of one request when it is over. Times are seconds from its first header. A gRPC call has the HTTP
    status that its error would have."""

    id: str
    method: str
    path: str
    started: float
    status: int = 0
    public_id: str = ""
    rows: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    wait_s: float | None = None
    ttft_s: float | None = None
    error: str = ""

    def fields(self, now: float) -> dict[str, Any]:
        """The access line's fields; those that say nothing are left out."""
        line: dict[str, Any] = {"request": self.id, "method": self.method, "path": self.path, "status": self.status}
        if self.public_id:
            line |= {"id": self.public_id, "rows": self.rows}
            line |= {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.completion_tokens}
        if self.cached_tokens:
            line["cached_tokens"] = self.cached_tokens
        if self.wait_s is not None:
            line["wait_s"] = round(self.wait_s, 4)
        if self.ttft_s is not None:
            line["ttft_s"] = round(self.ttft_s, 4)
        if self.error:
            line["error"] = self.error
        line["total_s"] = round(now - self.started, 4)
        return line


def log_access(record: RequestRecord, now: float) -> None:
    """Write the one line of a finished request: requests to the API at INFO, probes and scrapes at DEBUG."""
    refused = record.status >= 400 and not record.path.startswith(PROBES)
    level = logging.INFO if record.method in ("POST", GRPC) or refused else logging.DEBUG
    logging.getLogger(ACCESS).log(level, "request", extra={"fields": record.fields(now)})


class LogfmtFormatter(logging.Formatter):
    """`time level logger message key=value ...`, one line per record, whatever the values hold."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(record.created))
        head = f"{stamp}.{int(record.msecs):03d} {record.levelname.lower()} {record.name}"
        line = f"{head} {_one_line(record.getMessage())}{_pairs(getattr(record, 'fields', {}))}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def configure(level: str, stream: TextIO) -> None:
    """Send this server's logs at `level` and above to `stream`."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(LogfmtFormatter())
    for name, floor in (("treadle", level.upper()), ("uvicorn.error", "WARNING")):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.propagate = False
        logger.setLevel(floor)


def _pairs(fields: Mapping[str, Any]) -> str:
    return "".join(f" {key}={_value(value)}" for key, value in fields.items())


def _value(value: Any) -> str:
    text = _one_line(str(value)).replace('"', "'")
    return f'"{text}"' if not text or any(c in text for c in " =") else text


def _one_line(text: str) -> str:
    return text.encode("unicode_escape").decode("ascii") if not text.isprintable() else text
