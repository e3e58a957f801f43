"""The files in deploy/: they parse, use options that exist, and give a drain the time that it takes."""

from __future__ import annotations

import configparser
import json
import plistlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from treadle.cli.app import app
from treadle.compose.server import STOP_GRACE_S
from treadle.config import Settings
from treadle.fronts.size_limits import MOST_BODY_BYTES

DEPLOY = Path(__file__).parent.parent / "deploy"
LEAST_STOP_S = Settings().drain_s + STOP_GRACE_S
PLIST_KEYS = {  # launchd.plist(5)
    "Label": str,
    "ProgramArguments": list,
    "WorkingDirectory": str,
    "EnvironmentVariables": dict,
    "RunAtLoad": bool,
    "KeepAlive": dict,
    "ThrottleInterval": int,
    "ExitTimeOut": int,
    "ProcessType": str,
    "SoftResourceLimits": dict,
    "HardResourceLimits": dict,
    "StandardOutPath": str,
    "StandardErrorPath": str,
}


def text(name: str) -> str:
    return (DEPLOY / name).read_text(encoding="utf-8")


def parse_serve(words: list[str]) -> Mapping[str, Any]:
    """The parameters of a `treadle serve` command line. Raises what the command line would end with."""
    assert words[:1] == ["serve"], words
    command = get_command(app).commands["serve"]  # type: ignore[attr-defined]
    return dict(command.make_context("serve", words[1:]).params)


def dockerfile() -> list[tuple[str, str]]:
    """Instructions and their arguments, continued lines joined."""
    joined = re.sub(r"\\\n\s*", " ", re.sub(r"^#.*\n", "", text("Dockerfile"), flags=re.MULTILINE))
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in joined.splitlines() if line)]


def unit(name: str) -> configparser.RawConfigParser:
    parser = configparser.RawConfigParser(strict=False, delimiters=("=",), comment_prefixes=("#",))
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string(text(name))
    return parser


# Containers -----------------------------------------------------------------------------------------------------


def last(instruction: str) -> str:
    return [rest for word, rest in dockerfile() if word == instruction][-1]


def test_the_image_serves_on_all_addresses_with_arguments_after_the_options() -> None:
    entry, command = json.loads(last("ENTRYPOINT")), json.loads(last("CMD"))
    assert entry[0] == "treadle"
    given = parse_serve([*entry[1:], *command])
    assert (given["host"], given["port"], given["model"]) == ("0.0.0.0", 8000, "demo")
    assert parse_serve([*entry[1:], "owner/name", "--max-running", "8"])["model"] == "owner/name"
    assert last("EXPOSE") == str(given["port"])


def test_the_image_runs_as_a_numbered_user_that_owns_its_volume() -> None:
    user = last("USER")
    assert re.fullmatch(r"[1-9]\d+:[1-9]\d+", user)
    assert any(f"useradd --uid {user.split(':')[0]} " in rest for word, rest in dockerfile() if word == "RUN")
    assert last("VOLUME") in last("ENV")


def test_the_image_is_built_from_files_that_are_sent_to_the_builder() -> None:
    allowed = {line[1:] for line in text("Dockerfile.dockerignore").splitlines() if line.startswith("!")}
    copied = {
        word
        for instruction, rest in dockerfile()
        if instruction == "COPY" and not rest.startswith("--")
        for word in rest.replace("${BACKEND}", "*").split()[:-1]
    }
    assert copied == allowed
    assert all(list(DEPLOY.parent.glob(name)) for name in copied)


def test_health_checks_ask_routes_that_exist() -> None:
    compose = yaml.safe_load(text("compose.yaml"))["services"]["treadle"]["healthcheck"]["test"]
    image = last("HEALTHCHECK")
    assert "http://127.0.0.1:8000/health/live" in image
    assert "http://127.0.0.1:8000/health/ready" in compose[-1]
    for code in (json.loads(image[image.index("CMD") + 3 :])[-1], compose[-1]):
        compile(code, "healthcheck", "exec")


def test_compose_files_use_options_that_exist() -> None:
    service = yaml.safe_load(text("compose.yaml"))["services"]["treadle"]
    assert "${TREADLE_MODEL:-demo}" in service["command"]
    parse_serve(["serve", *service["command"]])
    assert seconds(service["stop_grace_period"]) > LEAST_STOP_S
    assert service["environment"]["TREADLE_API_KEY"].startswith("${TREADLE_API_KEY:?")
    cuda = yaml.safe_load(text("compose.cuda.yaml"))["services"]
    assert cuda.keys() == {"treadle"}
    assert cuda["treadle"]["build"]["args"].keys() == service["build"]["args"].keys() == {"BACKEND"}


def seconds(span: str) -> float:
    number, unit_ = re.fullmatch(r"(\d+)(s|m|min|h)?", span).groups()  # type: ignore[union-attr]
    return int(number) * {"s": 1, "m": 60, "min": 60, "h": 3600, None: 1}[unit_]


# Services -------------------------------------------------------------------------------------------------------


def test_the_systemd_unit_starts_a_command_that_exists_and_lets_it_drain() -> None:
    service = unit("treadle.service")["Service"]
    program, *words = service["ExecStart"].split()
    assert program.endswith("/bin/treadle")
    assert parse_serve(words)["config"] == Path("/etc/treadle/treadle.toml")
    assert service["KillMode"] == "mixed"  # the engine's process ends when the server says so
    assert seconds(service["TimeoutStopSec"]) > LEAST_STOP_S
    assert service["RestartPreventExitStatus"] == "2"


def test_the_systemd_unit_s_hardening_is_whole_and_the_cuda_drop_in_undoes_what_hides_devices() -> None:
    service, cuda = unit("treadle.service")["Service"], unit("treadle-cuda.conf")["Service"]
    for name in ("NoNewPrivileges", "ProtectHome", "PrivateTmp", "PrivateDevices", "DynamicUser"):
        assert service[name] == "yes"
    assert (service["ProtectSystem"], service["CapabilityBoundingSet"]) == ("strict", "")
    assert "MemoryDenyWriteExecute" not in service
    assert (cuda["PrivateDevices"], cuda["DevicePolicy"]) == ("no", "closed")


def test_the_launchd_agent_has_known_keys_and_lets_the_server_drain() -> None:
    agent = plistlib.loads(text("treadle.plist").encode())
    assert {key: type(value) for key, value in agent.items()} == PLIST_KEYS
    program, *words = agent["ProgramArguments"]
    assert program == "CHECKOUT/.venv/bin/treadle"
    parse_serve(words)
    assert agent["ExitTimeOut"] > LEAST_STOP_S
    assert agent["KeepAlive"] == {"SuccessfulExit": False}


def test_the_settings_file_has_settings() -> None:
    settings = Settings.from_file(DEPLOY / "treadle.toml")
    assert settings.drain_s == Settings().drain_s
    assert settings.host == "127.0.0.1"


# Proxies --------------------------------------------------------------------------------------------------------


def test_nginx_passes_on_each_token_and_bodies_of_the_size_that_the_server_takes() -> None:
    lines = dict(re.findall(r"^\s*(\w+) ([^;#]+);", text("nginx.conf"), re.MULTILINE))
    assert lines["proxy_buffering"] == "off"
    assert lines["proxy_http_version"] == "1.1"
    assert seconds(lines["proxy_read_timeout"]) >= 600
    assert int(lines["client_max_body_size"].removesuffix("m")) * 2**20 > MOST_BODY_BYTES
    assert "proxy_set_header Host $host;" in text("nginx.conf")


@pytest.mark.parametrize("name", ["nginx.conf", "Caddyfile"])
def test_proxies_keep_operators_routes_to_themselves(name: str) -> None:
    assert "127.0.0.1:8000" in text(name)
    for route in ("metrics", "v1/status", "v1/prefix_cache/reset"):
        assert route in text(name)
