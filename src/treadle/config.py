"""Settings of a server or an engine: one frozen object, built once at the edge and passed down. The CLI, the TOML file
and `treadle.Engine` use the same names."""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, field
from pathlib import Path
from typing import Any

from .errors import ConfigError, spelled
from .host_names import ANY, address_of, bindable, host_of, is_pattern, nearest_origin, origin_of
from .regular_files import read_regular

GRPC_WIRES = ("mlx", "vllm", "both")
GRPC_OPTIONS = ("grpc_host", "grpc_cert", "grpc_key", "grpc_client_ca", "grpc_auth", "grpc_no_auth")
STRINGS = "tuple[str, ...]"  # the annotation of a setting that may be given several times
KERNELS = ("auto", "require", "off")
STRUCTURED = ("auto", "off")
SPECULATE = ("auto", "off", "lookup", "draft", "mtp")
KV_BITS = (8, 4)
LOG_FORMATS = ("text", "json")
LOG_LEVELS = ("debug", "info", "warning", "error", "critical")
KINDS = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "text", "Path": "a path"}
SIZES = ("memory", "max_body_bytes", "response_store")  # bytes, or text such as 8GiB
LEAST_MEMORY = 1 << 20  # a smaller number is a size without its unit
LEAST_SPARSE = 512
MAX_INTEGER = 2**63 - 1
MAX_KEY_CHARS = 512
MAX_FILE_BYTES = 1 << 20
API_KEY = re.compile(f"[!-~]{{1,{MAX_KEY_CHARS}}}")  # visible ASCII, the characters that a header can carry
SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,9})?) ?(?:([kmgt])(i?b)?|b)?", re.IGNORECASE | re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Every setting with its default. Seconds end in `_s` here and are plain numbers in files and flags.

    `max_waiting` None permits a queue of `max_running` sequences, each of which must expect a slot within `max_wait_s`;
    `max_tokens` None leaves the rest of the context; `max_body_bytes` None follows from the context; `context` None is
    the model's own; `threads` None is measured. `memory` is the byte budget of keys and values, of running sequences
    and of cached prefixes together; None takes all that the device leaves, or a share of it. Cached prefixes use the
    part of it that running sequences leave, unless `prefix_cache` is off. `kv_bits` 8 stores keys and values quantized,
    on CUDA; 4 is refused with the reason. `kernels` "auto" uses each custom kernel that passes its self-test, "require"
    fails the start where one does not or the KV backend is not the device's best, and "off" uses operations of MLX and
    mlx-lm only. `structured` "auto" loads the model's vocabulary for grammars, and "off" refuses requests that need it.
    `speculate` "auto" drafts tokens by look-up and by the model's MTP head, if it has one, where the KV backend can
    verify them; "lookup" and "mtp" fail the start where that one can't be; and "off" drafts none. `draft` is a second
    model, or an EAGLE-3 head, named like `model`, that drafts tokens: with "auto" beside look-up, with "draft" alone.
    `spec_prefill` is a small model, named alike, that scores prompts of `spec_prefill_min` tokens or more: of those the
    share `spec_prefill_keep` is prefilled. `grpc_port` None serves no gRPC; `grpc_host` None is `host`; certificate and
    key turn TLS on, and with `grpc_client_ca` only clients with a certificate of that authority may connect.

    `api_key` is one key for everything; `api_keys` a file of hashed keys with scopes and limits. `grpc_auth` asks every
    gRPC client for a key, also those of this machine and those with a certificate.

    `alias` holds further names of the model for clients, as NAME or as NAME=MODEL with any of its other names.
    `tool_parser` and `reasoning_parser` name the formats of the model's tool calls and of its reasoning; "auto" takes
    them from its template, and the reasoning "none" leaves it in the text. `require_model` refuses HTTP requests that
    name no model.

    `image_hosts` holds the host names from which images are fetched by URL; without any, images come in requests.
    `allowed_host` and `cors_origin` hold the host names the server answers to and the web origins whose pages may call
    it. `no_auth` and `grpc_no_auth` permit addresses beyond loopback without authentication.
    """

    model: str = "demo"
    revision: str | None = None
    offline: bool = False
    chat_template: Path | None = None
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    served_model_name: str | None = None
    alias: tuple[str, ...] = ()
    require_model: bool = False

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = field(default=None, repr=False)
    api_keys: Path | None = None
    no_auth: bool = False
    allowed_host: tuple[str, ...] = ()
    cors_origin: tuple[str, ...] = ()
    image_hosts: tuple[str, ...] = ()
    max_body_bytes: int | None = None
    response_store: int = 256 << 20
    stall_s: float = 30.0
    keepalive_s: float = 5.0
    drain_s: float = 30.0
    log_level: str = "info"
    log_format: str = "text"
    log_client: bool = False

    grpc_port: int | None = None
    grpc_host: str | None = None
    grpc_wire: str = "both"
    grpc_cert: Path | None = None
    grpc_key: Path | None = None
    grpc_client_ca: Path | None = None
    grpc_auth: bool = False
    grpc_no_auth: bool = False

    max_running: int = 16
    max_waiting: int | None = None
    max_wait_s: float = 4.0
    prefill_tokens: int = 2048
    max_tokens: int | None = None
    context: int | None = None
    memory: int | None = None
    prefix_cache: bool = True
    kv_bits: int | None = None
    threads: int | None = None
    kernels: str = "auto"
    structured: str = "auto"
    speculate: str = "auto"
    draft: str | None = None
    spec_prefill: str | None = None
    spec_prefill_keep: float = 0.2
    spec_prefill_min: int = 8192

    in_process: bool = False
    hang_after_s: float = 30.0
    start_timeout_s: float = 1800.0

    spelling: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)
    """The user's spelling of each setting, for messages: `--max-wait`, or `max-wait in FILE`. Not a setting itself."""

    def __post_init__(self) -> None:
        for name in ("host", "grpc_host"):
            if (given := getattr(self, name)) is not None:
                object.__setattr__(self, name, bindable(given))
        for name, given in {**vars(self)}.items():
            if isinstance(given, Path):  # ~ in a file, or in a service's environment, has been through no shell
                object.__setattr__(self, name, Path(os.path.expanduser(given)))
        with spelled(self.spelling):
            self._check()

    def _check(self) -> None:
        _positive(self, "max_running", "prefill_tokens")
        _positive(self, "stall_s", "keepalive_s", "hang_after_s", "start_timeout_s")
        _positive_or_none(self, "max_tokens", "context", "memory", "threads", "max_body_bytes")
        _not_negative(self, "max_wait_s", "drain_s", "response_store")
        if self.memory is not None and self.memory < LEAST_MEMORY:
            raise ConfigError(f"`memory` is {self.memory} bytes: {_memory_cure(self.memory)}", param="memory")
        if self.max_waiting is not None:
            _not_negative(self, "max_waiting")
        for name in ("port", "grpc_port"):
            port = getattr(self, name)
            if port is not None and not 0 <= port <= 65535:
                raise ConfigError(f"`{name}` must be 0 to 65535, not {port}", param=name)
        if self.kv_bits is not None and self.kv_bits not in KV_BITS:
            raise ConfigError(f"`kv_bits` is {self.kv_bits}: give 8, or leave it out", param="kv_bits")
        _one_of("kernels", self.kernels, KERNELS)
        _one_of("structured", self.structured, STRUCTURED)
        _one_of("speculate", self.speculate, SPECULATE)
        _one_of("log_level", self.log_level.lower(), LOG_LEVELS)
        _one_of("log_format", self.log_format, LOG_FORMATS)
        _check_draft(self)
        _check_spec_prefill(self)
        _check_grpc(self)
        _check_names(self)
        if not self.model:
            raise ConfigError("`model` is empty: give a folder, a hub id or 'demo'", param="model")
        if self.api_key is not None:
            check_api_key(self.api_key)

    @property
    def has_keys(self) -> bool:
        """Whether clients need an API key."""
        return self.api_key is not None or self.api_keys is not None

    @property
    def waiting_places(self) -> int:
        """Sequences that may wait: 0 if `max_wait_s` is 0, else `max_waiting`, by default `max_running`."""
        if self.max_wait_s == 0:
            return 0
        return self.max_running if self.max_waiting is None else self.max_waiting

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the settings' names, as files spell them."""
        return tuple(cls.fields())

    @classmethod
    def fields(cls) -> dict[str, Field[Any]]:
        """Return the settings' fields, by the names that files use."""
        return {_without_unit(field.name): field for field in dataclasses.fields(cls) if field.name != "spelling"}

    @classmethod
    def from_mapping(
        cls, values: Mapping[str, Any], *, source: str = "settings", spelling: Mapping[str, str] | None = None
    ) -> Settings:
        """Build settings from plain values. `source` names their origin in messages; `spelling` maps names of settings
        to what the user wrote. Raises ConfigError for unknown names, with the nearest known one, and for wrong
        types."""
        fields = cls.fields()
        known: dict[str, Any] = {}
        names = dict(spelling or {})
        _check_known(values, fields, source)
        for name, value in values.items():
            key = _key(name)
            with spelled(names):
                known[fields[key].name] = _convert(key, str(fields[key].type), value)
        return cls(**known, spelling=names)

    @classmethod
    def from_file(
        cls, path: Path, overrides: Mapping[str, Any] | None = None, *, spelling: Mapping[str, str] | None = None
    ) -> Settings:
        """Build settings from a TOML file, with `overrides` (flags) on top. `spelling` maps the names of settings that
        are not in the file to what the user wrote. Raises ConfigError."""
        try:
            values = tomllib.loads(read_regular(path, MAX_FILE_BYTES).decode("utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(f"can't read the settings file {path}: {reason}") from error
        except (ValueError, RecursionError) as error:  # ValueError: a number of thousands of digits
            raise ConfigError(f"{path} is not valid TOML: {error}") from error
        _check_known(values, cls.fields(), str(path))
        given = {_key(name): value for name, value in (overrides or {}).items()}
        keys = {_key(name): name for name in values}
        names = dict(spelling or {}) | {name: f"{k} in {path}" for name, k in keys.items() if name not in given}
        merged = {name: values[k] for name, k in keys.items()} | given
        return cls.from_mapping(merged, source=str(path), spelling=names)


def check_api_key(key: str) -> None:
    """Raise ConfigError for a key that clients cannot send in a header."""
    if not key.strip():
        raise ConfigError("`api_key` is empty: leave it out to serve without one", param="api_key")
    if API_KEY.fullmatch(key) is None:
        raise ConfigError(
            f"`api_key` must be 1 to {MAX_KEY_CHARS} visible ASCII characters without spaces, as clients send it in a "
            "header: make one with openssl rand -hex 24",
            param="api_key",
        )


def _memory_cure(given: int) -> str:
    return f"did you mean {given}GiB?" if given < 1024 else "give 1MiB or more, such as 8GiB"


def _check_draft(settings: Settings) -> None:
    if settings.draft is None:
        if settings.speculate == "draft":
            raise ConfigError("`speculate` is draft, and no `draft` model is given: give both", param="speculate")
    elif not settings.draft:
        raise ConfigError("`draft` is empty: give a folder or a hub id, or leave it out", param="draft")
    elif settings.speculate in ("off", "lookup", "mtp"):
        raise ConfigError(
            f"`draft` does nothing with `speculate` {settings.speculate}: give auto or draft, or leave `draft` out",
            param="draft",
        )


def _check_spec_prefill(settings: Settings) -> None:
    own = {field.name: field.default for field in dataclasses.fields(settings)}
    for name in ("spec_prefill_keep", "spec_prefill_min"):
        if settings.spec_prefill is None and getattr(settings, name) != own[name]:
            raise ConfigError(f"`{name}` does nothing without `spec_prefill`: give both", param=name)
    if settings.spec_prefill == "":
        raise ConfigError("`spec_prefill` is empty: give a folder or a hub id, or leave it out", param="spec_prefill")
    if not 0 < settings.spec_prefill_keep <= 1:
        raise ConfigError(
            f"`spec_prefill_keep` must be above 0 and at most 1, not {settings.spec_prefill_keep:g}: it is the share "
            "of a prompt's tokens that is prefilled, such as 0.2",
            param="spec_prefill_keep",
        )
    if settings.spec_prefill_min < LEAST_SPARSE:
        raise ConfigError(
            f"`spec_prefill_min` must be {LEAST_SPARSE} or more, not {settings.spec_prefill_min}: of shorter prompts "
            "all would be kept",
            param="spec_prefill_min",
        )


def _check_grpc(settings: Settings) -> None:
    _one_of("grpc_wire", settings.grpc_wire, GRPC_WIRES)
    given = {name for name in GRPC_OPTIONS if getattr(settings, name) not in (None, False)}
    for name in sorted(given | ({"grpc_wire"} if settings.grpc_wire != "both" else set())):
        if settings.grpc_port is None:
            raise ConfigError(f"`{name}` does nothing without `grpc_port`: give both", param=name)
    if (settings.grpc_cert is None) != (settings.grpc_key is None):
        raise ConfigError("`grpc_cert` and `grpc_key` belong together: give both", param="grpc_cert")
    if settings.grpc_client_ca is not None and settings.grpc_cert is None:
        raise ConfigError("`grpc_client_ca` needs `grpc_cert` and `grpc_key`: give all three", param="grpc_client_ca")


def _check_known(given: Iterable[str], known: Iterable[str], source: str) -> None:
    """Raise ConfigError for an unknown name, with the nearest known one."""
    known = list(known)
    for name in given:
        if _key(name) not in known:
            near = difflib.get_close_matches(_key(name), known, n=1)
            near = [near[0].replace("_", "-")] if near and "-" in name else near
            hint = f"; did you mean '{near[0]}'?" if near else f"; known: {', '.join(known)}"
            raise ConfigError(f"unknown setting '{name}' in {source}{hint}", param=name)


def _key(name: str) -> str:
    """Return the setting's name, from a name with dashes or with its unit."""
    return _without_unit(name.replace("-", "_"))


def _check_names(settings: Settings) -> None:
    for alias in settings.alias:
        name, equals, model = alias.partition("=")
        if not name.strip() or (equals and not model.strip()):
            raise ConfigError(f"`alias` '{alias}' is not complete: give NAME, or NAME=MODEL", param="alias")
    for name in settings.allowed_host:
        if name != ANY and not is_pattern(name.lower()):
            raise ConfigError(f"`allowed_host` '{name}' {_name_cure(name)}", param="allowed_host")
    for name in settings.image_hosts:
        if name != ANY and not is_pattern(name.lower()):
            message = f"`image_hosts` '{name}' is no host name: give one such as images.example.com or *.example.com"
            raise ConfigError(message, param="image_hosts")
    for origin in settings.cors_origin:
        if origin != ANY and origin_of(origin) is None:
            raise ConfigError(f"`cors_origin` '{origin}' {_origin_cure(origin)}", param="cors_origin")
    for setting in ("allowed_host", "cors_origin", "image_hosts"):
        values = getattr(settings, setting)
        if ANY in values and len(values) > 1:
            raise ConfigError(f"`{setting}` '*' covers all others: leave either it or them out", param=setting)


def _name_cure(name: str) -> str:
    host = host_of(name.partition("://")[2].partition("/")[0] or name)
    if host is not None and address_of(host) is not None:
        return "is an address: addresses are always answered, leave it out"
    meant = f": give {host}" if host is not None and is_pattern(host) else ", such as mybox.local or *.example.lan"
    return f"is no host name{meant}"


def _origin_cure(origin: str) -> str:
    if origin == "null":
        return "is the origin of any site's sandboxed frames: serve the page over http and give its own origin"
    meant = nearest_origin(origin)
    return "is no origin: give " + ("scheme://host[:port], such as http://localhost:3000" if meant is None else meant)


def _without_unit(name: str) -> str:
    return name.removesuffix("_s")


def _convert(name: str, annotation: str, value: Any) -> Any:
    """Convert `value` to the setting's type: ints pass for floats, strings for paths, one string for a list of them.
    Raises ConfigError for every other difference."""
    if annotation == STRINGS:
        return _strings(name, value)
    kinds = {part.strip() for part in annotation.split("|")}
    if value is None and "None" in kinds:
        return None
    if name in SIZES and isinstance(value, str):
        return _bounded(name, _bytes(name, value))
    if isinstance(value, bool):
        fits = "bool" in kinds
    elif isinstance(value, int):
        fits = bool(kinds & {"int", "float"})
        value = _bounded(name, value)
        value = float(value) if fits and "int" not in kinds else value
    elif isinstance(value, float):
        fits = "float" in kinds and math.isfinite(value)
    elif isinstance(value, (str, Path)):
        fits = bool(kinds & {"str", "Path"})
        value = Path(value) if "Path" in kinds else value
    else:
        fits = False
    if not fits:
        expected = " or ".join(KINDS[kind] for kind in sorted(kinds - {"None"}))
        raise ConfigError(f"`{name}` must be {expected}, not {value!r}", param=name)
    return value


def _bounded(name: str, value: int) -> int:
    """Return `value`. Raises ConfigError for one that the engine's process could not be sent."""
    if abs(value) > MAX_INTEGER:
        raise ConfigError(f"`{name}` is out of range: give {MAX_INTEGER} at most", param=name)
    return value


def _strings(name: str, value: Any) -> tuple[str, ...]:
    """Convert to a list of strings, without repetitions. One string is a list too; commas separate further items, as in
    environment variables."""
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, (list, tuple)) or not all(isinstance(item, str) for item in values):
        raise ConfigError(f"`{name}` must be a list of texts, not {value!r}", param=name)
    items = (item.strip() for text in values for item in text.split(","))
    return tuple(dict.fromkeys(item for item in items if item))


def _bytes(name: str, text: str) -> int:
    """Parse a size: `8GiB` and `8G` are multiples of 1024, `8GB` of 1000. Raises ConfigError."""
    match = SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(
            f"`{name}` is not a size: '{text[:40]}'; give bytes, or a number with a unit such as 512MiB or 8GiB",
            param=name,
        )
    number, prefix, suffix = match.groups()
    if prefix is None:
        unit = 1
    else:
        unit = (1000 if (suffix or "").lower() == "b" else 1024) ** ("kmgt".index(prefix.lower()) + 1)
    return int(float(number) * unit) if "." in number else int(number) * unit


def _one_of(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ConfigError(f"`{name}` must be one of {', '.join(known)}, not '{value[:40]}'", param=name)


def _positive(settings: Settings, *names: str) -> None:
    for name in names:
        if not getattr(settings, name) > 0:
            raise _out_of_range(settings, name, "must be above 0, not")


def _positive_or_none(settings: Settings, *names: str) -> None:
    for name in names:
        if getattr(settings, name) is not None:
            _positive(settings, name)


def _not_negative(settings: Settings, *names: str) -> None:
    for name in names:
        if not getattr(settings, name) >= 0:
            raise _out_of_range(settings, name, "must not be negative:")


def _out_of_range(settings: Settings, name: str, rule: str) -> ConfigError:
    value = getattr(settings, name)
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return ConfigError(f"`{_without_unit(name)}` {rule} {text}", param=_without_unit(name))
