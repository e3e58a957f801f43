"""Servers under test: commands, processes that die or never answer, and what is found out about a server."""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import fake_openai
from tests.support.aio import in_loop
from tests.support.fake_openai import FakeServer, fake_server
from treadle.bench.client import Client, HttpResponse
from treadle.bench.errors import BenchError
from treadle.bench.servers import Process, Target, counters, program_name, split_environment, started, with_port

FAKE = f"{shlex.quote(sys.executable)} {shlex.quote(fake_openai.__file__)}"


def target_of(server: FakeServer) -> Target:
    return Target("fake", Client(server.url), "chat")


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(
    ("command", "port"), [("serve --port 81", 81), ("serve --port=82 x", 82), ("serve --grpc-port 5 --port 83", 83)]
)
def test_a_port_in_the_command_is_taken_from_it(command: str, port: int) -> None:
    assert with_port(command) == (command, port)


def test_a_free_port_is_filled_in_or_added() -> None:
    command, port = with_port("serve -p {port} --url x:{port}")
    assert command == f"serve -p {port} --url x:{port}"
    command, port = with_port("serve model")
    assert command == f"serve model --port {port}"
    command, port = with_port("serve --grpc-port 5")
    assert command == f"serve --grpc-port 5 --port {port}"


def test_words_before_the_program_are_its_environment() -> None:
    assert split_environment(["A=1", "B=x=y", "run", "C=2"]) == ({"A": "1", "B": "x=y"}, ["run", "C=2"])
    for empty in ([], ["A=1"]):
        with pytest.raises(BenchError, match="empty"):
            split_environment(empty)


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("/opt/bin/mlx_lm.server --model x", "mlx_lm.server"),
        ("A=1 python -m mlx_lm.server", "mlx_lm.server"),
        ("/venv/bin/python3.11 -u -m treadle serve", "treadle"),
        ("python serve.py", "python"),
    ],
)
def test_a_server_is_called_by_its_program(command: str, name: str) -> None:
    assert program_name(command) == name


@in_loop
async def test_a_started_server_is_awaited_and_ends_with_the_run(tmp_path: Path) -> None:
    """F11"""
    pid_file = tmp_path / "pid"
    async with started(f"{FAKE} --pid-file {pid_file}") as process:
        assert process is not None
        target = Target("fake", Client(f"http://127.0.0.1:{process.port}"), "chat", process=process)
        await target.get_ready(60, None)
        assert target.info.model == "fake"
        assert is_running(int(pid_file.read_text()))
    assert not is_running(int(pid_file.read_text()))


@in_loop
async def test_a_server_ends_also_when_its_run_is_cancelled(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    up = asyncio.Event()

    async def whole() -> None:
        async with started(f"{FAKE} --pid-file {pid_file}") as process:
            assert process is not None
            await Target("fake", Client(f"127.0.0.1:{process.port}"), "chat", process=process).get_ready(60, None)
            up.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(whole())
    await up.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not is_running(int(pid_file.read_text()))


@in_loop
async def test_a_command_that_dies_is_told_with_its_last_words() -> None:
    async with started(f"{FAKE} --die 'no such model'") as process:
        assert process is not None
        target = Target("fake", Client(f"127.0.0.1:{process.port}"), "chat", process=process)
        with pytest.raises(BenchError, match="ended with exit code 1: no such model"):
            await target.get_ready(60, None)


@in_loop
async def test_a_command_that_never_listens_is_given_up() -> None:
    async with started(f"{FAKE} --deaf") as process:
        assert process is not None
        target = Target("fake", Client(f"127.0.0.1:{process.port}"), "chat", process=process)
        with pytest.raises(BenchError, match=r"fake was not ready after 0\.3 s: it said nothing"):
            await target.get_ready(0.3, None)


@pytest.mark.parametrize("command", ["no-such-program-anywhere", "/etc/hostname"])
def test_a_program_that_can_t_be_started_is_named(command: str) -> None:
    with pytest.raises(BenchError, match="can't be started"):
        Process(command)


def test_a_command_with_an_open_quote_is_told() -> None:
    with pytest.raises(BenchError, match="No closing quotation"):
        Process("serve 'model")


@in_loop
async def test_nobody_at_a_url_is_told_at_once() -> None:
    with fake_server() as server:
        url = server.url
    with pytest.raises(BenchError, match="nothing answers at http://127"):
        await Target("fake", Client(url), "chat").get_ready(60, None)


@in_loop
async def test_the_first_model_is_taken_unless_one_is_named() -> None:
    with fake_server(models=("a", "b")) as server:
        target = target_of(server)
        await target.get_ready(60, None)
        assert target.info.model == "a"
        await target.get_ready(60, "b")
        assert target.info.model == "b"
        assert target.control == ["/v1/models"]
        assert target.info.version == "Fake 1.2"
        assert target.info.compute == ""


@in_loop
async def test_a_server_that_says_how_it_computes_is_noted() -> None:
    with fake_server(models=("a",), status={"compute": {"summary": "paged, fused"}}) as server:
        target = target_of(server)
        await target.get_ready(60, None)
        assert target.info.compute == "paged, fused"


@in_loop
async def test_a_model_that_is_not_served_is_told_with_those_that_are() -> None:
    says = r"does not answer for model 'c' \(it lists a, b\): 404 model_not_found"
    with fake_server(models=("a", "b")) as server, pytest.raises(BenchError, match=says):
        await target_of(server).get_ready(60, "c")


@in_loop
async def test_a_server_without_a_list_needs_a_name() -> None:
    with fake_server(models=()) as server:
        with pytest.raises(BenchError, match="lists no model at /v1/models: name it with --model"):
            await target_of(server).get_ready(60, None)
        await target_of(server).get_ready(60, "anything")


@pytest.mark.parametrize("body", [b'{"data":5}', b'{"data":[5,{"no":1},{"id":5}]}', b"[1]", b"\xff"])
@in_loop
async def test_an_answer_that_is_no_list_of_models_is_one_without_names(
    body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_server() as server:
        target = target_of(server)

        async def answer(path: str) -> HttpResponse:
            return HttpResponse(200, body, 0.0)

        monkeypatch.setattr(target.client, "get", answer)
        with pytest.raises(BenchError, match="lists no model at /v1/models: name it with --model"):
            await target.get_ready(60, None)


@in_loop
async def test_a_field_that_a_server_does_not_know_is_left_out() -> None:
    with fake_server(strict=True) as server:
        target = target_of(server)
        await target.get_ready(60, None)
        assert (target.extra, server.asked[-1]["max_tokens"]) == ({}, 2)
    with fake_server() as server:
        target = target_of(server)
        await target.get_ready(60, None)
        assert target.extra == {"ignore_eos": True}


@in_loop
async def test_a_server_that_is_still_loading_is_awaited() -> None:
    with fake_server(busy=2) as server:
        await target_of(server).get_ready(60, None)
        assert len(server.asked) == 3


@in_loop
async def test_a_server_whose_answers_break_off_is_not_ready() -> None:
    says = r"does not answer for model 'fake' .*: broke off"
    with fake_server(breaks=True) as server, pytest.raises(BenchError, match=says):
        await target_of(server).get_ready(60, None)


STATUS: dict[str, Any] = {
    "admission": {"rows": 2},
    "engine": {"restarts": 1, "statistics": {"prompt_tokens": 30, "completion_tokens": 4}},
}


@in_loop
async def test_counters_are_those_of_a_treadle_server_and_none_of_others() -> None:
    with fake_server(status=STATUS) as server:
        assert await target_of(server).status() == {
            "rows": 2.0,
            "restarts": 1.0,
            "prompt_tokens": 30.0,
            "completion_tokens": 4.0,
            "draft rows": 0.0,
            "draft drafted": 0.0,
            "draft accepted": 0.0,
            "sparse scored_tokens": 0.0,
            "sparse kept_tokens": 0.0,
        }
    with fake_server() as server:
        assert await target_of(server).status() is None
    assert counters({"status": "ok"}) is None
    assert counters({"engine": {"statistics": None}}) is None
