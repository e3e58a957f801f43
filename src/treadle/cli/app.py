"""Commands of the `treadle` program."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ..gc_pause import without_collections
from .bench import app as bench_app
from .connect import connect_command
from .fleet import fleet_command
from .keys import app as keys_app
from .options import DOCTOR, SERVE, settings_from, takes

app = typer.Typer(
    name="treadle",
    help="Serve language models on MLX to many clients at once.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


app.add_typer(bench_app)
app.add_typer(keys_app)
app.command("connect")(connect_command)
app.command("fleet", context_settings={"allow_extra_args": True, "ignore_unknown_options": False})(fleet_command)


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        from ..installation import version as installed

        print(f"treadle {installed()}")
        raise typer.Exit


@app.command()
@takes(SERVE)
def serve(**given: Any) -> None:
    """Serve MODEL over HTTP: OpenAI's API at /v1, health at /health, metrics at /metrics. With --grpc-port also as a
    worker of the SMG gateway."""
    settings = settings_from(given)
    with without_collections():
        from .serve import run

    raise typer.Exit(run(settings))


@app.command()
@takes(DOCTOR, before=1)
def doctor(
    check: Annotated[
        bool, typer.Option("--check", help="Also run the model: fidelity, cancel, crash recovery, a burst.")
    ] = False,
    brief: Annotated[
        bool, typer.Option("--brief", help="One line: versions, device and verdict, or the first failure and its cure.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    **given: Any,
) -> None:
    """Say what would run here and what is in the way: device, memory, BLAS, versions, model. Exit code 0 if it can
    serve. With --check, run MODEL and print a report to paste into an issue."""
    settings = settings_from(given)
    if brief and (check or as_json):
        raise typer.BadParameter("--brief stands alone: leave out --check and --json")
    from .doctor import run, run_brief

    raise typer.Exit(run_brief(settings) if brief else run(settings, check=check, as_json=as_json))


HubModel = Annotated[str, typer.Argument(help="A hub id such as mlx-community/Qwen3-0.6B-bf16, or 'demo'.")]
HubRevision = Annotated[
    str | None,
    typer.Option("--revision", help="A branch, tag or commit.", metavar="REV", show_default=False),
]


@app.command()
def pull(model: HubModel, revision: HubRevision = None) -> None:
    """Download MODEL and check it, without serving it; print its folder. A download that broke off goes on."""
    from .models import pull as run

    raise typer.Exit(run(model, revision))


@app.command()
def models(
    everything: Annotated[
        bool, typer.Option("--all", help="Also those that can't be served, with the reason.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the list as JSON.")] = False,
) -> None:
    """List the models on this disk that can be served: size, architecture, weights, last use, whole or not."""
    from .models import show

    raise typer.Exit(show(everything=everything, as_json=as_json))


@app.command()
def rm(
    model: HubModel,
    revision: HubRevision = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove MODEL, whole or partial, from the hub's cache (or the converted demo). Never touches other folders."""
    from .models import remove

    raise typer.Exit(remove(model, revision, yes=yes))
