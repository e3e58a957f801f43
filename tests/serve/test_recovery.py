"""R3: the engine's process may die or hang at any moment; every client is answered and the server serves again."""

from __future__ import annotations

import os
import re
import shutil
import signal
from pathlib import Path

import pytest

from tests.serve.conftest import Start, Tiny
from tests.serve.server import Serve, gone, until


@pytest.fixture(scope="module")
def server(start_shared: Start, tiny: Tiny) -> Serve:
    return start_shared(tiny("gemma3"), "--hang-after", "2").ready()


def serves_again(server: Serve, old: int, restarts: int) -> None:
    """Ready, with another process, and the work done as ever."""
    until("ready again", server.is_ready)
    engine = server.status()["engine"]
    assert engine["state"] == "ready"
    assert engine["pid"] != old
    assert engine["restarts"] == restarts + 1
    assert gone(old)
    answer = server.complete(max_tokens=20)
    assert answer.status_code == 200
    assert len(answer.json()["choices"][0]["token_ids"]) == 20
    server.idle()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT])
def test_a_child_that_is_killed_mid_stream(server: Serve, number: signal.Signals) -> None:
    """The streams get one error event each and end; ready says so until another child is ready."""
    old, restarts = server.child(), server.status()["engine"]["restarts"]
    with server.stream("one") as one, server.stream("two") as two:
        os.kill(old, number)
        for stream in (one.rest(), two.rest()):
            assert [error["code"] for error in stream.errors] == ["engine_died"]
            assert number.name in stream.errors[0]["message"]
            assert not stream.done
    away = server.get("/health/ready")
    assert (away.status_code, away.json()["state"]) == (503, "restarting")
    assert server.get("/health/live").status_code == 200
    assert server.status()["engine"]["state"] == "restarting"
    refused = server.complete()
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "engine_unavailable"
    assert int(refused.headers["retry-after"]) >= 1
    serves_again(server, old, restarts)


def test_a_child_that_hangs_is_replaced(server: Serve) -> None:
    """C4: no step while work waits."""
    old, restarts = server.child(), server.status()["engine"]["restarts"]
    with server.stream() as stream:
        os.kill(old, signal.SIGSTOP)
        until("not ready", lambda: not server.is_ready())
        stream.rest()
        assert [error["code"] for error in stream.errors] == ["engine_died"]
        assert "hung" in stream.errors[0]["message"]
        assert not stream.done
    serves_again(server, old, restarts)


def test_a_child_that_dies_idle_is_replaced(server: Serve) -> None:
    old, restarts = server.child(), server.status()["engine"]["restarts"]
    os.kill(old, signal.SIGKILL)
    until("not ready", lambda: not server.is_ready())
    serves_again(server, old, restarts)


def test_no_child_outlives_a_server_that_was_killed(start: Start, tiny: Tiny) -> None:
    """Also while it works: the end of the socket is its end."""
    server = start(tiny("gemma3")).ready()
    server.child()
    with server.stream():
        server.process.kill()
        server.childless()


def test_a_child_that_cannot_start_again_is_the_end(start: Start, tiny: Tiny, tmp_path: Path) -> None:
    """Three failed starts in a row: not ready all the while, then one line and a non-zero exit."""
    folder = shutil.copytree(tiny("gemma3"), tmp_path / "going")
    server = start(folder).ready()
    pid = server.child()
    (folder / "model.safetensors").write_bytes(b"torn")
    os.kill(pid, signal.SIGKILL)
    until("not ready", lambda: not server.is_ready())
    assert server.never_ready()
    assert server.stopped() not in (0, None)
    server.childless()
    (line,) = re.findall(r"^treadle: error: .*$", server.said, re.M)
    assert "the engine has failed" in line
    assert "Traceback" not in server.said
