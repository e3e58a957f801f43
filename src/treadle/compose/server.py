"""The server: one model over HTTP and gRPC, from listening to the last byte."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ..config import Settings
from ..core.capabilities import Capabilities
from ..core.refusals import Refusal
from ..engine.client import EngineClient
from ..engine.supervisor import EngineState
from ..errors import StartFailed, spelled
from ..file_descriptors import DescriptorReserve
from ..gc_pause import without_collections
from ..network_exposure import Reach, check, reach_of
from .checks import check_cheaply, require_grpc, require_installed
from .engine import engine_for
from .images import check_image_hosts, image_service, warn_of_long_images
from .sockets import listen
from .texts import TextWorkers
from .waiting import aside, first, in_background, until

if TYPE_CHECKING:
    from ..fronts.authentication import Authenticator
    from ..fronts.connections import ConnectionLimits, Connections
    from ..fronts.rpc.server import RpcServer
    from ..fronts.served_models import ServedModel
    from ..fronts.web.serving import WebServer
    from ..models.folder import ModelFolder
    from ..models.in_use import UsageLock
    from ..models.transfer import Transfer
    from ..telemetry import Telemetry
    from ..telemetry.watchdog import Watchdog

STOP_GRACE_S = 5.0
CLOSE_GRACE_S = 1.0  # for clients to take their last bytes
HURRIED_GRACE_S = 0.5
LOADING_GRACE_S = 0.5  # a child that loads has nothing to unwind


class ServerReporter(Protocol):
    """Receiver of a server's progress, shown to a person. `stage` and `transfer` may be called from other threads;
    `transfer` comes four times a second while a model is downloaded. `no_chats`: see `TextView`."""

    def listening(self, reach: Reach) -> None: ...
    def stage(self, stage: str) -> None: ...
    def transfer(self, transfer: Transfer) -> None: ...
    def ready(
        self, reach: Reach, name: str, can: Capabilities, sampling: Mapping[str, float], load_s: float, no_chats: str
    ) -> None: ...
    def draining(self, running: int, drain_s: float) -> None: ...
    def stopped(self) -> None: ...


@dataclass
class _Parts:
    """The parts of a server; `rpc` once it is made."""

    model: ServedModel
    texts: TextWorkers
    telemetry: Telemetry
    authenticator: Authenticator
    connections: dict[str, Connections]
    web: WebServer
    spare: DescriptorReserve
    rpc: RpcServer | None = None


class Server:
    """One model over HTTP, and over gRPC where the settings name a port. `limits` are those of connections, without a
    default. `settled` is called when everything is loaded. `watchdog` watches the event loop all the time."""

    def __init__(
        self,
        settings: Settings,
        reporter: ServerReporter,
        *,
        limits: ConnectionLimits | None = None,
        settled: Callable[[], None] = lambda: None,
        watchdog: Watchdog | None = None,
    ) -> None:
        self.settings = settings
        self._limits = limits
        self._settled = settled
        self._watchdog = watchdog
        self._reporter = reporter
        self._folder: ModelFolder | None = None
        self._engine: EngineClient | None = None
        self._uses: list[UsageLock] = []
        self._hurried = asyncio.Event()

    async def run(self, shutdown: asyncio.Event) -> int:
        """Serve until `shutdown` is set, drain, and return 0. Raises TreadleError when it can't start or go on."""
        with spelled(self.settings.spelling):
            return await self._run(shutdown)

    async def _run(self, shutdown: asyncio.Event) -> int:
        with without_collections():
            from ..fronts.authentication import Authenticator
            from ..telemetry import Telemetry

        settings = self.settings
        check(settings)
        check_cheaply(settings)
        authenticator = Authenticator.of(settings)
        sock = listen(settings.host, settings.port)
        parts = self._build(authenticator, Telemetry(log_client=settings.log_client, watchdog=self._watchdog))
        serving = asyncio.create_task(parts.web.serve([sock]), name="treadle-web")
        watching = in_background(parts.telemetry.run(), "treadle-telemetry", "sampling for metrics and logs")
        reading = in_background(authenticator.keys.watch(aside), "treadle-keys", "following the keys file")
        try:
            await self._serve(parts, sock.getsockname()[1], shutdown, serving)
        finally:
            await self._close(parts, serving)
            watching.cancel()
            reading.cancel()
            if parts.model.images is not None:
                await parts.model.images.close()
            await parts.texts.pool.close()
            parts.spare.close()
            for use in self._uses:
                use.close()
        self._reporter.stopped()
        return 0

    def _build(self, authenticator: Authenticator, telemetry: Telemetry) -> _Parts:
        """Make the engine, its text side and the HTTP front. Nothing is started."""
        with without_collections():
            from ..fronts.served_models import Models, ServedModel, alias_names, model_names
            from ..fronts.web.access_log import MalformedLog
            from ..fronts.web.app import create_app
            from ..fronts.web.serving import WebServer

        settings, metrics = self.settings, telemetry.metrics
        spare = DescriptorReserve()
        engine = self._engine = engine_for(settings, self._model_folder, [metrics], spare)
        texts = TextWorkers(settings, lambda: engine.gate.refuse(Refusal.TEXT_BUSY), metrics)
        images = image_service(settings, lambda: engine.gate.refuse(Refusal.IMAGE_BUSY), metrics.image_killed)
        names, aliases = model_names(settings), alias_names(settings)
        model = ServedModel(names, engine, texts, settings.max_tokens, aliases, images, settings.prefill_tokens)
        metrics.watch(model)
        metrics.watch_compute(engine)
        authenticator.report_refusals_to(engine.gate.refuse)
        metrics.watch_keys(authenticator)
        connections = self._connections(engine, telemetry)
        app = create_app(
            Models(model, require_name=settings.require_model), settings, telemetry, authenticator, connections
        )
        malformed = MalformedLog(metrics, telemetry.access)
        web = WebServer(app, stall_s=settings.stall_s, connections=connections["http"], malformed=malformed)
        return _Parts(model, texts, telemetry, authenticator, connections, web, spare)

    async def _serve(self, parts: _Parts, port: int, shutdown: asyncio.Event, serving: asyncio.Task[None]) -> None:
        """Load the model and serve it until `shutdown` is set or something fails for good; then drain."""
        settings, engine, texts = self.settings, parts.model.engine, parts.texts
        if settings.grpc_port is not None:
            parts.rpc = self._rpc(parts)
            await parts.rpc.start()
        reach = await reach_of(settings, port, None if parts.rpc is None else parts.rpc.port, aside)
        self._reporter.listening(reach)
        await until(self._prepare(parts.model, texts, reach), shutdown, serving)
        await until(first(engine.supervisor.failed(), texts.pool.failed()), shutdown, serving)
        if texts.pool.is_failed:
            raise StartFailed(texts.pool.reason)
        if engine.supervisor.state is EngineState.FAILED:
            raise StartFailed(f"the engine has failed: {engine.supervisor.reason}")
        await self._drain(engine, serving)

    async def _close(self, parts: _Parts, serving: asyncio.Task[None]) -> None:
        """End the engine, then the fronts, whose clients get their last bytes."""
        await parts.model.engine.stop(self._stop_grace_s(parts.model.engine))
        close_s = HURRIED_GRACE_S if self._hurried.is_set() else CLOSE_GRACE_S
        parts.web.stop(close_s)
        if parts.rpc is not None:
            await parts.rpc.stop(close_s)
        await serving
        parts.telemetry.access.flush(time.monotonic())

    def _connections(self, engine: EngineClient, telemetry: Telemetry) -> dict[str, Connections]:
        """Count and limit each front's connections."""
        from ..fronts.connections import ConnectionLimits, Connections

        limits, refuse = self._limits or ConnectionLimits(), engine.gate.refuse
        by_front = {"http": Connections(limits.http, limits.http_per_peer, front="HTTP", on_refused=refuse)}
        if self.settings.grpc_port is not None:
            by_front["grpc"] = Connections(limits.grpc, limits.grpc_per_peer, front="gRPC", on_refused=refuse)
        for front, connections in by_front.items():
            telemetry.metrics.watch_connections(front, connections)
        return by_front

    def _rpc(self, parts: _Parts) -> RpcServer:
        require_grpc()
        from ..fronts.rpc.server import RpcServer

        return RpcServer(
            parts.model,
            self.settings,
            parts.telemetry.metrics,
            parts.authenticator,
            connections=parts.connections["grpc"],
            lines=parts.telemetry.access,
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
        """Seconds that the engine may take to unwind."""
        if self._hurried.is_set():
            return 0.0
        return STOP_GRACE_S if engine.capabilities is not None else LOADING_GRACE_S

    async def _prepare(self, model: ServedModel, texts: TextWorkers, reach: Reach) -> None:
        """Find the model, load its text side and start the engine: in this order each fails with its own message."""
        began, engine = time.monotonic(), model.engine
        await aside(lambda: require_installed(self.settings.model))
        self._folder = await self._locate(engine, texts)
        text = await texts.load(self._folder.path, self.settings, engine.begin)
        check_image_hosts(self.settings, model)
        await engine.supervisor.ready()
        assert engine.capabilities is not None
        check_image_hosts(self.settings, model)
        warn_of_long_images(model)
        self._settled()
        if self._watchdog is not None:
            self._watchdog.ready()
        load_s = time.monotonic() - began
        self._reporter.ready(reach, model.name, engine.capabilities, text.default_sampling, load_s, text.no_chats)

    async def _locate(self, engine: EngineClient, texts: TextWorkers) -> ModelFolder:
        """Find or download the model while the text workers start, and hold its folder."""
        from ..models import Source, in_use
        from ..models.resolve import locate
        from ..telemetry.logs import adopt_library_loggers

        def progress(stage: str) -> None:
            engine.supervisor.stage = stage
            self._reporter.stage(stage)

        def watch(transfer: Transfer) -> None:
            engine.supervisor.stage = str(transfer)
            self._reporter.transfer(transfer)

        starting = asyncio.create_task(texts.pool.start(), name="treadle-text-start")
        try:
            located = await aside(lambda: locate(self.settings, progress, watch))
            await starting
        finally:
            starting.cancel()
        adopt_library_loggers()
        for found in filter(None, (located, located.draft, located.scorer)):
            self._uses += filter(None, [in_use.lock_folder(found.path)])
            if found.source is not Source.FOLDER:  # a folder of the user's stays as it is
                in_use.mark_used(found.path)
        engine.supervisor.on_stage = progress
        return located

    async def _drain(self, engine: EngineClient, serving: asyncio.Task[None]) -> None:
        """Refuse new requests; running ones have `drain_s` to end (C3), or until `hurry`."""
        engine.drain()
        self._reporter.draining(engine.busy, self.settings.drain_s)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(until(engine.idle(), self._hurried, serving), self.settings.drain_s)

    def _model_folder(self) -> ModelFolder:
        assert self._folder is not None
        return self._folder
