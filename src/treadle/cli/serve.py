"""`treadle serve`: run a server with the given settings, and return its exit code."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import sys
from collections.abc import Callable, Mapping

from rich.console import Console
from rich.markup import escape

from .. import output_streams
from ..compose.server import Server
from ..config import Settings
from ..core.capabilities import Capabilities
from ..fronts.connections import ConnectionLimits
from ..models.transfer import Transfer
from ..network_exposure import Access, Reach
from ..telemetry.logs import configure
from ..telemetry.watchdog import STUCK_S, Watchdog
from ..units import count, size
from .files import connection_limits, raise_open_files
from .json_reporter import LogReporter, run_logged
from .secrets import forget_key, warn_of_command_line
from .signals import KILL_S, ShutdownSignals, exit_now, run_with_timeout
from .transfers import TransferView

EXIT_STUCK = 70


def run(settings: Settings) -> int:
    """Serve until a signal; 0 after a clean end. Raises TreadleError if it can't start."""
    output_streams.unblock()
    configure(settings.log_level, sys.stderr, settings.log_format)
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # gRPC's C core writes to the descriptor, and would block
    forget_key()
    warn_of_command_line()
    limits = connection_limits(
        raise_open_files(), grpc=settings.grpc_port is not None, slots=settings.max_running + settings.waiting_places
    )
    if settings.log_format == "json":
        return run_logged(lambda: asyncio.run(_serve(settings, limits, LogReporter(settings, limits))))
    return asyncio.run(_serve(settings, limits, TerminalReporter(settings, limits)))


async def _serve(settings: Settings, limits: ConnectionLimits, reporter: TerminalReporter | LogReporter) -> int:
    watchdog = Watchdog(lambda found: _stuck(found, kill))
    server = Server(settings, reporter=reporter, limits=limits, settled=_freeze_loaded, watchdog=watchdog)

    def kill() -> None:
        server.kill()
        reporter.close()

    with contextlib.closing(reporter), ShutdownSignals(hurry=server.hurry, kill=kill) as signals:
        return signals.exit_code(await server.run(signals.requested))


def _stuck(stacks: str, kill: Callable[[], None]) -> None:
    """End a server whose event loop does not run: log the stacks of its threads and exit, to be started again."""
    message = f"the event loop has not run for {STUCK_S:g} s: the server ends with exit code {EXIT_STUCK}, to be "
    message += "started again by what supervises it; where each thread stands:"
    record = logging.LogRecord("treadle.serve", logging.CRITICAL, "", 0, message, None, None, sinfo=stacks)
    run_with_timeout(KILL_S, lambda: logging.getLogger().handle(record))  # a stuck thread may hold the handler's lock
    exit_now(EXIT_STUCK, kill)


def _freeze_loaded() -> None:
    """Freeze all loaded objects: a garbage collection of them would delay every answer."""
    gc.collect()
    gc.freeze()


class TerminalReporter:
    """Reporter of a server's progress on standard error, for a person at a terminal. If that can't be written to any
    more (a closed pipe, a full disk) nothing is printed, and the server goes on."""

    def __init__(self, settings: Settings, limits: ConnectionLimits | None = None) -> None:
        self._settings = settings
        self._limits = limits or ConnectionLimits()
        self._console = _Terminal(stderr=True, highlight=False, soft_wrap=True)
        self._transfers = TransferView(self._console)
        self._last = ""
        self._stopping = False

    def listening(self, reach: Reach) -> None:
        urls = " and ".join([reach.url, *reach.grpc[:1]])
        self._print(f"[bold]Treadle[/] listens on {escape(urls)} and loads {escape(self._settings.model)}")

    def stage(self, stage: str) -> None:
        """Print one line per stage of converting and loading."""
        if stage != self._last:
            self._last = stage
            self._print(f"  [dim]{escape(stage)}[/]")

    def transfer(self, transfer: Transfer) -> None:
        """Show a bar, or a line now and then; nothing once the server ends, which gives the download up."""
        if not self._stopping:
            with contextlib.suppress(OSError):
                self._transfers.show(transfer)

    def close(self) -> None:
        """Release the terminal."""
        self._stopping = True
        with contextlib.suppress(OSError):
            self._transfers.close()

    def ready(
        self,
        reach: Reach,
        name: str,
        capabilities: Capabilities,
        sampling: Mapping[str, float],
        load_s: float,
        no_chats: str = "",
    ) -> None:
        """Print the model, its limits, why chats are refused, if they are, its addresses and access, and a command to
        copy."""
        settings, url = self._settings, reach.url
        memory = f"{size(capabilities.weight_bytes)} of weights"
        if capabilities.kv.budget_bytes:
            memory += f", up to {size(capabilities.kv.budget_bytes)} of KV cache"
            memory += f" in {capabilities.kv.dtype}" if capabilities.kv.dtype else ""
        weights = f"{count(capabilities.parameters)} parameters, {capabilities.dtype}"
        rows = {
            "model": f"{name} ({capabilities.architecture}, {weights})",
            "device": ", ".join(
                [capabilities.device, *(f"{k} {v}" if k != "device" else v for k, v in capabilities.details.items())]
            ),
            "memory": memory,
            "path": capabilities.compute.summary(),
            "kernels": capabilities.compute.programs.summary(),
            "limits": f"{settings.max_running} running, {settings.waiting_places} waiting up to "
            f"{settings.max_wait_s:g} s, {capabilities.context:,} tokens of context",
            "clients": connections(self._limits),
            "sampling": ", ".join(f"{k} {v:g}" for k, v in sampling.items()) or "defaults: OpenAI's (temperature 1)",
            "API": f"{url}/v1  (docs at {url}/docs, status at {url}/v1/status, metrics at {url}/metrics)",
        }
        self._print(f"[bold green]Ready[/] after {load_s:.1f} s")
        for key, value in rows.items():
            if not value:
                continue
            self._print(f"  [bold]{key:<9}[/]{escape(value)}")
        if no_chats and not capabilities.embedding.only:
            why = escape(f"refused: {no_chats}; give one with --chat-template")
            self._print(f"  [bold]{'chats':<9}[/][bold yellow]{why}[/]")
        self._print_reach(reach)
        key = " -H 'Authorization: Bearer '\"$TREADLE_API_KEY\"" if settings.has_keys else ""
        path, body = first_call(name, embeds=capabilities.embedding.only, chats=not no_chats)
        self._print("Try:")
        self._print(f"  curl -s {url}{path}{key} -H 'Content-Type: application/json' -d '{body}'", markup=False)

    def _print_reach(self, reach: Reach) -> None:
        """Print addresses beyond the API's own, then the access; access for strangers stands out."""
        for name, urls in (("HTTP", reach.http if len(reach.http) > 1 else ()), ("gRPC", reach.grpc)):
            if urls:
                self._print(f"  [bold]{name:<9}[/]{escape(', '.join(urls))}")
        for i, access in enumerate(reach.access):
            self._print(f"  [bold]{'' if i else 'access':<9}[/]{_access(access)}")

    def draining(self, running: int, drain_s: float) -> None:
        self.close()
        self._print(f"Shutting down: {running} sequences to finish, up to {drain_s:g} s (again to end at once)")

    def stopped(self) -> None:
        self._print("Stopped")

    def _print(self, text: str, *, markup: bool = True) -> None:
        with contextlib.suppress(OSError):
            self._transfers.close()
            self._console.print(text, markup=markup)


def first_call(model: str, *, embeds: bool, chats: bool) -> tuple[str, str]:
    """Return the path and the body of a call to try: one that the model answers."""
    if embeds:
        return "/v1/embeddings", f'{{"model":"{model}","input":"Hello!"}}'
    if not chats:
        return "/v1/completions", f'{{"model":"{model}","prompt":"Once upon a time","max_tokens":40}}'
    message = '"messages":[{"role":"user","content":"Hello!"}]'
    return "/v1/chat/completions", f'{{"model":"{model}",{message},"max_tokens":40}}'


def connections(limits: ConnectionLimits) -> str:
    """Format the limits of connections; empty if there are none."""
    fronts = (("HTTP", limits.http, limits.http_per_peer), ("gRPC", limits.grpc, limits.grpc_per_peer))
    parts = [
        f"{name} {limit:,} ({per_peer:,} of one address)" for name, limit, per_peer in fronts if limit and per_peer
    ]
    return f"connections: {', '.join(parts)}" if parts else ""


def _access(access: Access) -> str:
    text = escape(f"{access.subject}: {access.text}")
    return f"[bold yellow]{text}[/]" if access.open else text


class _Terminal(Console):
    def on_broken_pipe(self) -> None:
        """Go quiet; Rich would end the process here."""
        self.quiet = True
