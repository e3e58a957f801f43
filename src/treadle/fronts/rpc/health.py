"""`grpc.health.v1` for Kubernetes and gateways: SERVING while the worker takes requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from .context import Context

SERVICE = "grpc.health.v1.Health"
POLL_S = 0.25

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class HealthService(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Health service that reads the state at each call. `services` are the names it knows, besides "" for the whole
    server."""

    def __init__(self, is_ready: Callable[[], bool], services: Collection[str]) -> None:
        self._is_ready = is_ready
        self._services = frozenset({"", *services})
        self._watchers = 0
        self._changed = asyncio.Event()
        self._poller: asyncio.Task[None] | None = None

    async def Check(self, request: Any, context: Context) -> Any:
        if request.service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service is called '{request.service[:80]}'", ())
        return health_pb2.HealthCheckResponse(status=self._status(request.service))

    async def Watch(self, request: Any, context: Context) -> AsyncIterator[Any]:
        """Stream the status now, and each time it changes."""
        self._watchers += 1
        try:
            last = None
            while True:
                changed = self._next_change()
                status = self._status(request.service)
                if status != last:
                    last = status
                    yield health_pb2.HealthCheckResponse(status=status)
                await changed.wait()
        finally:
            self._watchers -= 1
            if not self._watchers and self._poller is not None:
                self._poller.cancel()
                self._poller = None

    async def List(self, request: Any, context: Context) -> Any:
        statuses = {name: health_pb2.HealthCheckResponse(status=self._status(name)) for name in self._services}
        return health_pb2.HealthListResponse(statuses=statuses)

    def _status(self, service: str) -> Any:
        if service not in self._services:
            return SERVICE_UNKNOWN
        return SERVING if self._is_ready() else NOT_SERVING

    def _next_change(self) -> asyncio.Event:
        """Return an event that is set when readiness changes after this call. One task polls, for all watchers."""
        if self._poller is None or self._poller.done():
            self._poller = asyncio.create_task(self._poll(self._is_ready()), name="treadle-health")
        return self._changed

    async def _poll(self, before: bool) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            now = self._is_ready()
            if now != before:
                before = now
                self._changed.set()
                self._changed = asyncio.Event()
