"""The commands and their options. Each option has the name that the settings file uses."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from ..config import Settings
from .bench import app as bench_app
from .flags import FLAGS
from .fleet import fleet_command
from .keys import app as keys_app

app = typer.Typer(
    name="treadle",
    help="Serve language models on MLX to many clients at once.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

MODEL = "A folder, a hub id such as mlx-community/Qwen3-0.6B-bf16, or 'demo' (Gemma 3 270M)."
NETWORK, GRPC, LIMITS, MODELS, ENGINE, LOG = "Network", "gRPC", "Limits", "Model", "Engine", "Log"
_DEFAULTS = {name: field.default for name, field in Settings.fields().items()}
_SIZE, _SECONDS, _TOKENS, _COUNT, _FILE = "SIZE", "SECONDS", "TOKENS", "N", "FILE"


def _setting(name: str, help_: str, panel: str, kind: str | None = None, *, env: str | None = None) -> Any:
    """The option of setting `name`. It shows the default that `Settings` has; the values stay None, so that a settings
    file is not overruled by an option that nobody gave."""
    default = _DEFAULTS[name]
    flag = f"--{name.replace('_', '-')}"
    flag += f"/--no-{name.replace('_', '-')}" if default is True else ""
    plain = f"{default:g}" if isinstance(default, float) else str(default)
    shown = "" if default is None or default is False or default == () else f" Default: {plain}."
    return typer.Option(flag, help=help_ + shown, rich_help_panel=panel, metavar=kind, envvar=env, show_default=False)


Model = Annotated[str | None, typer.Argument(help=f"{MODEL} Default: {_DEFAULTS['model']}.", show_default=False)]
Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="A TOML file with the names of these options; options win over it.",
        rich_help_panel=MODELS,
        metavar=_FILE,
        show_default=False,
    ),
]
Revision = Annotated[
    str | None, _setting("revision", "The hub revision (branch, tag or commit) to pin.", MODELS, "REV")
]
Offline = Annotated[bool | None, _setting("offline", "Never ask the hub; use what is cached.", MODELS)]
ChatTemplate = Annotated[
    Path | None, _setting("chat_template", "A Jinja file in place of the model's own template.", MODELS, _FILE)
]
ServedModelName = Annotated[
    str | None, _setting("served_model_name", "Its name for clients. Default: the model's.", MODELS, "NAME")
]
MaxRunning = Annotated[
    int | None, _setting("max_running", "Sequences that run together; 1 is serialized mode.", LIMITS, _COUNT)
]
Context = Annotated[
    int | None, _setting("context", "Longest prompt plus completion. Default: the model's.", LIMITS, _TOKENS)
]
Memory = Annotated[
    str | None,
    _setting("memory", "For the KV cache: bytes, or 8GiB. Default: half of what the weights leave.", LIMITS, _SIZE),
]
PrefixCache = Annotated[
    bool | None, _setting("prefix_cache", "Keep prompts in the KV cache for those that begin alike.", LIMITS)
]
KvBits = Annotated[int | None, _setting("kv_bits", "8: keys and values in 8 bits. CUDA only.", LIMITS, "BITS")]
Threads = Annotated[int | None, _setting("threads", "CPU threads. Default: by the cores there are.", ENGINE, _COUNT)]


app.add_typer(bench_app)
app.add_typer(keys_app)
app.command("fleet", context_settings={"allow_extra_args": True, "ignore_unknown_options": False})(fleet_command)


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        from ..installation import version as installed

        print(f"treadle {installed()}")
        raise typer.Exit


@app.command()
def serve(
    model: Model = None,
    config: Config = None,
    revision: Revision = None,
    offline: Offline = None,
    chat_template: ChatTemplate = None,
    served_model_name: ServedModelName = None,
    host: Annotated[str | None, _setting("host", "Address to listen on.", NETWORK, "ADDRESS")] = None,
    port: Annotated[int | None, _setting("port", "Port to listen on; 0 picks one.", NETWORK, "PORT")] = None,
    api_key: Annotated[
        str | None,
        _setting("api_key", "Key that every route but /health/live asks for.", NETWORK, "KEY", env="TREADLE_API_KEY"),
    ] = None,
    api_keys: Annotated[
        Path | None,
        _setting(
            "api_keys",
            "File of hashed keys with scopes and limits: treadle keys.",
            NETWORK,
            _FILE,
            env="TREADLE_API_KEYS",
        ),
    ] = None,
    no_auth: Annotated[
        bool | None, _setting("no_auth", "Serve beyond this machine without a key: anyone may come in.", NETWORK)
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        _setting(
            "allowed_host",
            "Host name to answer to, or *.example.lan; may be repeated. * is every name.",
            NETWORK,
            "NAME",
            env="TREADLE_ALLOWED_HOST",
        ),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        _setting(
            "cors_origin",
            "Web origin whose pages may call the server; may be repeated. * is every site.",
            NETWORK,
            "ORIGIN",
            env="TREADLE_CORS_ORIGIN",
        ),
    ] = None,
    max_body_bytes: Annotated[str | None, _setting("max_body_bytes", "Longest request body.", NETWORK, _SIZE)] = None,
    stall: Annotated[
        float | None, _setting("stall", "How long a stream's reader may stall.", NETWORK, _SECONDS)
    ] = None,
    keepalive: Annotated[
        float | None, _setting("keepalive", "Between comments on a silent stream.", NETWORK, _SECONDS)
    ] = None,
    drain: Annotated[
        float | None, _setting("drain", "What running requests get at shutdown.", NETWORK, _SECONDS)
    ] = None,
    grpc_port: Annotated[
        int | None, _setting("grpc_port", "Also serve gRPC here, as a worker of the SMG gateway.", GRPC, "PORT")
    ] = None,
    grpc_host: Annotated[
        str | None, _setting("grpc_host", "Address for gRPC. Default: that of --host.", GRPC, "ADDRESS")
    ] = None,
    grpc_wire: Annotated[
        str | None, _setting("grpc_wire", "mlx, vllm or both: which services to offer.", GRPC, "WIRE")
    ] = None,
    grpc_cert: Annotated[Path | None, _setting("grpc_cert", "TLS certificate, PEM.", GRPC, "FILE")] = None,
    grpc_key: Annotated[Path | None, _setting("grpc_key", "Its key, PEM.", GRPC, "FILE")] = None,
    grpc_client_ca: Annotated[
        Path | None, _setting("grpc_client_ca", "Take only clients with a certificate of this CA.", GRPC, "FILE")
    ] = None,
    grpc_auth: Annotated[
        bool | None, _setting("grpc_auth", "Ask every gRPC client for a key, on this machine too.", GRPC)
    ] = None,
    grpc_no_auth: Annotated[
        bool | None, _setting("grpc_no_auth", "Serve gRPC beyond this machine without asking for a key.", GRPC)
    ] = None,
    max_running: MaxRunning = None,
    max_waiting: Annotated[
        int | None, _setting("max_waiting", "Sequences that may wait. Default: by forecast.", LIMITS, _COUNT)
    ] = None,
    max_wait: Annotated[
        float | None, _setting("max_wait", "How long one may wait; 0 refuses at once.", LIMITS, _SECONDS)
    ] = None,
    prefill_tokens: Annotated[
        int | None, _setting("prefill_tokens", "Prompt tokens a step computes at most.", LIMITS, _TOKENS)
    ] = None,
    max_tokens: Annotated[
        int | None,
        _setting("max_tokens", "Cap on a completion. Default: what the context leaves.", LIMITS, _TOKENS),
    ] = None,
    context: Context = None,
    memory: Memory = None,
    prefix_cache: PrefixCache = None,
    kv_bits: KvBits = None,
    threads: Threads = None,
    hang_after: Annotated[
        float | None,
        _setting("hang_after", "Without a step, while work waits, until the engine is replaced.", ENGINE, _SECONDS),
    ] = None,
    start_timeout: Annotated[
        float | None, _setting("start_timeout", "What the engine may take to load.", ENGINE, _SECONDS)
    ] = None,
    in_process: Annotated[
        bool | None, _setting("in_process", "Run the engine on a thread instead of in a child process.", ENGINE)
    ] = None,
    log_level: Annotated[
        str | None, _setting("log_level", "debug, info, warning, error or critical.", LOG, "LEVEL")
    ] = None,
    log_format: Annotated[
        str | None, _setting("log_format", "text, or json: one object per line.", LOG, "FORMAT")
    ] = None,
    log_client: Annotated[
        bool | None, _setting("log_client", "Show clients' addresses in the access log.", LOG)
    ] = None,
) -> None:
    """Serve MODEL over HTTP: OpenAI's API at /v1, health at /health, metrics at /metrics. With --grpc-port also as a
    worker of the SMG gateway."""
    settings = _settings(locals())
    from .serve import run

    raise typer.Exit(run(settings))


@app.command()
def doctor(
    model: Model = None,
    check: Annotated[
        bool, typer.Option("--check", help="Also run the model: fidelity, cancel, crash recovery, a burst.")
    ] = False,
    brief: Annotated[
        bool, typer.Option("--brief", help="One line: versions, device and verdict, or the first failure and its cure.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    config: Config = None,
    revision: Revision = None,
    offline: Offline = None,
    max_running: MaxRunning = None,
    context: Context = None,
    memory: Memory = None,
    kv_bits: KvBits = None,
    threads: Threads = None,
) -> None:
    """Say what would run here and what is in the way: device, memory, BLAS, versions, model. Exit code 0 if it can
    serve. With --check, run MODEL and print a report to paste into an issue."""
    settings = _settings({k: v for k, v in locals().items() if k not in ("check", "brief", "as_json")})
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


def _settings(options: Mapping[str, Any]) -> Settings:
    """Settings from the options that were given, over those of the file that `config` names."""
    given = {name: value for name, value in options.items() if value not in (None, []) and name != "config"}
    if options["config"] is not None:
        return Settings.from_file(options["config"], given, spelling=FLAGS)
    return Settings.from_mapping(given, source="the command line", spelling=FLAGS)
