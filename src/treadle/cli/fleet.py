"""Options of `treadle fleet`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer


def fleet_command(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="A folder, a hub id or 'demo'.", metavar="[MODEL]")] = "demo",
    replicas: Annotated[int, typer.Option("--replicas", "-n", help="How many workers.", metavar="N")] = 2,
    host: Annotated[str, typer.Option("--host", help="Address of the gateway.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="Port of the gateway.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option("--api-key", help="Key that clients must send.", metavar="KEY", envvar="TREADLE_API_KEY"),
    ] = None,
    no_auth: Annotated[
        bool, typer.Option("--no-auth", help="Serve beyond this machine without a key: anyone may come in.")
    ] = False,
    policy: Annotated[
        str, typer.Option("--policy", help="How the gateway chooses a worker: cache_aware, round_robin, ...")
    ] = "cache_aware",
    pin: Annotated[
        bool, typer.Option("--pin/--no-pin", help="Give each worker cores or a GPU of its own, where they suffice.")
    ] = True,
    drain: Annotated[
        float, typer.Option("--drain", help="What running requests get at shutdown.", metavar="SECONDS")
    ] = 30.0,
    logs: Annotated[Path | None, typer.Option("--logs", help="Folder for the members' logs.", metavar="FOLDER")] = None,
    gateway: Annotated[
        list[str] | None,
        typer.Option("--gateway", help="An option for the gateway, as --gateway=--log-level=warn.", metavar="OPTION"),
    ] = None,
) -> None:
    """Start N workers on this host and the SMG gateway in front of them. Options after `--` go to every worker, as
    `treadle fleet -n 2 demo -- --max-running 8`."""
    from ..fleet.plan import FleetPlan
    from ..network_exposure import check_open
    from .fleet_run import log_folder, run

    plan = FleetPlan(
        model=model,
        replicas=replicas,
        host=host,
        port=port,
        policy=policy,
        logs=log_folder(logs),
        worker_options=tuple(context.args),
        gateway_options=tuple(part for option in gateway or () for part in option.split("=", 1)),
        pin=pin,
        drain_s=drain,
        api_key=api_key,
    )
    check_open(host, has_key=plan.requires_key, no_auth=no_auth, keys_file=False)
    raise typer.Exit(asyncio.run(run(plan, no_auth=no_auth)))
