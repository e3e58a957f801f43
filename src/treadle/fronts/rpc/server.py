"""gRPC server: both wires, health and reflection on one port, over the same gate and engine as HTTP."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from smg_grpc_proto import mlx_engine_pb2_grpc, vllm_engine_pb2_grpc

from ...config import Settings
from ...errors import ConfigError
from ...host_names import address_of, url_of
from ...telemetry.access_log import AccessLogWriter
from ...telemetry.metrics import Metrics
from ..authentication import Authenticator
from ..connections import Connections
from ..live_requests import ABORT_BYTES, LiveRequests
from ..served_models import ServedModel
from ..size_limits import TRANSPORT_BYTES
from . import health, mlx_wire, vllm_wire
from .call_slots import CallSlots
from .connection_census import ConnectionCensus
from .generate import ServiceContext
from .guard import KeyGuard
from .interceptor import Interceptor
from .log_filter import LOGGER, LogFilter
from .model_info import WorkerInfo
from .tls import credentials

LEAST_PING_S = 10.0
HANDSHAKE_S = 20.0
IDLE_S = 600.0
STREAMS = 1024  # per connection, at least: further calls wait in the client
METADATA_BYTES = 16 * 1024  # per call; each open call holds its own
READ_BYTES = 64 * 1024  # per connection: memory that an evicted one leaves behind; the core's default is 4 MiB


class RpcServer:
    """The gRPC front, until stopped. Calls before the engine is ready, and while it drains, end with UNAVAILABLE."""

    def __init__(
        self,
        model: ServedModel,
        settings: Settings,
        metrics: Metrics,
        authenticator: Authenticator | None = None,
        *,
        connections: Connections | None = None,
        lines: AccessLogWriter | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`authenticator` and the access log's `lines` are shared with the server's other fronts, if any. `connections`
        counts and limits the clients; without it there is no limit."""
        self.calls = LiveRequests(clock)
        self.port = 0  # known after `start`
        self._settings = settings
        info = WorkerInfo(model, settings.chat_template is not None, clock)
        authenticator = authenticator or Authenticator.of(settings, model.engine.gate.refuse)
        lines = lines or AccessLogWriter(show_client=settings.log_client)
        worker = ServiceContext(model, settings, self.calls, metrics, clock, authenticator, lines)
        self._connections = connections or Connections(front="gRPC")
        self._lines = LogFilter()
        self._census: asyncio.Task[None] | None = None
        sequences = model.engine.gate.limits.places
        slots = CallSlots(sequences, model.engine.gate.refuse)
        self._connections.parts = {"calls": slots.calls, "streams": slots.streams}
        guard = KeyGuard(authenticator, settings)
        longest = {
            "Generate": worker.message_bytes,
            "Embed": worker.message_bytes,
            "Abort": lambda: ABORT_BYTES,
        }
        self._server = grpc.aio.server(
            interceptors=[Interceptor(guard, slots, longest, settings.stall_s)],
            options=_options(settings, self._connections.limit, 2 * sequences),
        )
        services = _add_wires(self._server, settings.grpc_wire, worker, info)
        health_pb2_grpc.add_HealthServicer_to_server(
            health.HealthService(lambda: info.unavailable is None, services), self._server
        )
        reflection.enable_server_reflection([*services, health.SERVICE, reflection.SERVICE_NAME], self._server)

    async def start(self) -> str:
        """Listen, and return the URL. Raises ConfigError if the address can't be bound or a TLS file can't be used."""
        settings = self._settings
        host, port = settings.grpc_host or settings.host, settings.grpc_port or 0
        await asyncio.to_thread(_check_address, host, port)
        LOGGER.addFilter(self._lines)
        tls = await asyncio.to_thread(credentials, settings)
        self.port = self._bind(host, port, tls)
        await self._server.start()
        self._census = asyncio.create_task(ConnectionCensus(self._connections).run(self.port), name="treadle-census")
        return url_of("grpc" if tls is None else "grpcs", host, self.port)

    def _bind(self, host: str, port: int, tls: Any) -> int:
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if tls is None:
                return int(self._server.add_insecure_port(address))
            return int(self._server.add_secure_port(address, tls))
        except RuntimeError as error:
            raise _no_address(host, port, str(error)) from error

    async def stop(self, grace_s: float = 1.0) -> None:
        """Take no more calls, let open ones end for up to `grace_s` seconds, then end them."""
        await self._server.stop(grace_s)
        LOGGER.removeFilter(self._lines)
        if self._census is not None:
            self._census.cancel()
            await asyncio.gather(self._census, return_exceptions=True)


def _check_address(host: str, port: int) -> None:
    """Raise ConfigError if no address of `host` can be bound: gRPC's C core would log a line of its own."""
    reason = "it has no address"
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise _no_address(host, port, getattr(error, "strerror", None) or "this is no host name") from error
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                sock.bind(address)
                return
        except OSError as error:
            reason = error.strerror or reason
    raise _no_address(host, port, reason)


def _no_address(host: str, port: int, reason: str) -> ConfigError:
    address_text = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return ConfigError(
        f"can't listen for gRPC on {address_text}: {reason}; choose another with `grpc_port` or `grpc_host`"
    )


def _add_wires(server: Any, wire: str, worker: ServiceContext, info: WorkerInfo) -> list[str]:
    services = []
    if wire in ("mlx", "both"):
        mlx_engine_pb2_grpc.add_MlxEngineServicer_to_server(mlx_wire.MlxEngine(worker, info), server)
        services.append(mlx_wire.SERVICE)
    if wire in ("vllm", "both"):
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(vllm_wire.VllmEngine(worker, info), server)
        services.append(vllm_wire.SERVICE)
    return services


def _options(settings: Settings, max_connections: int | None, calls: int) -> Sequence[tuple[str, Any]]:
    """Return the channel's options. The gateway pings every 30 s, also on idle and silent streams; other clients may do
    so every LEAST_PING_S. It keeps one connection for ever, which therefore has no greatest age: one without calls ends
    after IDLE_S. `calls` is the number of one client's calls that must not queue: those of all sequences that the
    server holds, and as many refusals."""
    limited: list[tuple[str, Any]] = []
    if max_connections is not None:
        listeners = 1 if address_of(settings.grpc_host or settings.host) else 2  # a name's IPv4 and IPv6 address
        limited = [("grpc.max_allowed_incoming_connections", max(1, max_connections // listeners))]
    return (
        *limited,
        ("grpc.server_handshake_timeout_ms", int(1000 * HANDSHAKE_S)),
        ("grpc.max_connection_idle_ms", int(1000 * IDLE_S)),
        ("grpc.max_concurrent_streams", max(STREAMS, calls)),
        ("grpc.absolute_max_metadata_size", METADATA_BYTES),
        ("grpc.http2.min_ping_interval_without_data_ms", int(1000 * LEAST_PING_S)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.max_receive_message_length", settings.max_body_bytes or TRANSPORT_BYTES),
        ("grpc.max_send_message_length", 4 * 1024 * 1024),
        ("grpc.experimental.tcp_max_read_chunk_size", READ_BYTES),
        ("grpc.so_reuseport", 0),
    )
