"""The composition root: the one place where settings become a runner, an engine and fronts.

What is heavy is imported inside the functions that need it: the parent never needs MLX, the child never needs HTTP,
and the server listens before it knows a tokenizer.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from . import streams
from .config import Settings
from .core.messages import Capabilities
from .core.refusals import Refusal
from .descriptors import DescriptorReserve
from .engine.admission import AdmissionLimits
from .engine.client import EngineClient
from .engine.handle import OwnerHandle
from .engine.observer import Observer
from .engine.owner import OwnerLimits
from .engine.process import ProcessOwner
from .engine.supervisor import EngineState
from .engine.thread import ThreadOwner
from .engine.timeouts import Timeouts
from .errors import ConfigError, EngineUnavailable, StartFailed, spelled
from .exposure import Reach, check, reach_of

if TYPE_CHECKING:
    from .fronts.authentication import Authenticator
    from .fronts.connections import ConnectionLimits, Connections
    from .fronts.rpc.server import RpcServer
    from .models.folder import ModelFolder
    from .models.in_use import UsageLock
    from .models.transfer import Transfer
    from .runner.base import Progress, Runner, RunnerFactory
    from .telemetry import Telemetry
    from .telemetry.metrics import Metrics
    from .telemetry.watchdog import Watchdog
    from .text.pool import TextPool
    from .text.tokenizer import TextModel
    from .text.view import TextView

T = TypeVar("T")

OWNER_ENTRY = "treadle.compose:owner_of"
FOLDER_CHECK = "treadle.models.folder_checks:check"
TEXT_JOBS = "treadle.fronts.text_jobs:JOBS"
LOADING_BYTES = 4 << 30
WORKER_BYTES = 1 << 30
STOP_GRACE_S = 5.0
CLOSE_GRACE_S = 1.0  # for clients to take their last bytes
HURRIED_GRACE_S = 0.5
LOADING_GRACE_S = 0.5  # a child that loads has nothing to unwind
LISTEN_BACKLOG = 2048


# The owner's side ---------------------------------------------------------------------------------------------------


class OwnerSpec(msgspec.Struct, frozen=True):
    """What an owner needs to build its runner: plain values only, so that it can cross to a child."""

    folder: str
    name: str
    max_running: int
    prefill_tokens: int
    context: int | None
    memory: int | None
    prefix_cache: bool
    kv_bits: int | None
    threads: int | None
    log_level: str
    log_format: str
    spelling: dict[str, str]


def owner_spec(settings: Settings, folder: ModelFolder) -> OwnerSpec:
    return OwnerSpec(
        folder=str(folder.path),
        name=folder.name,
        max_running=settings.max_running,
        prefill_tokens=settings.prefill_tokens,
        context=settings.context,
        memory=settings.memory,
        prefix_cache=settings.prefix_cache,
        kv_bits=settings.kv_bits,
        threads=settings.threads,
        log_level=settings.log_level,
        log_format=settings.log_format,
        spelling=dict(settings.spelling),
    )


def owner_of(arguments: Mapping[str, Any]) -> tuple[RunnerFactory, OwnerLimits]:
    """The child's half: a runner factory and the owner's limits."""
    from .telemetry.logs import adopt, configure

    spec = msgspec.convert(arguments, OwnerSpec)
    configure(spec.log_level, sys.stderr, spec.log_format)
    factory = runner_factory(spec)

    def build(progress: Progress) -> Runner:
        runner = factory(progress)
        adopt()  # by now everything has been imported
        return runner

    return build, limits_of(spec)


def limits_of(spec: OwnerSpec) -> OwnerLimits:
    return OwnerLimits(max_running=spec.max_running, prefill_tokens=spec.prefill_tokens)


def runner_factory(spec: OwnerSpec) -> RunnerFactory:
    """Builds the text runner on the thread that calls it. BLAS is chosen before anything of MLX is imported."""

    def build(progress: Progress) -> Runner:
        from .runner.device import blas

        report = blas.prepare(spec.threads)
        from .runner.device.require_mlx import require_mlx

        require_mlx()
        from .runner.build import build as build_runner

        with spelled(spec.spelling):
            return build_runner(
                spec.folder,
                name=spec.name,
                context=spec.context,
                memory=spec.memory,
                prefix_cache=spec.prefix_cache,
                kv_bits=spec.kv_bits,
                blas=report,
                max_running=spec.max_running,
                prefill_tokens=spec.prefill_tokens,
                progress=progress,
            )

    return build


# The engine, from the fronts' side ---------------------------------------------------------------------------------


def engine_for(
    settings: Settings,
    folder: Callable[[], ModelFolder],
    observers: Sequence[Observer] = (),
    spare: DescriptorReserve | None = None,
) -> EngineClient:
    """An engine client whose owner is a child process, or a thread with `in_process`. Nothing is started;
    `folder` is asked at each start of the owner, and `spare` lends the descriptors for it."""

    def launch() -> OwnerHandle:
        spec = owner_spec(settings, folder())
        if settings.in_process:
            return ThreadOwner(runner_factory(spec), limits_of(spec))
        return ProcessOwner(OWNER_ENTRY, msgspec.to_builtins(spec), spare, relay=_relay(settings.log_format))

    return EngineClient(
        launch,
        AdmissionLimits(
            settings.max_running,
            settings.waiting_places,
            settings.max_wait_s,
            by_forecast=settings.max_waiting is None,
        ),
        Timeouts(settings.hang_after_s, settings.start_timeout_s),
        observers=observers,
    )


def _relay(form: str) -> Callable[[bytes], None] | None:
    """Where the engine's process writes: to this process's queued standard error, if it has one."""
    from .telemetry.logs import relayed

    writer = streams.own()
    return None if writer is None else lambda data: writer.put(relayed(data, form))


def require_installed(model: str, *, gateway: bool = False) -> None:
    """Check that everything is installed that serving `model` needs, before anything is fetched or converted.

    Raises StartFailed with one command that installs all that is missing. `gateway`: the SMG gateway is needed too.
    """
    from . import installation
    from .models.resolve import missing_packages

    found = [installation.blocking_problem(), missing_packages(model)]
    if gateway:
        from .fleet.plan import missing_gateway

        found.append(missing_gateway())
    if problems := [problem for problem in found if problem is not None]:
        raise StartFailed(installation.combine(problems))


def check_cheaply(settings: Settings) -> None:
    """Find mistakes in settings that no loading is needed to see. Raises ModelError or ConfigError."""
    from .models.resolve import check_named
    from .text.folder import read_override

    check_named(settings)
    if settings.chat_template is not None:
        read_override(settings.chat_template)


class LocalTexts:
    """The text side of one model in this process, for programs that chose the model themselves: refuses until it is
    loaded. What a hostile folder or prompt takes of time and memory, it takes of this process."""

    def __init__(self) -> None:
        from .text.pool import TextPool

        self.pool: TextPool = TextPool()
        self._model: TextModel | None = None

    def model(self) -> TextModel:
        """The text model. Raises EngineUnavailable while it loads."""
        if self._model is None:
            raise EngineUnavailable("the model's tokenizer is still loading", retry_after_s=2.0)
        return self._model

    async def load(self, folder: ModelFolder, settings: Settings) -> TextModel:
        """Read tokenizer, template and generation settings from `folder`, off the event loop. Raises ModelError."""
        from .text.tokenizer import TextModel

        template, context = settings.chat_template, settings.context
        self._model = await aside(lambda: TextModel.load(folder.path, chat_template=template, context=context))
        return self._model

    def close(self) -> None:
        self.pool.close()


class Texts:
    """The text side of a server: processes that may be killed, each with limits of time and memory."""

    def __init__(self, settings: Settings, on_refused: Callable[[], None], metrics: Metrics) -> None:
        from .text.work.worker_pool import WorkerPool

        self.pool = WorkerPool(
            workers=text_workers(),
            max_wait_s=settings.max_wait_s,
            on_refused=on_refused,
            on_killed=metrics.text_killed,
            on_restart=metrics.text_restarted,
        )

    def model(self) -> TextView:
        """What is known of the model's text. Raises EngineUnavailable while it loads."""
        return self.pool.view()

    @property
    def trouble(self) -> str:
        return self.pool.unavailable_reason

    def statistics(self) -> dict[str, Any]:
        return self.pool.statistics()

    async def load(self, folder: Path, settings: Settings, checked: Callable[[], None]) -> TextView:
        """Check `folder`, say so, and read its tokenizer and template. Raises ModelError or ConfigError in bounded
        time."""
        from .text.work.messages import Load

        template = None if settings.chat_template is None else str(settings.chat_template)
        order = Load(
            folder=str(folder),
            chat_template=template,
            context=settings.context,
            check=FOLDER_CHECK,
            jobs=TEXT_JOBS,
            memory_bytes=LOADING_BYTES,
            worker_bytes=WORKER_BYTES,
        )
        return await self.pool.load(order, checked)


def text_workers() -> int:
    """How many processes render and tokenize: a prompt takes milliseconds, and each costs 2 to 5 MB."""
    return min(4, max(2, (os.cpu_count() or 1) // 4))


# The server ---------------------------------------------------------------------------------------------------------


class Say(Protocol):
    """Who tells a person what goes on. `stage` and `transfer` may be called from other threads; `transfer` comes four
    times a second while a model is downloaded."""

    def listening(self, reach: Reach) -> None: ...
    def stage(self, stage: str) -> None: ...
    def transfer(self, transfer: Transfer) -> None: ...
    def ready(
        self, reach: Reach, name: str, can: Capabilities, sampling: Mapping[str, float], load_s: float
    ) -> None: ...
    def draining(self, running: int, drain_s: float) -> None: ...
    def stopped(self) -> None: ...


class Server:
    """One model over HTTP, and over gRPC where the settings name a port, from listening to the last byte. `limits` are
    those of connections, without a default. `settled` is called when everything is loaded. `watchdog` watches the event
    loop from listening to the end."""

    def __init__(
        self,
        settings: Settings,
        say: Say,
        *,
        limits: ConnectionLimits | None = None,
        settled: Callable[[], None] = lambda: None,
        watchdog: Watchdog | None = None,
    ) -> None:
        self.settings = settings
        self._limits = limits
        self._settled = settled
        self._watchdog = watchdog
        self._say = say
        self._folder: ModelFolder | None = None
        self._engine: EngineClient | None = None
        self._use: UsageLock | None = None
        self._hurried = asyncio.Event()

    async def run(self, shutdown: asyncio.Event) -> int:
        """Serve until `shutdown` is set, drain, and return 0. Raises TreadleError when it can't start or go on."""
        with spelled(self.settings.spelling):
            return await self._run(shutdown)

    async def _run(self, shutdown: asyncio.Event) -> int:
        from .fronts.authentication import Authenticator
        from .fronts.text import ServerHealth
        from .fronts.web.access import MalformedLog
        from .fronts.web.app import create_app, model_names
        from .fronts.web.serving import WebServer
        from .telemetry import Telemetry

        settings = self.settings
        check(settings)
        check_cheaply(settings)
        door = Authenticator.of(settings)
        sock = listen(settings.host, settings.port)
        telemetry = Telemetry(log_client=settings.log_client, watchdog=self._watchdog)
        spare = DescriptorReserve()
        engine = self._engine = engine_for(settings, self._model_folder, [telemetry.metrics], spare)
        texts = Texts(settings, lambda: engine.gate.refuse(Refusal.TEXT_BUSY), telemetry.metrics)
        telemetry.metrics.watch(ServerHealth(engine, texts))
        door.tell(engine.gate.refuse)
        telemetry.metrics.watch_keys(door)
        connections = self._connections(engine, telemetry)
        app = create_app(engine, texts, settings, telemetry, door, connections)
        malformed = MalformedLog(telemetry.metrics, telemetry.access)
        web = WebServer(app, stall_s=settings.stall_s, connections=connections["http"], malformed=malformed)
        serving = asyncio.create_task(web.serve([sock]), name="treadle-web")
        watching = asyncio.create_task(telemetry.run(), name="treadle-telemetry")
        reading = asyncio.create_task(door.keys.watch(aside), name="treadle-keys")
        rpc: RpcServer | None = None
        try:
            if settings.grpc_port is not None:
                rpc = self._rpc(engine, texts, telemetry, door, connections["grpc"])
                await rpc.start()
            reach = await reach_of(settings, sock.getsockname()[1], None if rpc is None else rpc.port, aside)
            self._say.listening(reach)
            prepare = self._prepare(engine, texts, reach, model_names(settings)[0])
            await until(prepare, shutdown, serving)
            await until(_first(engine.supervisor.failed(), texts.pool.failed()), shutdown, serving)
            if texts.pool.is_failed:
                raise StartFailed(texts.pool.reason)
            if engine.supervisor.state is EngineState.FAILED:
                raise StartFailed(f"the engine has failed: {engine.supervisor.reason}")
            await self._drain(engine, serving)
        finally:
            await engine.stop(self._stop_grace_s(engine))
            close_s = HURRIED_GRACE_S if self._hurried.is_set() else CLOSE_GRACE_S
            web.stop(close_s)
            if rpc is not None:
                await rpc.stop(close_s)
            await serving
            telemetry.access.flush(time.monotonic())
            watching.cancel()
            reading.cancel()
            await texts.pool.close()
            spare.close()
            if self._use is not None:
                self._use.close()
        self._say.stopped()
        return 0

    def _connections(self, engine: EngineClient, telemetry: Telemetry) -> dict[str, Connections]:
        """The books of each front's connections."""
        from .fronts.connections import ConnectionLimits, Connections

        limits, refuse = self._limits or ConnectionLimits(), engine.gate.refuse
        books = {"http": Connections(limits.http, limits.http_per_peer, front="HTTP", on_refused=refuse)}
        if self.settings.grpc_port is not None:
            books["grpc"] = Connections(limits.grpc, limits.grpc_per_peer, front="gRPC", on_refused=refuse)
        for front, of in books.items():
            telemetry.metrics.watch_connections(front, of)
        return books

    def _rpc(
        self, engine: EngineClient, texts: Texts, telemetry: Telemetry, door: Authenticator, connections: Connections
    ) -> RpcServer:
        from .fronts.rpc.server import RpcServer
        from .fronts.web.app import model_names

        name, lines = model_names(self.settings)[0], telemetry.access
        return RpcServer(
            engine, texts, self.settings, telemetry.metrics, name, door, connections=connections, lines=lines
        )

    def hurry(self) -> None:
        """Cut the drain short: the engine is killed, every stream gets its terminal event and every request its line in
        the log, and `run` returns within a second or so."""
        self._hurried.set()
        if self._engine is not None and self._engine.supervisor.state is EngineState.STOPPING:
            self._engine.supervisor.kill()

    def kill(self) -> None:
        """End the child at once, for a process that is about to end itself."""
        if self._engine is not None:
            self._engine.supervisor.kill()

    def _stop_grace_s(self, engine: EngineClient) -> float:
        """How long the engine may take to unwind."""
        if self._hurried.is_set():
            return 0.0
        return STOP_GRACE_S if engine.capabilities is not None else LOADING_GRACE_S

    async def _prepare(self, engine: EngineClient, texts: Texts, reach: Reach, name: str) -> None:
        """Find the model, load its text side and start the engine: in this order each fails with its own message."""
        from .models import Source, in_use
        from .models.resolve import locate
        from .telemetry.logs import adopt

        began = time.monotonic()
        await aside(lambda: require_installed(self.settings.model))

        def progress(stage: str) -> None:
            engine.supervisor.stage = stage
            self._say.stage(stage)

        def watch(transfer: Transfer) -> None:
            engine.supervisor.stage = str(transfer)
            self._say.transfer(transfer)

        starting = asyncio.create_task(texts.pool.start(), name="treadle-text-start")
        try:
            located = await aside(lambda: locate(self.settings, progress, watch))
            await starting
        finally:
            starting.cancel()
        adopt()
        self._use = in_use.lock_folder(located.path)
        if located.source is not Source.FOLDER:  # a folder of the user's stays as it is
            in_use.mark_used(located.path)
        engine.supervisor.on_stage = progress
        self._folder = located
        model = await texts.load(located.path, self.settings, engine.begin)
        await engine.supervisor.ready()
        assert engine.capabilities is not None
        self._settled()
        if self._watchdog is not None:
            self._watchdog.ready()
        self._say.ready(reach, name, engine.capabilities, model.default_sampling, time.monotonic() - began)

    async def _drain(self, engine: EngineClient, serving: asyncio.Task[None]) -> None:
        """Refuse what is new; what runs has `drain_s` to end (C3), or until `hurry`."""
        engine.drain()
        self._say.draining(engine.busy, self.settings.drain_s)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(until(engine.idle(), self._hurried, serving), self.settings.drain_s)

    def _model_folder(self) -> ModelFolder:
        assert self._folder is not None
        return self._folder


async def aside(work: Callable[[], T]) -> T:
    """`work()` on a thread of its own. Unlike an executor's it holds up neither the event loop's end nor the process's
    when its caller is cancelled: a download or a conversion may take many minutes."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="treadle-aside", daemon=True).start()
    return await asyncio.wrap_future(future)


async def _first(*waits: Coroutine[Any, Any, object]) -> None:
    """Returns when one of them does."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


async def until(work: Any, shutdown: asyncio.Event, serving: asyncio.Task[None]) -> None:
    """Run `work` until it ends, or `shutdown` is set, or the web server has ended; raises what `work` raises."""
    working = asyncio.ensure_future(work)
    asked = asyncio.create_task(shutdown.wait())
    try:
        await asyncio.wait((working, asked, serving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
    finally:
        for task in (working, asked):
            task.cancel()
        await asyncio.gather(working, asked, return_exceptions=True)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError when the address can't be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if host == "::":
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind(address)
        sock.listen(LISTEN_BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"can't listen on {host}:{port}: {error.strerror}; choose another with `host` and `port`"
        ) from error
    sock.setblocking(False)
    return sock
