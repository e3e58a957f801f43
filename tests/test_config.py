"""Settings: one frozen object; what is unknown or wrong raises and says what to do."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from treadle.config import Settings
from treadle.errors import ConfigError

DEFAULTS: dict[str, Any] = {
    "model": "demo",
    "revision": None,
    "offline": False,
    "chat_template": None,
    "tool_parser": "auto",
    "reasoning_parser": "auto",
    "served_model_name": None,
    "alias": (),
    "require_model": False,
    "host": "127.0.0.1",
    "port": 8000,
    "api_key": None,
    "api_keys": None,
    "no_auth": False,
    "allowed_host": (),
    "cors_origin": (),
    "image_hosts": (),
    "max_body_bytes": None,
    "response_store": 256 * 2**20,
    "stall": 30.0,
    "keepalive": 5.0,
    "drain": 30.0,
    "log_level": "info",
    "log_format": "text",
    "log_client": False,
    "grpc_port": None,
    "grpc_host": None,
    "grpc_wire": "both",
    "grpc_cert": None,
    "grpc_key": None,
    "grpc_client_ca": None,
    "grpc_auth": False,
    "grpc_no_auth": False,
    "max_running": 16,
    "max_waiting": None,
    "max_wait": 4.0,
    "prefill_tokens": 2048,
    "max_tokens": None,
    "context": None,
    "memory": None,
    "prefix_cache": True,
    "kv_bits": None,
    "threads": None,
    "kernels": "auto",
    "structured": "auto",
    "speculate": "auto",
    "draft": None,
    "spec_prefill": None,
    "spec_prefill_keep": 0.2,
    "spec_prefill_min": 8192,
    "in_process": False,
    "hang_after": 30.0,
    "start_timeout": 1800.0,
}
OTHERS: dict[str, Any] = {
    "model": "org/name",
    "revision": "main",
    "offline": True,
    "chat_template": "chat.jinja",
    "tool_parser": "hermes",
    "reasoning_parser": "none",
    "served_model_name": "mine",
    "alias": ("claude-mine", "other=mine"),
    "require_model": True,
    "host": "::",
    "port": 0,
    "api_key": "secret",
    "api_keys": "keys.toml",
    "no_auth": True,
    "allowed_host": ("mybox.local", "*.example.lan"),
    "cors_origin": ("http://localhost:3000",),
    "image_hosts": ("images.example.com", "*.example.org"),
    "max_body_bytes": 1,
    "response_store": 0,
    "stall": 1.5,
    "keepalive": 2,
    "drain": 0,
    "log_level": "debug",
    "log_format": "json",
    "log_client": True,
    "grpc_port": 0,
    "grpc_host": "::1",
    "grpc_wire": "mlx",
    "grpc_cert": "cert.pem",
    "grpc_key": "key.pem",
    "grpc_client_ca": "ca.pem",
    "grpc_auth": True,
    "grpc_no_auth": True,
    "max_running": 1,
    "max_waiting": 0,
    "max_wait": 0,
    "prefill_tokens": 1,
    "max_tokens": 7,
    "context": 128,
    "memory": 10**9,
    "prefix_cache": False,
    "kv_bits": 4,
    "kernels": "require",
    "structured": "off",
    "speculate": "draft",
    "draft": "small",
    "spec_prefill": "smaller",
    "spec_prefill_keep": 1,
    "spec_prefill_min": 512,
    "threads": 2,
    "in_process": True,
    "hang_after": 0.5,
    "start_timeout": 10,
}


def values(settings: Settings) -> dict[str, Any]:
    return {name: getattr(settings, field.name) for name, field in Settings.fields().items()}


def wrong(match: str, **mapping: Any) -> ConfigError:
    with pytest.raises(ConfigError, match=match) as raised:
        Settings.from_mapping(mapping)
    return raised.value


def test_every_default() -> None:
    assert values(Settings()) == DEFAULTS
    assert Settings.names() == tuple(DEFAULTS)


def test_every_setting_can_be_set() -> None:
    paths = ("chat_template", "api_keys", "grpc_cert", "grpc_key", "grpc_client_ca")
    expected = OTHERS | {name: Path(OTHERS[name]) for name in paths}
    assert values(Settings.from_mapping(OTHERS)) == expected


def test_settings_are_frozen_and_take_names_only() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().port = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        Settings("demo")  # type: ignore[call-arg]


# Names


def test_names_come_with_dashes_with_underscores_and_with_their_unit() -> None:
    for name in ("max-wait", "max_wait", "max_wait_s", "max-wait-s"):
        assert Settings.from_mapping({name: 1.0}).max_wait_s == 1.0


@pytest.mark.parametrize(
    ("name", "near"), [("max-runing", "max-running"), ("prt", "port"), ("hang_after_x", "hang_after")]
)
def test_an_unknown_name_gets_the_nearest_known_one(name: str, near: str) -> None:
    error = wrong(f"unknown setting '{name}' in settings; did you mean '{near}'", **{name: 1})
    assert error.param == name


def test_a_name_like_no_other_gets_all_known_ones() -> None:
    error = wrong("unknown setting 'zzzz' in settings; known: model, revision, ", zzzz=1)
    assert all(name in error.message for name in DEFAULTS)


# Types and ranges


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("port", "8000", "a whole number"),
        ("port", 80.0, "a whole number"),
        ("port", True, "a whole number"),
        ("port", None, "a whole number"),
        ("offline", 1, "true or false"),
        ("offline", "yes", "true or false"),
        ("max_wait", "4", "a number"),
        ("max_wait", float("nan"), "a number"),
        ("max_wait", float("inf"), "a number"),
        ("max_wait", False, "a number"),
        ("model", 5, "text"),
        ("model", ["demo"], "text"),
        ("chat_template", 5, "a path"),
        ("threads", "two", "a whole number"),
        ("prefix_cache", "on", "true or false"),
        ("prefix_cache", 1, "true or false"),
        ("kv_bits", True, "a whole number"),
        ("kv_bits", 8.0, "a whole number"),
        ("memory", 1e9, "a whole number"),
        ("allowed_host", 5, "a list of texts"),
        ("allowed_host", ["a", 5], "a list of texts"),
        ("cors_origin", None, "a list of texts"),
    ],
)
def test_a_wrong_type_is_named_with_the_right_one(name: str, value: Any, wanted: str) -> None:
    error = wrong(re.escape(f"{name} must be {wanted}, not {value!r}"), **{name: value})
    assert error.param == name


def test_none_is_a_value_where_a_setting_may_be_left_open() -> None:
    settings = Settings.from_mapping({"max_waiting": None, "api-key": None, "threads": None})
    assert (settings.max_waiting, settings.api_key, settings.threads) == (None, None, None)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("max_running", 0, "max_running must be above 0, not 0"),
        ("prefill_tokens", -1, "prefill_tokens must be above 0"),
        ("max_body_bytes", 0, "max_body_bytes must be above 0"),
        ("stall", 0, "stall must be above 0"),
        ("keepalive", -0.5, "keepalive must be above 0"),
        ("hang_after", 0, "hang_after must be above 0"),
        ("start_timeout", 0, "start_timeout must be above 0"),
        ("max_tokens", 0, "max_tokens must be above 0"),
        ("context", -5, "context must be above 0"),
        ("context", 10**20, "context is out of range: give 9223372036854775807 at most"),
        ("threads", -(10**20), "threads is out of range"),
        ("stall", 10**400, "stall is out of range"),
        ("memory", "999999999999T", "memory is out of range"),
        ("memory", 0, "memory must be above 0"),
        ("threads", 0, "threads must be above 0"),
        ("memory", "0GiB", "memory must be above 0"),
        ("kernels", "on", "kernels must be one of auto, require, off, not 'on'"),
        ("structured", "on", "structured must be one of auto, off, not 'on'"),
        ("speculate", "always", "speculate must be one of auto, off, lookup, draft, mtp, not 'always'"),
        ("speculate", "draft", "speculate is draft, and no draft model is given: give both"),
        ("draft", "", "draft is empty: give a folder or a hub id, or leave it out"),
        ("spec_prefill", "", "spec_prefill is empty: give a folder or a hub id, or leave it out"),
        ("spec_prefill_keep", 0.5, "spec_prefill_keep does nothing without spec_prefill: give both"),
        ("spec_prefill_min", 900, "spec_prefill_min does nothing without spec_prefill: give both"),
        ("kv_bits", 6, "kv_bits is 6: give 8, or leave it out"),
        ("kv_bits", 16, "kv_bits is 16: give 8"),
        ("kv_bits", 0, "kv_bits is 0: give 8"),
        ("max_wait", -1, "max_wait must not be negative: -1"),
        ("drain", -1, "drain must not be negative"),
        ("max_waiting", -1, "max_waiting must not be negative"),
        ("port", 65536, "port must be 0 to 65535, not 65536"),
        ("port", -1, "port must be 0 to 65535, not -1"),
        ("model", "", "model is empty: give a folder, a hub id or 'demo'"),
        ("api_key", " ", "api_key is empty: leave it out"),
        ("api_key", "schlüssel", "api_key must be 1 to 512 visible ASCII characters"),
        ("api_key", "two words", "without spaces"),
        ("api_key", "k" * 513, "1 to 512"),
        ("api_key", "k\n", "visible ASCII"),
        ("log_level", "loud", "log_level must be one of debug, info, warning, error, critical, not 'loud'"),
        ("log_format", "xml", "log_format must be one of text, json, not 'xml'"),
    ],
)
def test_what_is_out_of_range_is_refused_by_name(name: str, value: Any, message: str) -> None:
    assert wrong(re.escape(message), **{name: value}).param == name


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("spec_prefill_keep", 0, "spec_prefill_keep must be above 0 and at most 1, not 0: it is the share"),
        ("spec_prefill_keep", 1.5, "spec_prefill_keep must be above 0 and at most 1, not 1.5"),
        ("spec_prefill_keep", -0.2, "spec_prefill_keep must be above 0 and at most 1, not -0.2"),
        (
            "spec_prefill_min",
            511,
            "spec_prefill_min must be 512 or more, not 511: of shorter prompts all would be kept",
        ),
    ],
)
def test_shares_and_lengths_that_make_no_sense_are_refused(name: str, value: float, message: str) -> None:
    assert wrong(message, spec_prefill="small", **{name: value}).param == name


@pytest.mark.parametrize("speculate", ["off", "lookup", "mtp"])
def test_a_draft_model_that_would_not_be_used_is_refused(speculate: str) -> None:
    error = wrong(f"draft does nothing with speculate {speculate}: give auto", draft="small", speculate=speculate)
    assert error.param == "draft"
    assert Settings(draft="small").speculate == "auto"


def test_not_a_number_is_refused_also_where_no_file_is_read() -> None:
    with pytest.raises(ConfigError, match="max_wait must not be negative: nan"):
        Settings(max_wait_s=float("nan"))
    with pytest.raises(ConfigError, match="stall must be above 0, not nan"):
        Settings(stall_s=float("nan"))


# Sizes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4194304", 4 << 20),
        ("2097152B", 2 << 20),
        ("8GiB", 8 * 2**30),
        ("8 GiB", 8 * 2**30),
        ("8g", 8 * 2**30),
        ("1.5MiB", 3 * 2**19),
        ("2TB", 2 * 10**12),
        ("10000kb", 10_000_000),
    ],
)
def test_a_size_may_have_a_unit(text: str, size: int, tmp_path: Path) -> None:
    assert Settings.from_mapping({"memory": text}).memory == size
    assert Settings.from_mapping({"max-body-bytes": text}).max_body_bytes == size
    file = tmp_path / "treadle.toml"
    file.write_text(f'memory = "{text}"\n', encoding="utf-8")
    assert Settings.from_file(file).memory == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "8 apples", "-1GiB", "8GiBs", "1e9", "8,5GiB", "0x10", "\u0668GiB", "9" * 40]
)
def test_what_is_no_size_is_refused_with_one_that_is(text: str) -> None:
    assert wrong("memory is not a size: .*8GiB", memory=text).param == "memory"


# Lists


@pytest.mark.parametrize("value", [["a.lan", "b.lan"], ("a.lan", "b.lan"), "a.lan,b.lan", " a.lan , b.lan,a.lan,"])
def test_a_list_may_be_one_string_with_commas(value: Any) -> None:
    assert Settings.from_mapping({"allowed-host": value}).allowed_host == ("a.lan", "b.lan")


def test_a_file_has_lists_and_flags_replace_them(tmp_path: Path) -> None:
    file = tmp_path / "treadle.toml"
    file.write_text('allowed-host = ["a.lan", "b.lan"]\ncors-origin = "http://x:1"\n', encoding="utf-8")
    settings = Settings.from_file(file)
    assert (settings.allowed_host, settings.cors_origin) == (("a.lan", "b.lan"), ("http://x:1",))
    assert Settings.from_file(file, {"allowed_host": ["c.lan"]}).allowed_host == ("c.lan",)


@pytest.mark.parametrize(
    "name", ["mybox", "mybox.local", "MyBox.Local", "*.example.lan", "my_service", "a-1.b", "xn--bcher-kva.lan", "*"]
)
def test_names_that_a_server_may_answer_to(name: str) -> None:
    assert Settings(allowed_host=(name,)).allowed_host == (name,)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mybox.local:8000", "allowed_host 'mybox.local:8000' is no host name: give mybox.local"),
        ("http://mybox.local:8000/v1", "is no host name: give mybox.local"),
        ("mybox.local.", "is no host name: give mybox.local"),
        ("192.168.1.5", "is an address: addresses are always answered, leave it out"),
        ("[::1]:80", "is an address"),
        ("*.", "is no host name, such as mybox.local or *.example.lan"),
        ("**", "is no host name"),
        ("a.*.lan", "is no host name"),
        ("my box", "is no host name"),
        ("b\u00fccher.lan", "is no host name"),
        ("", "is no host name"),
        ("a" * 64, "is no host name"),
        (".".join(["a" * 60] * 5), "is no host name"),
    ],
)
def test_what_is_no_host_name_is_refused_with_the_one_that_was_meant(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as raised:
        Settings(allowed_host=("good.lan", name))
    assert raised.value.param == "allowed_host"


@pytest.mark.parametrize(
    "origin",
    ["http://localhost:3000", "https://chat.example.org", "http://[::1]:3000", "app://obsidian.md", "HTTP://A:80", "*"],
)
def test_origins_that_may_be_allowed(origin: str) -> None:
    assert Settings(cors_origin=(origin,)).cors_origin == (origin,)


@pytest.mark.parametrize(
    ("origin", "message"),
    [
        ("http://localhost:3000/", "cors_origin 'http://localhost:3000/' is no origin: give http://localhost:3000"),
        ("https://a.example/app?x=1", "is no origin: give https://a.example"),
        ("localhost:3000", "is no origin: give http://localhost:3000"),
        ("http://me@a.example", "is no origin: give http://a.example"),
        ("http://*.example", "is no origin: give scheme://host[:port]"),
        ("http://[bad", "is no origin: give scheme://host[:port]"),
        ("", "is no origin: give scheme://host[:port]"),
        ("null", "is the origin of any site's sandboxed frames"),
    ],
)
def test_what_is_no_origin_is_refused_with_the_one_that_was_meant(origin: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as raised:
        Settings(cors_origin=(origin,))
    assert raised.value.param == "cors_origin"


@pytest.mark.parametrize(
    ("field", "other"), [("allowed_host", "a.lan"), ("cors_origin", "http://a.lan"), ("image_hosts", "a.example")]
)
def test_a_name_beside_the_star_would_do_nothing(field: str, other: str) -> None:
    error = wrong(re.escape(f"{field} '*' covers all others"), **{field: ["*", other]})
    assert error.param == field


# Waiting places


@pytest.mark.parametrize(
    ("mapping", "places"),
    [
        ({}, 16),
        ({"max_running": 1}, 1),
        ({"max_waiting": 3}, 3),
        ({"max_waiting": 0}, 0),
        ({"max_wait": 0}, 0),
        ({"max_wait": 0, "max_waiting": 9}, 0),
    ],
)
def test_as_many_may_wait_as_run_and_none_where_none_may(mapping: dict[str, Any], places: int) -> None:
    """D2, D4"""
    assert Settings.from_mapping(mapping).waiting_places == places


# Files


def test_a_file_with_flags_on_top(tmp_path: Path) -> None:
    file = tmp_path / "treadle.toml"
    file.write_text('model = "org/name"\nmax-wait = 2\nport = 9000\n', encoding="utf-8")
    settings = Settings.from_file(file, {"port": 9001, "hang_after_s": 5.0})
    assert (settings.model, settings.max_wait_s, settings.port, settings.hang_after_s) == ("org/name", 2.0, 9001, 5.0)
    assert Settings.from_file(file).port == 9000


def test_a_file_that_might_not_end_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b"#" * ((1 << 20) + 1))
    (tmp_path / "deep").write_text("a = " + "[" * 100_000, encoding="utf-8")
    for path, says in (
        (tmp_path / "pipe", "it is not a regular file"),
        (Path("/dev/zero"), "it is not a regular file"),
        (tmp_path, "Is a directory"),
        (tmp_path / "large", "it has more than 1048576 bytes"),
        (tmp_path / "deep", "is not valid TOML"),
    ):
        with pytest.raises(ConfigError, match=f"{path}:? {says}"):
            Settings.from_file(path)


def test_a_flag_overrides_the_file_however_it_is_spelt(tmp_path: Path) -> None:
    file = tmp_path / "treadle.toml"
    file.write_text("max-wait-s = 2\n", encoding="utf-8")
    assert Settings.from_file(file, {"max_wait": 1.0}).max_wait_s == 1.0
    assert Settings.from_file(file, {"max-wait": 0.5}).max_wait_s == 0.5


def test_a_file_that_names_an_unknown_setting_is_named(tmp_path: Path) -> None:
    file = tmp_path / "treadle.toml"
    file.write_text("prot = 1\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"unknown setting 'prot' in .*treadle\.toml; did you mean 'port'"):
        Settings.from_file(file)


def test_a_setting_at_fault_is_named_as_its_user_wrote_it(tmp_path: Path) -> None:
    """A flag where it was given as one, the file's own key with the file where it stands there, else the keyword."""
    file = tmp_path / "treadle.toml"
    file.write_text("max-wait = -1\n", encoding="utf-8")
    flags = {"max_wait": "--max-wait", "stall": "--stall", "memory": "--memory"}

    def says(make: Callable[[], object]) -> str:
        with pytest.raises(ConfigError) as raised:
            make()
        assert str(raised.value) == raised.value.message
        return raised.value.message

    wrong_wait = "must not be negative: -1"
    assert says(lambda: Settings(max_wait_s=-1.0)) == f"max_wait {wrong_wait}"
    assert says(lambda: Settings.from_mapping({"max_wait": -1})) == f"max_wait {wrong_wait}"
    assert says(lambda: Settings.from_mapping({"max_wait": -1}, spelling=flags)) == f"--max-wait {wrong_wait}"
    assert says(lambda: Settings.from_file(file, spelling=flags)) == f"max-wait in {file} {wrong_wait}"
    assert says(lambda: Settings.from_file(file, {"max_wait": -1}, spelling=flags)) == f"--max-wait {wrong_wait}"
    assert says(lambda: Settings.from_file(file, {"memory": "8Q"}, spelling=flags)).startswith("--memory is not a size")
    file.write_text('stall = "x"\n', encoding="utf-8")
    assert says(lambda: Settings.from_file(file, spelling=flags)) == f"stall in {file} must be a number, not 'x'"


def test_both_settings_of_a_pair_are_named_each_in_its_own_way(tmp_path: Path) -> None:
    file = tmp_path / "treadle.toml"
    file.write_text('grpc-cert = "c.pem"\ngrpc-port = 1\n', encoding="utf-8")
    with pytest.raises(ConfigError) as raised:
        Settings.from_file(file, spelling={"grpc_key": "--grpc-key"})
    assert raised.value.message == f"grpc-cert in {file} and --grpc-key belong together: give both"


def test_settings_are_equal_however_they_were_written() -> None:
    assert Settings.from_mapping({"port": 1}, spelling={"port": "--port"}) == Settings(port=1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"port =", "is not valid TOML"),
        (b"port = " + b"1" * 5000, "is not valid TOML"),
        (b"\xff\xfe", "can't read the settings file"),
    ],
)
def test_a_file_that_is_not_toml(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "treadle.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        Settings.from_file(file)


def test_the_home_folder_may_be_a_tilde_in_a_file_and_in_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No shell reads either of them."""
    monkeypatch.setenv("HOME", "/home/me")
    file = tmp_path / "treadle.toml"
    file.write_text('api-keys = "~/keys.toml"\nchat-template = "~nobody-here/t.jinja"\n')
    settings = Settings.from_file(
        file, {"grpc_cert": Path("~/cert.pem"), "grpc_key": Path("~/key.pem"), "grpc_port": 0}
    )
    assert (settings.api_keys, settings.grpc_cert) == (Path("/home/me/keys.toml"), Path("/home/me/cert.pem"))
    assert settings.chat_template == Path("~nobody-here/t.jinja")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"can't read the settings file .*none\.toml: No such file or directory$"):
        Settings.from_file(tmp_path / "none.toml")


def test_addresses_to_listen_on_are_kept_in_full_and_without_brackets() -> None:
    settings = Settings(host="[::1]", grpc_host="127.1", grpc_port=0)
    assert (settings.host, settings.grpc_host) == ("::1", "127.0.0.1")


@pytest.mark.parametrize("name", ["http://a.example", "a.example:443", "127.0.0.1", "a b", ""])
def test_a_host_of_images_is_a_name(name: str) -> None:
    with pytest.raises(ConfigError, match="image_hosts") as raised:
        Settings(image_hosts=("good.example", name))
    assert raised.value.param == "image_hosts"
