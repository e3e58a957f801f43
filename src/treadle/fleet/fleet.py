"""Fleet supervisor: starts the workers, then the gateway, restarts members that end, and stops them in order."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Protocol

import httpx

from ..errors import StartFailed
from ..host_names import url_of
from .member import Member
from .plan import FleetPlan, Worker, gateway_of, workers_of
from .startup_checks import StartupChecks

POLL_S = 0.5
REQUEST_TIMEOUT_S = 2.0
MAX_FAILURES = 3
STOP_SLACK_S = 10.0
GATEWAY_START_S = 120.0


@dataclass(frozen=True)
class WorkerView:
    """A worker's status. `state`: as the worker reports it, or "down". `gateway`: as the gateway reports the worker."""

    name: str
    place: str
    pid: int | None
    state: str
    running: int
    waiting: int
    tokens: int
    restarts: int
    gateway: str


@dataclass(frozen=True)
class FleetView:
    """Status of the fleet."""

    gateway: str
    workers: tuple[WorkerView, ...]


class FleetObserver(Protocol):
    """Receiver of the fleet's events, such as a terminal."""

    def starting(self, plan: FleetPlan) -> None: ...
    def ready(self, url: str, model: str, *, embeds: bool, chats: bool) -> None: ...
    def view(self, view: FleetView) -> None: ...
    def warning(self, text: str) -> None: ...
    def stopping(self) -> None: ...


class Fleet:
    """A fleet for a single `run`. All its processes have ended when `run` returns or raises."""

    def __init__(self, plan: FleetPlan, observer: FleetObserver) -> None:
        self._plan = plan
        self._observer = observer
        self._workers = workers_of(plan)
        self._gateway = gateway_of(plan, self._workers)
        self._gateway_state = "down"
        self._statuses: dict[str, dict[str, Any]] = {}
        self._gateway_view: dict[str, str] = {}

    @property
    def url(self) -> str:
        host = "127.0.0.1" if self._plan.host in ("0.0.0.0", "::") else self._plan.host
        return url_of("http", host, self._plan.port)

    def end_now(self) -> None:
        """End the workers without waiting for running requests, whose clients get an error through the gateway."""
        for worker in self._workers:
            worker.member.end_now()

    def kill(self) -> None:
        """Kill all members."""
        for member in self._members():
            member.kill()

    async def run(self, shutdown: asyncio.Event) -> None:
        """Run until `shutdown` is set. Raises StartFailed when a worker or the gateway does not start or keeps
        ending."""
        self._observer.starting(self._plan)
        key = {} if self._plan.worker_key is None else {"authorization": f"Bearer {self._plan.worker_key}"}
        async with (
            self._stop_on_exit(),
            httpx.AsyncClient(timeout=REQUEST_TIMEOUT_S, trust_env=False, headers=key) as http,
        ):
            for worker in self._workers:
                worker.member.start()
            if not await self._ready(http, shutdown):
                return
            while not shutdown.is_set():
                self._restart_ended()
                await self._poll(http)
                await _wait(shutdown, POLL_S)
            self._observer.stopping()

    async def _ready(self, http: httpx.AsyncClient, shutdown: asyncio.Event) -> bool:
        """Wait for all workers, then for the gateway. False if `shutdown` is set first."""
        now = asyncio.get_running_loop().time
        gateway_since = now()
        startup = StartupChecks(self._plan)
        while self._gateway_state != "ready":
            if shutdown.is_set():
                return False
            await self._poll(http)
            for member in self._members():
                if member.starts and not member.alive:
                    raise StartFailed(f"{member.name} ended while it started: {member.exit_description()}")
            if not self._gateway.starts:
                gateway_since = now()
                for worker in self._workers:
                    startup.check(worker, self._statuses[worker.member.name], gateway_since)
                if all(self._state(worker) == "ready" for worker in self._workers):
                    self._gateway.start()
            elif now() - gateway_since > GATEWAY_START_S:
                raise StartFailed(f"the gateway was not ready after {GATEWAY_START_S:g} s: see {self._gateway.log}")
            await _wait(shutdown, POLL_S)
        models = await _json(http, f"{self.url}/v1/models")
        model = models["data"][0]["id"] if models.get("data") else self._plan.model
        worker = self._workers[0]
        status = self._statuses[worker.member.name]
        embeds = bool(((status.get("capabilities") or {}).get("embedding") or {}).get("only"))
        chats = await takes_chats(http, worker.http, status.get("model", model))
        self._observer.ready(self.url, model, embeds=embeds, chats=chats)
        return True

    def _restart_ended(self) -> None:
        now = asyncio.get_running_loop().time()
        for member in self._members():
            if not member.alive and member.failures >= MAX_FAILURES:
                raise StartFailed(f"{member.name} ends again and again: {member.exit_description()}")
            starts, ending = member.starts, member.exit_description()
            member.restart_if_due(now)
            if member.starts > starts:
                self._observer.warning(f"{member.name} had ended ({ending}) and is started again")

    async def _poll(self, http: httpx.AsyncClient) -> None:
        """Query the status of all members and report it."""
        answers = await asyncio.gather(*(_json(http, f"{worker.http}/v1/status") for worker in self._workers))
        self._statuses = {w.member.name: answer for w, answer in zip(self._workers, answers, strict=True)}
        self._gateway_state = await self._poll_gateway(http)
        for worker in self._workers:
            if self._state(worker) == "ready":
                worker.member.mark_healthy()
        if self._gateway_state == "ready":
            self._gateway.mark_healthy()
        self._observer.view(FleetView(self._gateway_state, tuple(map(self._view, self._workers))))

    async def _poll_gateway(self, http: httpx.AsyncClient) -> str:
        if not self._gateway.alive:
            return "down" if self._gateway.starts else "waits for the workers"
        listed = await _json(http, f"{self.url}/workers")
        self._gateway_view = {
            str(entry.get("url")): "healthy" if entry.get("is_healthy") else "unhealthy"
            for entry in listed.get("workers", ())
        }
        return "ready" if await _is_ok(http, f"{self.url}/readiness") else "starting"

    def _state(self, worker: Worker) -> str:
        if not worker.member.alive:
            return "down"
        return str(self._statuses.get(worker.member.name, {}).get("state", "starting"))

    def _view(self, worker: Worker) -> WorkerView:
        member, status = worker.member, self._statuses.get(worker.member.name, {})
        admission = status.get("admission", {})
        statistics = (status.get("engine") or {}).get("statistics") or {}
        return WorkerView(
            name=member.name,
            place=worker.place,
            pid=member.pid,
            state=self._state(worker),
            running=admission.get("running", 0),
            waiting=admission.get("waiting", 0),
            tokens=statistics.get("completion_tokens", 0),
            restarts=member.restarts + (status.get("engine") or {}).get("restarts", 0),
            gateway=self._gateway_view.get(worker.grpc, "unknown") if self._gateway.alive else "down",
        )

    def _members(self) -> list[Member]:
        return [*(worker.member for worker in self._workers), self._gateway]

    @contextlib.asynccontextmanager
    async def _stop_on_exit(self) -> AsyncIterator[None]:
        """Stop the gateway first, so that stopping workers get no new requests; kill all members at the end."""
        try:
            yield
            grace_s = self._plan.drain_s + STOP_SLACK_S
            await self._gateway.stop(grace_s)
            await asyncio.gather(*(worker.member.stop(grace_s) for worker in self._workers))
        finally:
            self.kill()


async def takes_chats(http: httpx.AsyncClient, url: str, model: str) -> bool:
    """Whether the worker at `url` takes chats; True if it does not say."""
    body = {"model": model, "messages": [{"role": "user", "content": "Hello!"}]}
    with contextlib.suppress(httpx.HTTPError):
        return (await http.post(f"{url}/tokenize", json=body)).status_code != 400
    return True


async def _json(http: httpx.AsyncClient, url: str) -> dict[str, Any]:
    """Fetch the JSON object at `url`; {} when there is none."""
    try:
        value = (await http.get(url)).json()
    except (httpx.HTTPError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


async def _is_ok(http: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await http.get(url)).status_code == 200
    except httpx.HTTPError:
        return False


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    """Wait until `event` is set, for at most `timeout_s` seconds."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), timeout_s)
