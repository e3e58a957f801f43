"""Typer options of the commands that take settings: `serve` and `doctor`.

Each option has the name that the settings file uses, and shows the default that `Settings` has.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from ..config import Settings
from ..units import size
from .flags import FLAGS

MODEL = "A folder, a hub id such as mlx-community/Qwen3-0.6B-bf16, or 'demo' (Gemma 3 270M)."
NETWORK, GRPC, LIMITS, MODELS, ENGINE, LOG = "Network", "gRPC", "Limits", "Model", "Engine", "Log"
_DEFAULTS = {name: field.default for name, field in Settings.fields().items()}
_SIZE, _SECONDS, _TOKENS, _COUNT, _FILE = "SIZE", "SECONDS", "TOKENS", "N", "FILE"


def _setting(
    kind: Any, name: str, help_: str, panel: str, metavar: str | None = None, *, env: str | None = None
) -> tuple[str, Any]:
    """Return the name and the annotated type of a setting's option. Values that are not given stay None, so that they
    do not override a settings file."""
    default = _DEFAULTS[name]
    flag = f"--{name.replace('_', '-')}"
    flag += f"/--no-{name.replace('_', '-')}" if default is True else ""
    text = f"{default:g}" if isinstance(default, float) else str(default)
    if metavar == _SIZE and isinstance(default, int):
        text = size(default)
    suffix = "" if default is None or default is False or default == () else f" Default: {text}."
    option = typer.Option(
        flag, help=help_ + suffix, rich_help_panel=panel, metavar=metavar, envvar=env, show_default=False
    )
    return name, Annotated[kind | None, option]


_CONFIG_FILE = typer.Option(
    "--config",
    help="A TOML file with the names of these options; options win over it.",
    rich_help_panel=MODELS,
    metavar=_FILE,
    show_default=False,
)
_MODEL = typer.Argument(help=f"{MODEL} Default: {_DEFAULTS['model']}.", show_default=False)

_OPTIONS: tuple[tuple[str, Any], ...] = (
    ("model", Annotated[str | None, _MODEL]),
    ("config", Annotated[Path | None, _CONFIG_FILE]),
    _setting(str, "revision", "The hub revision (branch, tag or commit) to pin.", MODELS, "REV"),
    _setting(bool, "offline", "Never ask the hub; use what is cached.", MODELS),
    _setting(Path, "chat_template", "A Jinja file in place of the model's own template.", MODELS, _FILE),
    _setting(str, "tool_parser", "Format of the model's tool calls; auto takes it from the template.", MODELS, "NAME"),
    _setting(str, "reasoning_parser", "Markers of the model's reasoning; none leaves it in the text.", MODELS, "NAME"),
    _setting(str, "served_model_name", "Its name for clients. Default: the model's.", MODELS, "NAME"),
    _setting(list[str], "alias", "Another name for clients, as NAME or NAME=MODEL; may be repeated.", MODELS, "NAME"),
    _setting(bool, "require_model", "Refuse HTTP requests that name no model.", MODELS),
    _setting(str, "host", "Address to listen on.", NETWORK, "ADDRESS"),
    _setting(int, "port", "Port to listen on; 0 picks one.", NETWORK, "PORT"),
    _setting(str, "api_key", "Key that every route but /health/live asks for.", NETWORK, "KEY", env="TREADLE_API_KEY"),
    _setting(
        Path,
        "api_keys",
        "File of hashed keys with scopes and limits: treadle keys.",
        NETWORK,
        _FILE,
        env="TREADLE_API_KEYS",
    ),
    _setting(bool, "no_auth", "Serve beyond this machine without a key: anyone may come in.", NETWORK),
    _setting(
        list[str],
        "allowed_host",
        "Host name to answer to, or *.example.lan; may be repeated. * is every name.",
        NETWORK,
        "NAME",
        env="TREADLE_ALLOWED_HOST",
    ),
    _setting(
        list[str],
        "cors_origin",
        "Web origin whose pages may call the server; may be repeated. * is every site.",
        NETWORK,
        "ORIGIN",
        env="TREADLE_CORS_ORIGIN",
    ),
    _setting(
        list[str],
        "image_hosts",
        "Host to fetch images of requests from, or *.example.com; may be repeated. * is every public one.",
        NETWORK,
        "NAME",
    ),
    _setting(str, "max_body_bytes", "Longest request body.", NETWORK, _SIZE),
    _setting(str, "response_store", "Memory for stored responses (the Responses API); 0 stores none.", NETWORK, _SIZE),
    _setting(float, "stall", "How long a stream's reader may stall.", NETWORK, _SECONDS),
    _setting(float, "keepalive", "Between comments on a silent stream.", NETWORK, _SECONDS),
    _setting(float, "drain", "What running requests get at shutdown.", NETWORK, _SECONDS),
    _setting(int, "grpc_port", "Also serve gRPC here, as a worker of the SMG gateway.", GRPC, "PORT"),
    _setting(str, "grpc_host", "Address for gRPC. Default: that of --host.", GRPC, "ADDRESS"),
    _setting(str, "grpc_wire", "mlx, vllm or both: which services to offer.", GRPC, "WIRE"),
    _setting(Path, "grpc_cert", "TLS certificate, PEM.", GRPC, "FILE"),
    _setting(Path, "grpc_key", "Its key, PEM.", GRPC, "FILE"),
    _setting(Path, "grpc_client_ca", "Take only clients with a certificate of this CA.", GRPC, "FILE"),
    _setting(bool, "grpc_auth", "Ask every gRPC client for a key, on this machine too.", GRPC),
    _setting(bool, "grpc_no_auth", "Serve gRPC beyond this machine without asking for a key.", GRPC),
    _setting(int, "max_running", "Sequences that run together; 1 is serialized mode.", LIMITS, _COUNT),
    _setting(int, "max_waiting", "Sequences that may wait. Default: by forecast.", LIMITS, _COUNT),
    _setting(float, "max_wait", "How long one may wait; 0 refuses at once.", LIMITS, _SECONDS),
    _setting(int, "prefill_tokens", "Prompt tokens a step computes at most.", LIMITS, _TOKENS),
    _setting(int, "max_tokens", "Cap on a completion. Default: what the context leaves.", LIMITS, _TOKENS),
    _setting(int, "context", "Longest prompt plus completion. Default: the model's.", LIMITS, _TOKENS),
    _setting(
        str, "memory", "For the KV cache: bytes, or 8GiB. Default: half of what the weights leave.", LIMITS, _SIZE
    ),
    _setting(bool, "prefix_cache", "Keep prompts in the KV cache for those that begin alike.", LIMITS),
    _setting(int, "kv_bits", "8: keys and values in 8 bits. CUDA only.", LIMITS, "BITS"),
    _setting(str, "kernels", "auto, require (fail the start where one is not active) or off.", ENGINE, "WHICH"),
    _setting(str, "structured", "auto, or off: no JSON schemas and other grammars, less memory.", ENGINE, "WHICH"),
    _setting(str, "speculate", "auto, off; lookup, draft or mtp: fail the start where it can't be.", ENGINE, "WHICH"),
    _setting(str, "draft", "Draft model: a smaller one with the same tokens, or an EAGLE-3 head.", ENGINE, "MODEL"),
    _setting(str, "spec_prefill", "Small model that scores long prompts: a part is prefilled.", ENGINE, "MODEL"),
    _setting(float, "spec_prefill_keep", "Share of a long prompt that is prefilled.", ENGINE, "SHARE"),
    _setting(int, "spec_prefill_min", "Tokens of a prompt from which on it is scored.", ENGINE, "N"),
    _setting(int, "threads", "CPU threads. Default: by the cores there are.", ENGINE, _COUNT),
    _setting(float, "hang_after", "Without a step, while work waits, until the engine is replaced.", ENGINE, _SECONDS),
    _setting(float, "start_timeout", "What the engine may take to load.", ENGINE, _SECONDS),
    _setting(bool, "in_process", "Run the engine on a thread instead of in a child process.", ENGINE),
    _setting(str, "log_level", "debug, info, warning, error or critical.", LOG, "LEVEL"),
    _setting(str, "log_format", "text, or json: one object per line.", LOG, "FORMAT"),
    _setting(bool, "log_client", "Show clients' addresses in the access log.", LOG),
)

SERVE = dict(_OPTIONS)
"""Types of the options of `serve` by parameter name, in the order of the help."""

_DOCTOR = (
    *("revision", "offline", "max_running", "context", "memory", "kv_bits", "threads", "kernels"),
    *("draft", "spec_prefill", "spec_prefill_min", "chat_template"),
)
DOCTOR = {name: SERVE[name] for name in ("model", "config", *_DOCTOR)}
"""Types of those that `doctor` has too."""


def takes(options: Mapping[str, Any], *, before: int = 0) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command that collects `**given` the signature that typer reads: its own parameters and these `options`,
    all None by default. The first `before` options come before its own parameters."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.kind is not p.VAR_KEYWORD]
        keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD
        added = [inspect.Parameter(name, keyword, default=None, annotation=kind) for name, kind in options.items()]
        parameters = [*added[:before], *own, *added[before:]]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return decorate


def settings_from(given: Mapping[str, Any]) -> Settings:
    """Build settings from the options that were given, over those of the file that `config` names. Raises
    ConfigError."""
    values = {name: value for name, value in given.items() if value not in (None, []) and name != "config"}
    if given["config"] is not None:
        return Settings.from_file(given["config"], values, spelling=FLAGS)
    return Settings.from_mapping(values, source="the command line", spelling=FLAGS)
