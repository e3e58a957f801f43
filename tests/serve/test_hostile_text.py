"""Hostile prompts and hostile model folders before a real server: they cost their own request, or the start, and
nothing else."""

from __future__ import annotations

import concurrent.futures
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.conftest import Start, Tiny
from tests.serve.server import Serve, until
from tests.support.tiny import make_tiny

LOOPS = """{%- for m in messages -%}{{ m.content }}{%- if m.content.startswith('loop') -%}
{%- for a in m.content -%}{%- for b in m.content -%}{%- for c in m.content -%}{%- endfor -%}{%- endfor -%}{%- endfor -%}
{%- endif -%}{%- endfor -%}"""


def chat(server: Serve, content: str, **more: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4, **more}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60, trust_env=False)


@pytest.fixture
def looping(tmp_path: Path, tiny: Tiny) -> Path:
    """A model whose template loops over the cube of a message's length for messages that begin with "loop"."""
    folder = shutil.copytree(tiny("llama"), tmp_path / "looping")
    (folder / "chat_template.jinja").write_text(LOOPS)
    return folder


def test_renderings_that_never_end_cost_their_own_requests_alone(start: Start, looping: Path) -> None:
    """D8: two of them used to take both threads for good, with ready 200."""
    server = start(looping, "--max-wait", "30").ready()
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        guilty = [threads.submit(chat, server, "loop" + "x" * 20_000) for _ in range(2)]
        innocents = [threads.submit(chat, server, "hello") for _ in range(4)]
        refused = [done.result() for done in guilty]
        assert [done.result().status_code for done in innocents] == [200] * 4
    assert {answer.status_code for answer in refused} == {400}
    assert all("chat template took more than" in answer.json()["error"]["message"] for answer in refused)
    assert chat(server, "hello").status_code == 200
    until("both workers are back", lambda: server.status()["text"]["workers"] == 2)
    text = server.status()["text"]
    assert text["killed"] == {"the model's chat template": 2}
    assert text["restarts"] == 0
    assert 'treadle_text_killed_total{stage="the model\'s chat template"} 2.0' in server.get("/metrics").text
    server.idle()


def test_where_every_worker_is_stuck_waits_are_bounded_and_ready_is_false(start: Start, looping: Path) -> None:
    server = start(looping, "--max-wait", "1").ready()
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        guilty = [threads.submit(chat, server, "loop" + "x" * 100_000) for _ in range(6)]
        until("not ready", lambda: server.state() == "blocked")
        ready = server.get("/health/ready")
        if ready.status_code == 503:  # a worker may have come free meanwhile
            assert "no text worker has been free for" in ready.json()["reason"]
        codes = [done.result().status_code for done in guilty]
    assert set(codes) == {400, 503}
    until("ready again", server.is_ready)
    assert server.status()["admission"]["refused"]["text_busy"] == codes.count(503)
    server.idle()


def test_text_processes_that_are_killed_come_back(start: Start, tiny: Tiny) -> None:
    server = start(tiny("llama")).ready()
    with server.stream() as stream:
        os.kill(server.status()["text"]["pid"], signal.SIGKILL)
        until("a restart", lambda: server.status()["text"]["restarts"] == 1)
        until("ready", server.is_ready)
        assert server.complete().status_code == 200
        stream.next()  # what runs needs no text process
    server.process.send_signal(signal.SIGTERM)
    assert server.stopped() == 0
    server.childless()


def hostile(tmp_path: Path, name: str, text: str) -> Path:
    folder = make_tiny(tmp_path / "hostile")
    (folder / name).unlink(missing_ok=True)
    (folder / name).write_text(text)
    return folder


def test_a_hostile_template_ends_the_start_in_one_line_and_holds_nothing_up(start: Start, tmp_path: Path) -> None:
    """D15: live was dead and SIGTERM ignored. One operation that no signal interrupts is the worst case; tests of the
    worker pool and of hostile folders have other templates."""
    server = start(hostile(tmp_path, "chat_template.jinja", "{{ 10 ** (10 ** 9) }}"))
    assert server.never_ready(90) > 0
    (line,) = re.findall(r"^treadle: error: .*$", server.said, re.M)
    assert "chat template" in line
    assert server.stopped() == 1
    server.childless()


def test_sigterm_is_obeyed_while_a_hostile_template_is_read(start: Start, tmp_path: Path) -> None:
    server = start(hostile(tmp_path, "chat_template.jinja", "{{ 10 ** (10 ** 9) }}"))
    until("it loads", lambda: server.get("/health/live").status_code == 200)
    until("the text processes", lambda: len(server.children()) >= 2)
    server.process.send_signal(signal.SIGTERM)
    assert server.stopped(10) == 0
    server.childless()


def test_a_header_of_more_tensors_than_a_model_has_ends_the_start(start: Start, tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "header")
    names = (b'"t%d":{"dtype":"F32","shape":[],"data_offsets":[0,4]}' % i for i in range(300_001))
    data = b"{" + b",".join(names) + b"}"
    (folder / "model.safetensors").write_bytes(len(data).to_bytes(8, "little") + data + b"\0" * 4)
    server = start(folder)
    assert server.never_ready(90) > 0
    assert server.stopped() == 1
    assert re.findall(r"^treadle: error: .* names 300001 tensors, which no model has: use another$", server.said, re.M)


@pytest.fixture(scope="module")
def server(start_shared: Start, tiny: Tiny) -> Serve:
    return start_shared(tiny("llama")).ready()


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt":[' + b",".join([b"[1]"] * 60_000) + b"]}",
        b'{"prompt":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
        b'{"prompt":"a","metadata":[' + b",".join([b'{"a":1}'] * 400_000) + b'],"max_tokens":1}',
    ],
)
def test_hostile_bodies_are_answered_and_leave_the_server_small(server: Serve, body: bytes) -> None:
    """D10: two threads of the server's own process used to build them, up to 1.4 GB."""
    answer = httpx.post(f"{server.url}/v1/completions", content=body, timeout=60, trust_env=False)
    assert answer.status_code in (200, 400)
    assert server.complete().status_code == 200
