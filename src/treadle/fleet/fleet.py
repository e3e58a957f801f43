"""Runs a fleet: workers first, then the gateway; watches them, starts again what has ended, and stops them in order."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Protocol

import httpx

from ..errors import StartFailed
from ..hosts import url_of
from .member import Member
from .plan import FleetPlan, Worker, gateway_of, workers_of
from .starts import Starts

LOOK_EVERY_S = 0.5
ASK_S = 2.0
MOST_FAILURES = 3
STOP_MORE_S = 10.0
GATEWAY_S = 120.0


@dataclass(frozen=True)
class WorkerView:
    """One row of the table. `state` is the worker's own word, or "down" when it has none; `gateway` is the gateway's
    word of it."""

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
    """The whole fleet at one look."""

    gateway: str
    workers: tuple[WorkerView, ...]


class Say(Protocol):
    """Who tells a person what goes on."""

    def starting(self, plan: FleetPlan) -> None: ...
    def ready(self, url: str, model: str) -> None: ...
    def view(self, view: FleetView) -> None: ...
    def trouble(self, text: str) -> None: ...
    def stopping(self) -> None: ...


class Fleet:
    """Use once: `run`. Every process that it started has ended when `run` returns or raises."""

    def __init__(self, plan: FleetPlan, say: Say) -> None:
        self._plan = plan
        self._say = say
        self._workers = workers_of(plan)
        self._gateway = gateway_of(plan, self._workers)
        self._gateway_state = "down"
        self._seen: dict[str, dict[str, Any]] = {}
        self._known: dict[str, str] = {}

    @property
    def url(self) -> str:
        host = "127.0.0.1" if self._plan.host in ("0.0.0.0", "::") else self._plan.host
        return url_of("http", host, self._plan.port)

    def hurry(self) -> None:
        """End the workers now, each with a last word to its clients, which the gateway passes on."""
        for worker in self._workers:
            worker.member.hurry()

    def kill(self) -> None:
        """End everything at once."""
        for member in self._members():
            member.kill()

    async def run(self, shutdown: asyncio.Event) -> None:
        """Run until `shutdown` is set. Raises StartFailed when a worker or the gateway can't be had."""
        self._say.starting(self._plan)
        key = {} if self._plan.worker_key is None else {"authorization": f"Bearer {self._plan.worker_key}"}
        async with self._stopped_at_the_end(), httpx.AsyncClient(timeout=ASK_S, trust_env=False, headers=key) as http:
            for worker in self._workers:
                worker.member.start()
            if not await self._ready(http, shutdown):
                return
            while not shutdown.is_set():
                self._revive()
                await self._look(http)
                await _either(shutdown, LOOK_EVERY_S)
            self._say.stopping()

    async def _ready(self, http: httpx.AsyncClient, shutdown: asyncio.Event) -> bool:
        """Wait for all workers, then for the gateway; false when told to shut down before."""
        now = asyncio.get_running_loop().time
        gateway_since = now()
        starts = Starts(self._plan)
        while self._gateway_state != "ready":
            if shutdown.is_set():
                return False
            await self._look(http)
            for member in self._members():
                if member.starts and not member.alive:
                    raise StartFailed(f"{member.name} ended while it started: {member.ending()}")
            if not self._gateway.starts:
                gateway_since = now()
                for worker in self._workers:
                    starts.check(worker, self._seen[worker.member.name], gateway_since)
                if all(self._state(worker) == "ready" for worker in self._workers):
                    self._gateway.start()
            elif now() - gateway_since > GATEWAY_S:
                raise StartFailed(f"the gateway was not ready after {GATEWAY_S:g} s: see {self._gateway.log}")
            await _either(shutdown, LOOK_EVERY_S)
        models = await _json(http, f"{self.url}/v1/models")
        self._say.ready(self.url, models["data"][0]["id"] if models.get("data") else self._plan.model)
        return True

    def _revive(self) -> None:
        now = asyncio.get_running_loop().time()
        for member in self._members():
            if not member.alive and member.failures >= MOST_FAILURES:
                raise StartFailed(f"{member.name} ends again and again: {member.ending()}")
            starts, ending = member.starts, member.ending()
            member.revive(now)
            if member.starts > starts:
                self._say.trouble(f"{member.name} had ended ({ending}) and is started again")

    async def _look(self, http: httpx.AsyncClient) -> None:
        """Ask everyone, and tell of what was seen."""
        answers = await asyncio.gather(*(_json(http, f"{worker.http}/v1/status") for worker in self._workers))
        self._seen = {w.member.name: answer for w, answer in zip(self._workers, answers, strict=True)}
        self._gateway_state = await self._gateway_word(http)
        for worker in self._workers:
            if self._state(worker) == "ready":
                worker.member.works()
        if self._gateway_state == "ready":
            self._gateway.works()
        self._say.view(FleetView(self._gateway_state, tuple(map(self._view, self._workers))))

    async def _gateway_word(self, http: httpx.AsyncClient) -> str:
        if not self._gateway.alive:
            return "down" if self._gateway.starts else "waits for the workers"
        listed = await _json(http, f"{self.url}/workers")
        self._known = {
            str(entry.get("url")): "healthy" if entry.get("is_healthy") else "unhealthy"
            for entry in listed.get("workers", ())
        }
        return "ready" if await _is_ok(http, f"{self.url}/readiness") else "starting"

    def _state(self, worker: Worker) -> str:
        if not worker.member.alive:
            return "down"
        return str(self._seen.get(worker.member.name, {}).get("state", "starting"))

    def _view(self, worker: Worker) -> WorkerView:
        member, status = worker.member, self._seen.get(worker.member.name, {})
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
            gateway=self._known.get(worker.grpc, "unknown") if self._gateway.alive else "down",
        )

    def _members(self) -> list[Member]:
        return [*(worker.member for worker in self._workers), self._gateway]

    @contextlib.asynccontextmanager
    async def _stopped_at_the_end(self) -> AsyncIterator[None]:
        """The gateway first, so that nothing new comes to workers that stop; whatever happens, nobody is left."""
        try:
            yield
            grace_s = self._plan.drain_s + STOP_MORE_S
            await self._gateway.stop(grace_s)
            await asyncio.gather(*(worker.member.stop(grace_s) for worker in self._workers))
        finally:
            self.kill()


async def _json(http: httpx.AsyncClient, url: str) -> dict[str, Any]:
    """The object at `url`; an empty one where there is none."""
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


async def _either(event: asyncio.Event, timeout_s: float) -> None:
    """Returns when `event` is set, or after `timeout_s`."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), timeout_s)
