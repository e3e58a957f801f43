"""R3: the engine's process may die or hang at any moment; every client is answered and the server serves again."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from urllib.parse import urlsplit

import pytest

from tests.serve.conftest import Start, Tiny
from tests.serve.server import Serve, gone, until


@pytest.fixture(scope="module")
def server(start_shared: Start, tiny: Tiny) -> Serve:
    return start_shared(tiny("gemma3"), "--hang-after", "2").ready()


def serves_again(server: Serve, old: int, restarts: int) -> None:
    """Ready, with another process, and the work done as ever."""
    until("ready again", server.is_ready, every_s=0.1)  # each death here adds to the back-off
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
    """The streams pause and end as if nothing had been; ready says so until another child is ready."""
    calm = [server.complete(prompt, max_tokens=TOKENS).json()["choices"][0]["token_ids"] for prompt in PROMPTS]
    old, restarts = server.child(), server.status()["engine"]["restarts"]
    at_work = Barrier(len(PROMPTS) + 1)
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        readers = [pool.submit(tokens_of, server, prompt, at_work) for prompt in PROMPTS]
        at_work.wait(60.0)
        os.kill(old, number)
        until("restarting", lambda: server.state() == "restarting")
        assert not server.is_ready()
        assert server.get("/health/live").status_code == 200
        refused = server.complete()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_unavailable")
        wait_s = int(refused.headers["retry-after"])
        began = time.monotonic()
        until("ready again", server.is_ready)
        assert wait_s >= 1
        assert time.monotonic() - began < 4 * wait_s + 1, "it says about when to come again"
        assert [reader.result() for reader in readers] == calm
    serves_again(server, old, restarts)
    assert server.status()["engine"]["quarantined"] == 0


TOKENS = 200
PROMPTS = [[7, 8, 9, i] for i in range(4)]


def tokens_of(server: Serve, prompt: list[int], at_work: Barrier) -> list[int]:
    with server.stream(prompt, max_tokens=TOKENS) as stream:
        stream.next()
        at_work.wait(60.0)
        stream.rest()
        assert stream.errors == []
        assert stream.done
        return stream.tokens


def test_a_child_that_hangs_is_replaced(server: Serve) -> None:
    """C4: no step while work waits; what ran goes on."""
    old, restarts = server.child(), server.status()["engine"]["restarts"]
    with server.stream(max_tokens=2000) as stream:
        os.kill(old, signal.SIGSTOP)
        until("not ready", lambda: not server.is_ready())
        stream.rest()
        assert stream.errors == []
        assert stream.done
    serves_again(server, old, restarts)


def test_an_idle_child_that_hangs_is_replaced(server: Serve) -> None:
    """D21, R3: within the bound, though nobody asks it for anything."""
    old, restarts = server.child(), server.status()["engine"]["restarts"]
    os.kill(old, signal.SIGSTOP)
    until("not ready", lambda: not server.is_ready(), within_s=8.0)
    serves_again(server, old, restarts)


POISON = 77


def test_a_poison_is_refused_after_two_deaths_and_streams_beside_it_go_on(start: Start, tiny: Tiny) -> None:
    """D4: one client that sends it again and again."""
    poison = json.dumps({"token": POISON})
    server = start(tiny("llama"), module="tests.support.poison", env={"TREADLE_TEST_POISON": poison}).ready()
    calm = server.complete([7, 8, 9], max_tokens=TOKENS).json()["choices"][0]["token_ids"]
    with server.stream([7, 8, 9], max_tokens=TOKENS) as stream:
        first = server.complete([5, POISON, 6])
        stream.rest()
        assert (stream.errors, stream.done) == ([], True)
    assert first.status_code == 422
    assert first.json()["error"]["code"] == "request_quarantined"
    assert first.headers["x-should-retry"] == "false"
    assert stream.tokens == calm
    until("ready again", server.is_ready, every_s=0.1)
    pid = server.child()
    for _ in range(5):
        assert server.complete([5, POISON, 6]).status_code == 422
    assert server.child() == pid
    status = server.status()
    assert status["engine"]["deaths"] == {"crash": 2, "hang": 0, "killed": 0}
    assert status["admission"]["refused"] == {"request_quarantined": 5}
    metrics = server.get("/metrics").text
    assert 'treadle_engine_deaths_total{cause="crash"} 2.0' in metrics
    assert "treadle_quarantined_total 1.0" in metrics
    server.idle()


def test_a_poison_in_mid_stream_ends_that_stream_with_its_error(start: Start, tiny: Tiny) -> None:
    poison = json.dumps({"token": POISON, "at": 30, "how": "SIGSEGV"})
    server = start(tiny("llama"), module="tests.support.poison", env={"TREADLE_TEST_POISON": poison}).ready()
    with server.stream([5, POISON, 6], max_tokens=200) as stream:
        stream.rest()
        assert [error["code"] for error in stream.errors] == ["request_quarantined"]
    server.idle()


@pytest.mark.parametrize("how", ["hang", "SIGABRT"])
def test_a_poisoner_that_hangs_up_is_found_all_the_same(start: Start, tiny: Tiny, how: str) -> None:
    """D4: its client leaves in the deadly step, or right after the engine's death, and sends it again and again."""
    poison = json.dumps({"token": POISON, "how": how})
    options = ("--hang-after", "1")
    env = {"TREADLE_TEST_POISON": poison}
    server = start(tiny("llama"), *options, module="tests.support.poison", env=env).ready()
    with server.stream([7, 8, 9], max_tokens=TOKENS * 4) as stream:
        hang_up(server, [5, POISON, 6])
        until("two deaths", lambda: server.status()["engine"]["deaths_explained"] == 2)
        stream.rest()
        assert (stream.errors, stream.done) == ([], True)
    until("ready again", server.is_ready, every_s=0.1)
    pid = server.child()
    for _ in range(3):
        answer = server.complete([5, POISON, 6])
        assert answer.status_code == 422, answer.text
    assert server.child() == pid
    status = server.status()["engine"]
    assert (sum(status["deaths"].values()), status["quarantined"]) == (2, 1)
    server.idle()


def hang_up(server: Serve, prompt: list[int]) -> None:
    """Send a request and close its connection once it has taken the engine down, or keeps it in a step."""
    deaths, until_s = server.status()["engine"]["deaths"], time.monotonic() + 0.5
    parts = urlsplit(server.url)
    body = json.dumps({"prompt": prompt, "max_tokens": 4, "temperature": 0}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection((parts.hostname or "", parts.port or 0)) as client:
        client.sendall(head.encode() + body)
        until(
            "in the deadly step",
            lambda: server.status()["engine"]["deaths"] != deaths or time.monotonic() > until_s,
        )


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
