"""Access log: one line per request, with repeated refusals summarized.

The first refusal (401, 429, 503, or a request that is not HTTP) of a client with a given error code is logged at once.
Further ones within WINDOW_S seconds are counted (their lines are at DEBUG) and logged in one line when the window ends.
Beyond MAX_WINDOWS windows, refusals of further clients are counted together by code. So a flood of refusals costs a
bounded number of lines; metrics count them exactly.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ACCESS = "treadle.access"
GRPC = "GRPC"  # logged as the method of gRPC calls
UNPARSED = "-"  # logged as method and path of a request that is not HTTP
QUEUED, ENDED = "queued", "ended"
PROBES = "/health"  # 503 is a regular answer while the server loads or drains
REFUSED = frozenset({401, 429, 503})
WINDOW_S = 10.0
MAX_WINDOWS = 100
SWEEP_EVERY_S = 1.0
REMAINING_CLIENTS = ""

log = logging.getLogger(ACCESS)


@dataclass(slots=True)
class RequestRecord:
    """Record of one request for its access line. `wait_s` and `ttft_s` are seconds from the first header. A gRPC call
    has the HTTP status of its error. `client`: address with port. `background`: QUEUED for a request whose response is
    generated without it, ENDED for that response."""

    id: str
    method: str
    path: str
    started: float
    client: str = ""
    status: int = 0
    client_request: str = ""  # the id in x-client-request-id
    public_id: str = ""
    rows: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    skipped_tokens: int = 0
    wait_s: float | None = None
    ttft_s: float | None = None
    error: str = ""
    key: str = ""  # the API key's name
    background: str = ""
    ran: bool = False  # one of its sequences ran, or may have run when the engine died

    @property
    def probe(self) -> bool:
        return self.path.startswith(PROBES)

    @property
    def host(self) -> str:
        """The client's address without its port."""
        return self.client.rpartition(":")[0]

    def fields(self, now: float) -> dict[str, Any]:
        """Return the access line's fields except the client, without empty ones."""
        line: dict[str, Any] = {"request": self.id, "method": self.method, "path": self.path, "status": self.status}
        if self.client_request:
            line["client_request"] = self.client_request
        if self.key:
            line["key"] = self.key
        if self.background:
            line["background"] = self.background
        if self.public_id:
            line["id"] = self.public_id
        if self.public_id and self.background != QUEUED:
            line["rows"] = self.rows
            line |= {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.completion_tokens}
        if self.cached_tokens:
            line["cached_tokens"] = self.cached_tokens
        if self.skipped_tokens:
            line["skipped_tokens"] = self.skipped_tokens
        if self.wait_s is not None:
            line["wait_s"] = round(self.wait_s, 4)
        if self.ttft_s is not None:
            line["ttft_s"] = round(self.ttft_s, 4)
        if self.error:
            line["error"] = self.error
        line["total_s"] = round(now - self.started, 4)
        return line


@dataclass(slots=True)
class _Window:
    """Count of refusals of one client, code and status since `since` without a line yet."""

    since: float
    count: int = 0


class AccessLogWriter:
    """Writer of one server's access log, HTTP and gRPC. Runs on the event loop. `show_client` adds clients' addresses.
    `run` is a task that closes expired windows; `flush` closes all of them at shutdown."""

    def __init__(self, *, show_client: bool = False) -> None:
        self._show_client = show_client
        self._windows: dict[tuple[str, str, int], _Window] = {}

    def write(self, record: RequestRecord, now: float) -> None:
        """Log a finished request: API requests at INFO; probes, scrapes and repeated refusals at DEBUG."""
        failed = record.status >= 400 and not record.probe
        level = logging.INFO if record.method in ("POST", GRPC) or failed else logging.DEBUG
        turned_away = record.status in REFUSED or record.method == UNPARSED
        refused = turned_away and failed and record.wait_s is None  # admitted requests were not refused
        if refused and self._is_repeat(record, now):
            level = logging.DEBUG
        if log.isEnabledFor(level):
            self._log(level, "request", record.fields(now), record.client)

    def sweep(self, now: float, window_s: float = WINDOW_S) -> None:
        """Log and close windows older than `window_s` seconds. A window with repeats is followed by another one."""
        for key, window in [*self._windows.items()]:
            if now - window.since < window_s:
                continue
            if window.count:
                self._log_window(*key, window, now)
                window.since, window.count = now, 0
            else:
                del self._windows[key]

    def flush(self, now: float) -> None:
        """Log and close all windows."""
        self.sweep(now, 0.0)

    async def run(self) -> None:
        """Close expired windows every SWEEP_EVERY_S seconds, until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_EVERY_S)
            self.sweep(time.monotonic())

    def _is_repeat(self, record: RequestRecord, now: float) -> bool:
        """Count a refusal in its window and return True; False if it opens the window."""
        key = (record.host, record.error, record.status)
        if key not in self._windows and len(self._windows) >= MAX_WINDOWS:
            key = (REMAINING_CLIENTS, record.error, record.status)
        window = self._windows.get(key)
        if window is None:
            self._windows[key] = _Window(now)
            return False
        window.count += 1
        return True

    def _log_window(self, host: str, error: str, status: int, window: _Window, now: float) -> None:
        fields = {"status": status, "error": error, "refused": window.count}
        fields["in_s"] = round(now - window.since, 1)
        self._log(logging.INFO, "refused", fields, host)

    def _log(self, level: int, message: str, fields: Mapping[str, Any], client: str) -> None:
        more = {"client": client} if self._show_client and client else {}
        log.log(level, message, extra={"fields": {**fields, **more}})


def address(host: str, port: int) -> str:
    """Format a client's address with its port, IPv6 in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
