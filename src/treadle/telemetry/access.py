"""The access log: one line per request, except in a storm of refusals.

The first refusal (401, 429, 503, or what is not HTTP) of a client with an error code has its line at once. Those that
follow within WINDOW_S are counted (their lines are at DEBUG) and told in one line when the window ends. Past
MOST_WINDOWS clients, refusals of all others are counted together, by code. So a crowd that is refused costs a bounded
number of lines, and metrics stay exact.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ACCESS = "treadle.access"
GRPC = "GRPC"  # in the place of an HTTP method
UNPARSED = "-"  # in the place of the method and the path of a request that is not HTTP
PROBES = "/health"  # a 503 is their ordinary answer while the server loads or drains
REFUSED = frozenset({401, 429, 503})
WINDOW_S = 10.0
MOST_WINDOWS = 100
LOOK_EVERY_S = 1.0
ALL_OTHERS = ""

log = logging.getLogger(ACCESS)


@dataclass(slots=True)
class RequestRecord:
    """What is known of one request when it is over. Times are seconds from its first header. A gRPC call has the HTTP
    status that its error would have. `client` is the address with the port."""

    id: str
    method: str
    path: str
    started: float
    client: str = ""
    status: int = 0
    public_id: str = ""
    rows: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    wait_s: float | None = None
    ttft_s: float | None = None
    error: str = ""
    key: str = ""  # the API key's name
    ran: bool = False  # a sequence of it ran, or may have run when the engine died

    @property
    def probe(self) -> bool:
        return self.path.startswith(PROBES)

    @property
    def host(self) -> str:
        """The client's address without its port."""
        return self.client.rpartition(":")[0]

    def fields(self, now: float) -> dict[str, Any]:
        """The access line's fields, but for the client; those that say nothing are left out."""
        line: dict[str, Any] = {"request": self.id, "method": self.method, "path": self.path, "status": self.status}
        if self.key:
            line["key"] = self.key
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


@dataclass(slots=True)
class _Window:
    """Refusals of one kind since `since` that have no line yet."""

    since: float
    count: int = 0


class AccessLines:
    """Writes the lines of one server's requests, HTTP and gRPC; lives on the event loop. `show_client` adds clients'
    addresses. `run` is a task that ends the windows; `flush` ends all of them, at shutdown."""

    def __init__(self, *, show_client: bool = False) -> None:
        self._show_client = show_client
        self._windows: dict[tuple[str, str, int], _Window] = {}

    def write(self, record: RequestRecord, now: float) -> None:
        """The line of a request that has ended: requests to the API at INFO, probes, scrapes and the repeats of a
        refusal at DEBUG."""
        failed = record.status >= 400 and not record.probe
        level = logging.INFO if record.method in ("POST", GRPC) or failed else logging.DEBUG
        turned_away = record.status in REFUSED or record.method == UNPARSED
        refused = turned_away and failed and record.wait_s is None  # not: it ran, and was cut off
        if refused and self._is_repeat(record, now):
            level = logging.DEBUG
        if log.isEnabledFor(level):
            self._log(level, "request", record.fields(now), record.client)

    def sweep(self, now: float, window_s: float = WINDOW_S) -> None:
        """Tell of the windows that are over. One that has seen repeats is followed by another."""
        for key, window in [*self._windows.items()]:
            if now - window.since < window_s:
                continue
            if window.count:
                self._tell(*key, window, now)
                window.since, window.count = now, 0
            else:
                del self._windows[key]

    def flush(self, now: float) -> None:
        """Tell of everything that has been counted."""
        self.sweep(now, 0.0)

    async def run(self) -> None:
        """End windows until cancelled."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            self.sweep(time.monotonic())

    def _is_repeat(self, record: RequestRecord, now: float) -> bool:
        """Count a refusal, unless it opens a window."""
        key = (record.host, record.error, record.status)
        if key not in self._windows and len(self._windows) >= MOST_WINDOWS:
            key = (ALL_OTHERS, record.error, record.status)
        window = self._windows.get(key)
        if window is None:
            self._windows[key] = _Window(now)
            return False
        window.count += 1
        return True

    def _tell(self, host: str, error: str, status: int, window: _Window, now: float) -> None:
        fields = {"status": status, "error": error, "refused": window.count}
        fields["in_s"] = round(now - window.since, 1)
        self._log(logging.INFO, "refused", fields, host)

    def _log(self, level: int, message: str, fields: Mapping[str, Any], client: str) -> None:
        more = {"client": client} if self._show_client and client else {}
        log.log(level, message, extra={"fields": {**fields, **more}})


def address(host: str, port: int) -> str:
    """A client's address with its port; IPv6 in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
