"""The gRPC server: both wires, health and reflection on one port, over the same gate and engine as HTTP."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from smg_grpc_proto import mlx_engine_pb2_grpc, vllm_engine_pb2_grpc

from ...config import Settings
from ...engine.client import EngineClient
from ...errors import ConfigError
from ...telemetry.access import AccessLines
from ...telemetry.metrics import Metrics
from ..callers import Doorkeeper
from ..text import Texts
from . import health, mlx, vllm
from .calls import Calls
from .facts import Facts
from .generate import Worker
from .guard import KeyGuard

LEAST_PING_S = 10.0


class RpcServer:
    """Serves until stopped. Calls before the engine is ready, and while it drains, end with UNAVAILABLE."""

    def __init__(
        self,
        engine: EngineClient,
        texts: Texts,
        settings: Settings,
        metrics: Metrics,
        name: str,
        door: Doorkeeper | None = None,
        *,
        lines: AccessLines | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`door` and the access log's `lines` are shared with the server's other fronts, where it has some."""
        self.calls = Calls(clock)
        self.port = 0  # known once it is started
        self._settings = settings
        facts = Facts(engine, texts, name, settings.chat_template is not None, clock)
        door = door or Doorkeeper.of(settings, engine.gate.refuse)
        lines = lines or AccessLines(show_client=settings.log_client)
        worker = Worker(engine, texts, settings, self.calls, metrics, clock, door, lines)
        self._server = grpc.aio.server(interceptors=[KeyGuard(door, settings)], options=_options(settings))
        services = _add_wires(self._server, settings.grpc_wire, worker, facts)
        health_pb2_grpc.add_HealthServicer_to_server(
            health.Health(lambda: facts.trouble is None, services), self._server
        )
        reflection.enable_server_reflection([*services, health.SERVICE, reflection.SERVICE_NAME], self._server)

    async def start(self) -> str:
        """Listen; returns the URL. Raises ConfigError when the address can't be had or a TLS file not be read."""
        settings = self._settings
        host = settings.grpc_host or settings.host
        address = f"[{host}]:{settings.grpc_port}" if ":" in host else f"{host}:{settings.grpc_port}"
        tls = _credentials(settings)
        try:
            if tls is None:
                self.port = self._server.add_insecure_port(address)
            else:
                self.port = self._server.add_secure_port(address, tls)
        except RuntimeError as error:
            raise ConfigError(
                f"can't listen for gRPC on {address}: choose another with `grpc_port` or `grpc_host`"
            ) from error
        await self._server.start()
        where = address.rpartition(":")[0]
        return f"{'grpc' if tls is None else 'grpcs'}://{where}:{self.port}"

    async def stop(self, grace_s: float = 1.0) -> None:
        """Take no more calls, let open ones end for up to `grace_s`, then end them."""
        await self._server.stop(grace_s)


def _add_wires(server: Any, wire: str, worker: Worker, facts: Facts) -> list[str]:
    services = []
    if wire in ("mlx", "both"):
        mlx_engine_pb2_grpc.add_MlxEngineServicer_to_server(mlx.MlxEngine(worker, facts), server)
        services.append(mlx.SERVICE)
    if wire in ("vllm", "both"):
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(vllm.VllmEngine(worker, facts), server)
        services.append(vllm.SERVICE)
    return services


def _options(settings: Settings) -> Sequence[tuple[str, Any]]:
    """The gateway pings every 30 s, also on idle and silent streams; others may do so as often as LEAST_PING_S."""
    return (
        ("grpc.http2.min_ping_interval_without_data_ms", int(1000 * LEAST_PING_S)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.max_receive_message_length", settings.max_body_bytes),
        ("grpc.max_send_message_length", 4 * 1024 * 1024),
        ("grpc.so_reuseport", 0),
    )


def _credentials(settings: Settings) -> Any:
    """TLS with the settings' PEM files; None where they name none. Raises ConfigError for files that can't be read."""
    if settings.grpc_cert is None or settings.grpc_key is None:
        return None
    roots = None if settings.grpc_client_ca is None else _read("grpc_client_ca", settings.grpc_client_ca)
    pair = (_read("grpc_key", settings.grpc_key), _read("grpc_cert", settings.grpc_cert))
    return grpc.ssl_server_credentials([pair], roots, require_client_auth=roots is not None)


def _read(setting: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"`{setting}` {path} can't be read: {error.strerror}", param=setting) from error
