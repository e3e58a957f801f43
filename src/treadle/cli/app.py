"""The commands and their options. Each option has the name that the settings file uses."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..config import Settings

app = typer.Typer(
    name="treadle",
    help="Serve language models on MLX to many clients at once.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

MODEL = "A folder, a hub id such as mlx-community/Qwen3-0.6B-bf16, or 'demo' (Gemma 3 270M). Default: demo."
NETWORK, LIMITS, MODELS, ENGINE = "Network", "Limits", "Model", "Engine"


def _option(help_: str, panel: str, *names: str, env: str | None = None) -> Any:
    return typer.Option(*names, help=help_, rich_help_panel=panel, envvar=env, show_default=False)


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        from importlib.metadata import version as installed

        print(f"treadle {installed('treadle')}")
        raise typer.Exit


@app.command()
def serve(
    model: Annotated[str | None, typer.Argument(help=MODEL, show_default=False)] = None,
    config: Annotated[Path | None, _option("A TOML file with the names of these options.", MODELS)] = None,
    revision: Annotated[str | None, _option("The hub revision (branch, tag or commit) to pin.", MODELS)] = None,
    offline: Annotated[bool | None, _option("Never ask the hub; use what is cached.", MODELS, "--offline")] = None,
    chat_template: Annotated[Path | None, _option("A Jinja file instead of the model's chat template.", MODELS)] = None,
    served_model_name: Annotated[str | None, _option("The model's name for clients.", MODELS)] = None,
    host: Annotated[str | None, _option("Address to listen on. Default: 127.0.0.1.", NETWORK)] = None,
    port: Annotated[int | None, _option("Port to listen on; 0 picks one. Default: 8000.", NETWORK)] = None,
    api_key: Annotated[
        str | None, _option("Key that every route but /health/live asks for.", NETWORK, env="TREADLE_API_KEY")
    ] = None,
    max_body_bytes: Annotated[int | None, _option("Longest request body. Default: 8 MiB.", NETWORK)] = None,
    stall: Annotated[float | None, _option("Seconds a stream's reader may stall. Default: 30.", NETWORK)] = None,
    keepalive: Annotated[
        float | None, _option("Seconds between comments on a silent stream. Default: 5.", NETWORK)
    ] = None,
    drain: Annotated[float | None, _option("Seconds running requests get at shutdown. Default: 30.", NETWORK)] = None,
    max_running: Annotated[
        int | None, _option("Requests that run together; 1 is serialized mode. Default: 16.", LIMITS)
    ] = None,
    max_waiting: Annotated[int | None, _option("Requests that may wait. Default: as many as may run.", LIMITS)] = None,
    max_wait: Annotated[
        float | None, _option("Seconds a request may wait; 0 refuses at once. Default: 4.", LIMITS)
    ] = None,
    prefill_tokens: Annotated[
        int | None, _option("Prompt tokens a step computes at most. Default: 512.", LIMITS)
    ] = None,
    max_tokens: Annotated[
        int | None, _option("Cap on a request's completion tokens. Default: the context's rest.", LIMITS)
    ] = None,
    context: Annotated[int | None, _option("Longest prompt plus completion. Default: the model's.", LIMITS)] = None,
    memory: Annotated[int | None, _option("Bytes for the KV cache. Default: a share of the device's.", LIMITS)] = None,
    threads: Annotated[int | None, _option("CPU threads. Default: by the cores there are.", ENGINE)] = None,
    hang_after: Annotated[
        float | None, _option("Seconds without a step before the engine is replaced. Default: 30.", ENGINE)
    ] = None,
    start_timeout: Annotated[
        float | None, _option("Seconds the engine may take to load. Default: 1800.", ENGINE)
    ] = None,
    in_process: Annotated[
        bool | None, _option("Run the engine on a thread instead of a child process.", ENGINE, "--in-process")
    ] = None,
    log_level: Annotated[str | None, _option("debug, info, warning or error. Default: info.", ENGINE)] = None,
) -> None:
    """Serve MODEL over HTTP: OpenAI's API at /v1, health at /health, metrics at /metrics."""
    given = {k: v for k, v in locals().items() if v is not None and k != "config"}
    settings = Settings.from_file(config, given) if config else Settings.from_mapping(given, source="the command line")
    from .serve import run

    raise typer.Exit(run(settings))


@app.command()
def doctor(
    model: Annotated[str | None, typer.Argument(help=MODEL, show_default=False)] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Run the model and check fidelity, cancel and recovery.")
    ] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    threads: Annotated[int | None, _option("CPU threads. Default: by the cores there are.", ENGINE)] = None,
) -> None:
    """Say what would run here: device, memory, BLAS, versions; with --check, whether it works."""
    from .doctor import run

    given = {k: v for k, v in {"model": model, "threads": threads}.items() if v is not None}
    raise typer.Exit(run(Settings.from_mapping(given, source="the command line"), check=check, as_json=json_))
