"""Workload from a file: one JSON object a line, to replay recorded requests."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec

from .errors import BenchError
from .plan import Moment, PromptMessage, Request, Workload


class TraceLine(msgspec.Struct, forbid_unknown_fields=True):
    """One request: `prompt` or `messages`, its time (`at_s`, seconds from the start, or `delay_s` after the answer to
    the line with the id `after`), and its token limit."""

    prompt: str | None = None
    messages: list[PromptMessage] | None = None
    max_tokens: int = 128
    at_s: float = 0.0
    after: str | None = None
    delay_s: float = 0.0
    leave_after_s: float | None = None
    id: str | None = None
    role: str = "all"
    session: str = ""
    stream: bool = True


def read_trace(path: Path, concurrency: int = 0) -> Workload:
    """Read the workload in the file at `path`. Raises BenchError with the line at fault."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BenchError(f"the trace {path} can't be read: {error.strerror}") from error
    lines = [(i, line) for i, line in enumerate(data.splitlines(), 1) if line.strip()]
    requests = tuple(_request(path, i, line) for i, line in lines)
    if not requests:
        raise BenchError(f"the trace {path} has no requests: give one JSON object a line")
    _check(path, requests)
    name = f"trace {path.stem} {hashlib.sha256(data).hexdigest()[:8]}"
    return Workload(name, 0, {}, requests, concurrency)


def _request(path: Path, number: int, data: bytes) -> Request:
    position = f"{path}, line {number}"
    try:
        line = msgspec.json.decode(data, type=TraceLine)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BenchError(f"{position}: {error}: mend or drop it") from error
    if (line.prompt is None) == (line.messages is None):
        raise BenchError(f"{position}: give either prompt or messages")
    if line.messages == []:
        raise BenchError(f"{position}: messages is empty: give at least one")
    if line.max_tokens < 1 or min(line.at_s, line.delay_s, line.leave_after_s or 0.0) < 0:
        raise BenchError(f"{position}: max_tokens must be at least 1, and times not negative")
    id_ = line.id or f"line {number}"
    messages = tuple(line.messages) if line.messages is not None else (PromptMessage("user", line.prompt or ""),)
    moments: dict[str, Any] = {}
    if line.after is not None:
        moments["after"] = Moment(line.after, delay_s=line.delay_s)
    if line.leave_after_s is not None:
        moments["leave"] = Moment(id_, "sent", delay_s=line.leave_after_s)
    return Request(
        id_,
        messages,
        line.max_tokens,
        at_s=line.at_s,
        role=line.role,
        session=line.session,
        stream=line.stream,
        **moments,
    )


def _check(path: Path, requests: tuple[Request, ...]) -> None:
    """Check that every id occurs once, and that a request waits only for earlier ones, so that none waits for ever.
    Raises BenchError."""
    ids: set[str] = set()
    for request in requests:
        if request.id in ids:
            raise BenchError(f"{path}: the id '{request.id}' is there twice: give each request its own")
        if request.after is not None and request.after.of not in ids:
            raise BenchError(f"{path}: '{request.id}' waits for '{request.after.of}', which no line before it has")
        ids.add(request.id)
