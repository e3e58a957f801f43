"""Structured log: one line per event, as text (`key=value`) or JSON. Prompts and answers are never logged.

`configure` installs one handler on the root logger, so that lines of uvicorn, grpc and other libraries (from WARNING
up) and Python's warnings have the same format. The server's and the engine's process each call it, with a standard
error that queues (`streams`), so that logging never waits for a reader.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any, TextIO

from ..output_streams import QueuedText, Statistics, own

UTC_SUFFIX = "+00:00"


def stamp(created: float) -> str:
    """Format seconds since the epoch as local time in ISO 8601, with milliseconds and the offset from UTC (Z for
    none)."""
    text = datetime.fromtimestamp(created, UTC).astimezone().isoformat(timespec="milliseconds")
    return f"{text.removesuffix(UTC_SUFFIX)}Z" if text.endswith(UTC_SUFFIX) else text


class LogfmtFormatter(logging.Formatter):
    """Formatter of `time level logger message key=value ...`, one line a record, followed by any traceback."""

    def format(self, record: logging.LogRecord) -> str:
        head = f"{stamp(record.created)} {record.levelname.lower()} {record.name}"
        line = f"{head} {_one_line(record.getMessage())}{_pairs(getattr(record, 'fields', {}))}"
        trace = _format_trace(self, record)
        return f"{line}\n{trace}" if trace else line


class JsonFormatter(logging.Formatter):
    """Formatter of one JSON object a line: `time`, `level`, `logger`, `message`, the event's fields, and any traceback
    as `exception`."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": stamp(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        for key, value in getattr(record, "fields", {}).items():
            line.setdefault(key, _to_json_value(value))
        if trace := _format_trace(self, record):
            line["exception"] = trace
        return json.dumps(line)


FORMATTERS: dict[str, type[logging.Formatter]] = {"text": LogfmtFormatter, "json": JsonFormatter}


class LogHandler(logging.StreamHandler[TextIO]):
    """Root handler installed by `configure`, which replaces an earlier one."""


def configure(level: str, stream: TextIO, form: str = "text") -> None:
    """Log to `stream`: Treadle's own lines from `level` up, other libraries' from WARNING up. `form` is a key of
    FORMATTERS."""
    handler = LogHandler(stream)
    handler.setFormatter(FORMATTERS[form]())
    if isinstance(stream, QueuedText):
        stream.writer.notice = partial(_notice, form)
    root = logging.getLogger()
    for old in [old for old in root.handlers if isinstance(old, LogHandler)]:
        root.removeHandler(old)
    root.addHandler(handler)
    threshold = logging.getLevelNamesMapping()[level.upper()]
    logging.getLogger("treadle").setLevel(threshold)
    for name in ("", "uvicorn.error"):
        logging.getLogger(name).setLevel(max(threshold, logging.WARNING))
    logging.captureWarnings(True)


def adopt_library_loggers() -> None:
    """Remove the handlers that libraries such as huggingface_hub and transformers install at import, so that they log
    through the root handler."""
    for logger in [*logging.root.manager.loggerDict.values()]:
        if isinstance(logger, logging.Logger):
            for handler in [own for own in logger.handlers if type(own) is logging.StreamHandler]:
                logger.removeHandler(handler)
                logger.propagate = True


def log_statistics() -> Statistics:
    """Return the counts of written and dropped lines of this process."""
    writer = own()
    return Statistics() if writer is None else writer.statistics()


def reformat_engine_lines(data: bytes, form: str) -> bytes:
    """Adapt complete lines of the engine's process to this log's format. In JSON, plain output of MLX and other
    libraries becomes lines of the logger `treadle.engine.output`."""
    if form != "json" or all(line.startswith(b"{") for line in data.splitlines()):
        return data
    return b"".join(line if line.startswith(b"{") else _format_foreign(line) for line in data.splitlines(keepends=True))


def _format_foreign(line: bytes) -> bytes:
    text = line.decode("utf-8", "backslashreplace").rstrip()
    return _format_warning("json", "treadle.engine.output", text, {}) if text else b""


def _notice(form: str, missing: int) -> bytes:
    message = "lines of the log were dropped: standard error was not read, and nothing else waited for it"
    return _format_warning(form, __name__, message, {"dropped": missing})


def _format_warning(form: str, name: str, message: str, fields: Mapping[str, Any]) -> bytes:
    """Format a line at WARNING without the logging module's locks."""
    record = logging.LogRecord(name, logging.WARNING, "", 0, message, None, None)
    record.__dict__["fields"] = fields
    return f"{FORMATTERS[form]().format(record)}\n".encode("utf-8", "backslashreplace")


def _format_trace(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    """Return the record's traceback and stack, or ""."""
    parts = [formatter.formatException(record.exc_info)] if record.exc_info else []
    return "\n".join([*parts, record.stack_info] if record.stack_info else parts)


def _to_json_value(value: Any) -> Any:
    """Convert `value` for JSON; values that JSON can't represent become text."""
    if isinstance(value, (list, tuple)):
        return [_to_json_value(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def _pairs(fields: Mapping[str, Any]) -> str:
    return "".join(f" {key}={_value(value)}" for key, value in fields.items())


def _value(value: Any) -> str:
    text = _one_line(str(value)).replace('"', "'")
    return f'"{text}"' if not text or any(c in text for c in " =") else text


def _one_line(text: str) -> str:
    return text.encode("unicode_escape").decode("ascii") if not text.isprintable() else text
