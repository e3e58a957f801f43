"""Run of a fleet at a terminal: one table of all members, kept up to date."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from .. import output_streams
from ..compose.checks import require_installed
from ..compose.sockets import listen
from ..compose.waiting import aside
from ..errors import ConfigError
from ..fleet.fleet import Fleet, FleetView
from ..fleet.plan import FleetPlan
from ..host_names import url_of
from ..network_exposure import Reach, addresses, http_access
from .secrets import forget_key, warn_of_command_line
from .serve import first_call
from .signals import ShutdownSignals

COLORS = {"ready": "green", "healthy": "green", "down": "red", "failed": "red", "unhealthy": "red"}


def log_folder(given: Path | None) -> Path:
    """Return the folder for the members' logs, made if it is missing. Raises ConfigError."""
    if given is None:
        return Path(tempfile.mkdtemp(prefix="treadle-fleet-"))
    try:
        given.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--logs {given}: {error.strerror}: name another folder", param="logs") from error
    return given


async def run(plan: FleetPlan, *, no_auth: bool = False) -> int:
    """Run the fleet until a signal. Returns 0 after a clean end, 128 plus its number after a second signal. Raises
    TreadleError."""
    forget_key()
    warn_of_command_line()
    output_streams.unblock()
    access = http_access(plan.host, has_key=plan.requires_key, no_auth=no_auth)
    urls = [url_of("http", at, plan.port) for at in await addresses(plan.host, aside)]
    require_installed(plan.model, gateway=True)
    await aside(lambda: listen(plan.host, plan.port).close())  # the gateway comes last, minutes later for a large model
    with FleetReporter(Reach(tuple(urls), (), (access,)), has_key=plan.api_key is not None) as reporter:
        fleet = Fleet(plan, reporter)
        with ShutdownSignals(hurry=fleet.end_now, kill=fleet.kill) as signals:
            await fleet.run(signals.requested)
    reporter.stopped()
    return signals.exit_code(0)


class FleetReporter:
    """Reporter of a fleet's progress: a live table on a terminal; elsewhere one line for each change."""

    def __init__(self, reach: Reach, *, has_key: bool) -> None:
        """`reach` is the gateway's. `has_key`: its clients send what TREADLE_API_KEY holds."""
        self._reach = reach
        self._has_key = has_key
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._live: Live | None = None
        self._last: dict[str, str] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> FleetReporter:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def starting(self, plan: FleetPlan) -> None:
        self._console.print(
            f"[bold]Treadle[/] starts {plan.replicas} workers of {escape(plan.model)}; logs in {escape(str(plan.logs))}"
        )
        if self._console.is_terminal:
            self._live = self._stack.enter_context(Live(console=self._console, refresh_per_second=4))

    def ready(self, url: str, model: str, *, embeds: bool, chats: bool) -> None:
        path, body = first_call(model, embeds=embeds, chats=chats)
        key = " -H 'Authorization: Bearer '\"$TREADLE_API_KEY\"" if self._has_key else ""
        self._console.print(f"[bold green]Ready[/] at {', '.join(self._reach.http)}")
        for access in self._reach.access:
            self._console.print(f"  access: {access.text}", style="bold yellow" if access.open else None, markup=False)
        self._console.print("Try:")
        self._console.print(f"  curl -s {url}{path}{key} -H 'Content-Type: application/json' -d '{body}'", markup=False)

    def view(self, view: FleetView) -> None:
        if self._live is not None:
            self._live.update(table_of(view))
            return
        states = {row.name: f"{row.state}, {row.gateway} to the gateway" for row in view.workers}
        for name, state in (states | {"gateway": view.gateway}).items():
            if self._last.get(name) != state:
                self._last[name] = state
                self._console.print(f"  {name}: {state}", markup=False)

    def warning(self, text: str) -> None:
        self._console.print(text, style="yellow", markup=False)

    def stopping(self) -> None:
        self._console.print("Shutting down: running requests end first (again to end at once)")

    def stopped(self) -> None:
        self._console.print("Stopped")


def table_of(view: FleetView) -> Table:
    """Build the table of all members."""
    table = Table(title=f"gateway: {view.gateway}", title_justify="left", title_style="bold")
    for name in ("worker", "place", "pid", "state", "gateway says"):
        table.add_column(name)
    for name in ("running", "waiting", "tokens", "restarts"):
        table.add_column(name, justify="right")
    for row in view.workers:
        words = [f"[{COLORS.get(word, 'yellow')}]{word}[/]" for word in (row.state, row.gateway)]
        counts = [f"{count:,}" for count in (row.running, row.waiting, row.tokens, row.restarts)]
        table.add_row(row.name, row.place, str(row.pid or "–"), *words, *counts)
    return table
