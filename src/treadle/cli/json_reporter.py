"""Reporter of `treadle serve --log-format json`: the events that a terminal shows, each as a line of the log."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from ..config import Settings
from ..core.capabilities import Capabilities
from ..errors import TreadleError, spell
from ..fronts.connections import ConnectionLimits
from ..models.transfer import ProgressLines, Transfer
from ..network_exposure import Reach
from . import exit_code
from .flags import FLAGS

log = logging.getLogger("treadle.serve")


class LogReporter:
    """Reporter of a server's progress as log lines at INFO."""

    def __init__(self, settings: Settings, limits: ConnectionLimits | None = None) -> None:
        self._settings = settings
        self._limits = limits or ConnectionLimits()
        self._stage = ""
        self._lines = ProgressLines(self._transfer)
        self._last: Transfer | None = None
        self._stopping = False

    def listening(self, reach: Reach) -> None:
        _log("listening", {"http": reach.http, "grpc": reach.grpc, "model": self._settings.model})

    def stage(self, stage: str) -> None:
        if stage != self._stage:
            self._stage = stage
            _log("loading", {"stage": stage})

    def transfer(self, transfer: Transfer) -> None:
        """Log a line now and then; nothing once the server ends, which gives the download up."""
        if not self._stopping:
            self._last = transfer
            self._lines(transfer)

    def _transfer(self, _: str) -> None:
        assert self._last is not None
        fields = {"total_bytes": self._last.total_bytes, "bytes_per_s": round(self._last.rate), "note": self._last.note}
        _log("downloading", {"model": self._last.model, "done_bytes": self._last.done_bytes} | fields)

    def close(self) -> None:
        """Do nothing: no terminal is held."""

    def ready(
        self,
        reach: Reach,
        name: str,
        capabilities: Capabilities,
        sampling: Mapping[str, float],
        load_s: float,
        no_chats: str = "",
    ) -> None:
        """Log the model, its limits, why chats are refused, if they are, and the access: a warning where it is open to
        strangers."""
        compute = capabilities.compute
        fields = {
            "url": reach.url,
            "model": name,
            "architecture": capabilities.architecture,
            "parameters": capabilities.parameters,
            "dtype": capabilities.dtype,
            "device": capabilities.device,
            "path": compute.summary(),
            "backend": compute.backend.value,
            "fused": compute.fused,
            "kernels": {kernel.name.value: kernel.state.value for kernel in compute.kernels},
            "programs": msgspec.to_builtins(compute.programs),
            "why": list(compute.why),
            "weight_bytes": capabilities.weight_bytes,
            "kv_budget_bytes": capabilities.kv.budget_bytes,
            "context": capabilities.context,
            "max_running": self._settings.max_running,
            "max_waiting": self._settings.waiting_places,
            "max_wait_s": self._settings.max_wait_s,
            "max_connections": self._limits.http,
            "max_connections_per_peer": self._limits.http_per_peer,
            "max_grpc_connections": self._limits.grpc,
            "no_chats": no_chats,
            "load_s": round(load_s, 3),
        }
        _log("ready", fields)
        for access in reach.access:
            level = logging.WARNING if access.open else logging.INFO
            _log("access", {"about": access.subject, "text": access.text}, level)

    def draining(self, running: int, drain_s: float) -> None:
        self._stopping = True
        _log("draining", {"running": running, "drain_s": drain_s})

    def stopped(self) -> None:
        _log("stopped", {})


def run_logged(run: Callable[[], int]) -> int:
    """Return the exit code of `run`; an error that ends it is a line of the log."""
    try:
        return run()
    except TreadleError as error:
        log.error("%s", spell(error.message, FLAGS), extra={"fields": {"code": error.code}})
        return exit_code(error)
    except Exception:
        log.exception("the server failed")
        return 1


def _log(message: str, fields: Mapping[str, Any], level: int = logging.INFO) -> None:
    log.log(level, message, extra={"fields": fields})
