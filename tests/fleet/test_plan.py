"""Command lines of a fleet, and the shares of the host."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from treadle.errors import ConfigError
from treadle.fleet import plan as plans
from treadle.fleet.plan import FleetPlan, Share, gateway_of, missing_gateway, shares, workers_of
from treadle.installation import install_command


def plan(**given: Any) -> FleetPlan:
    usual: dict[str, Any] = {"model": "demo", "replicas": 2, "host": "127.0.0.1", "port": 8000, "policy": "round_robin"}
    return FleetPlan(**(usual | {"logs": Path("logs")} | given))


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "_gpu_count", lambda: 0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 4}, raising=False)


@pytest.mark.usefixtures("cores")
def test_cores_are_shared_out_evenly() -> None:
    assert [share.cores for share in shares(2, True)] == [{0, 2, 4}, {1, 3}]
    assert [share.text for share in shares(2, True)] == ["core 0,2,4", "core 1,3"]
    for replicas, pin in ((1, True), (2, False), (6, True)):
        assert shares(replicas, pin) == [Share()] * replicas
    assert Share().text == "all"


def test_gpus_go_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "_gpu_count", lambda: 2)
    assert [share.text for share in shares(3, True)] == ["GPU 0", "GPU 1", "GPU 0"]
    workers = workers_of(plan(replicas=2))
    assert [worker.member._variables for worker in workers] == [
        {"CUDA_VISIBLE_DEVICES": "0"},
        {"CUDA_VISIBLE_DEVICES": "1"},
    ]


def test_gpus_are_counted_by_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert plans._gpu_count() == 0
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    listed = "GPU 0: H200\nGPU 1: H200\n"
    monkeypatch.setattr(
        subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, stdout=listed, stderr="")
    )
    assert plans._gpu_count() == 2


@pytest.mark.usefixtures("cores")
def test_every_worker_has_ports_of_its_own_and_the_gateway_knows_them() -> None:
    given = plan(worker_options=("--max-running", "8"), gateway_options=("--log-level", "warn"))
    workers = workers_of(given)
    urls = [url for worker in workers for url in (worker.http, worker.grpc)]
    assert len(set(urls)) == 4
    command = workers[0].member._command
    assert command[-2:] == ["--max-running", "8"]
    assert command[3:5] == ["serve", "demo"]
    gateway = gateway_of(given, workers)._command
    assert gateway[-2:] == [worker.grpc for worker in workers]
    assert gateway[gateway.index("--log-level") + 1] == "warn"
    assert gateway[gateway.index("--policy") + 1] == "round_robin"


def test_no_port_is_given_out_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A port that nobody listens on yet, the gateway's own among them, is one that the system may name."""

    class Names(socket.socket):
        def getsockname(self) -> tuple[str, int]:
            return "127.0.0.1", next(named)

    named = iter(range(8000, 8100))
    monkeypatch.setattr(socket, "socket", Names)
    given = plan(port=8001)
    assert given.ports == [8000, 8002, 8003, 8004, 8005]
    command = gateway_of(given, workers_of(given))._command
    assert command[command.index("--prometheus-port") + 1] == "8005"


def test_the_gateway_and_the_workers_share_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stands on no command line."""
    monkeypatch.delenv("TREADLE_API_KEYS", raising=False)
    given = plan(api_key="secret")
    workers = workers_of(given)
    assert [worker.member._variables["TREADLE_API_KEY"] for worker in workers] == ["secret"] * 2
    assert not any("secret" in worker.member._command for worker in workers)
    gateway = gateway_of(given, workers)
    assert gateway._stdin_text == "--api-key\nsecret\n"
    assert not any("secret" in part for part in gateway._command)
    assert gateway._command[1] == str(plans.STDIN_ARGUMENTS)
    assert gateway_of(plan(), workers)._stdin_text is None


@pytest.mark.parametrize(
    ("given", "asks"),
    [
        ({}, False),
        ({"api_key": "k"}, True),
        ({"gateway_options": ("--api-key", "k")}, True),
        ({"gateway_options": ("--tenant-api-key", "a:k")}, True),
        ({"gateway_options": ("--log-level", "warn")}, False),
    ],
)
def test_options_that_make_clients_authenticate(given: dict[str, Any], asks: bool) -> None:
    assert plan(**given).requires_key is asks


def test_without_the_gateway_s_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)
    with pytest.raises(ConfigError, match=f"smg is not installed: {re.escape(install_command('fleet'))}"):
        gateway_of(plan(), [])
    assert (lacking := missing_gateway()) is not None
    assert lacking.extra == "fleet"


def test_the_gateway_is_found_beside_this_interpreter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    smg = tmp_path / "smg"
    smg.write_text("#!/bin/sh\n")
    smg.chmod(0o755)
    monkeypatch.delenv("PATH")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert missing_gateway() is None


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"replicas": 0}, "--replicas 0: give 1 to 64"),
        ({"replicas": 65}, "--replicas 65"),
        ({"policy": "best"}, "--policy best: use one of"),
        ({"port": 99999}, "--port 99999: give 1 to 65535"),
        ({"drain_s": -1.0}, "--drain -1: give 0 or more"),
        ({"policy": "power_of_two", "replicas": 1}, "needs two replicas"),
        ({"api_key": " "}, "--api-key is empty"),
        ({"api_key": "schlüssel"}, "--api-key must be 1 to 512 visible ASCII"),
        ({"worker_options": ("--grpc-auth",)}, "--grpc-auth would keep the gateway out"),
        ({"worker_options": ("--max-running", "8", "--port", "5")}, "--port behind the `--` is not for workers"),
        ({"worker_options": ("--grpc-port=5",)}, "--grpc-port behind the `--` is not for workers"),
        ({"worker_options": ("--host=::",)}, "--host behind the `--` .* or give the gateway's before the `--`"),
        ({"worker_options": ("--drain=5",)}, "--drain behind the `--` .* give it before the `--`"),
        ({"worker_options": ("--api-key=k",)}, "--api-key belongs before the `--`"),
        ({"api_key": "k", "gateway_options": ("--api-key", "k")}, "the gateway has two keys"),
    ],
)
def test_what_can_t_be_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        plan(**given)
