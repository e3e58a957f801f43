"""A prompt that takes long: its client may leave, and nobody waits for the rest of it (B3, B6, A2)."""

from __future__ import annotations

import json
import socket
from urllib.parse import urlsplit

import pytest

from tests.serve.conftest import Start, Tiny
from tests.serve.server import Serve, until

LONG = 100_000
CHUNK = 16


@pytest.fixture(scope="module")
def server(start_shared: Start, tiny: Tiny) -> Serve:
    """One slot and one place to wait for it, whenever it comes free: a long prompt is expected to hold it for long."""
    options = ("--max-running", "1", "--max-waiting", "1", "--max-wait", "60", "--prefill-tokens", str(CHUNK))
    return start_shared(tiny("gemma3"), *options).ready()


def post(server: Serve, **fields: object) -> socket.socket:
    """A request of which nobody has read an answer yet."""
    where = urlsplit(server.url)
    body = json.dumps({"max_tokens": 4, **fields}).encode()
    sock = socket.create_connection((where.hostname, where.port), timeout=60)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {where.netloc}\r\nContent-Length: {len(body)}\r\n\r\n"
    sock.sendall(head.encode() + body)
    return sock


def prefilled(server: Serve) -> int:
    """Prompt tokens of the one request that runs; 0 while there is none."""
    requests = server.status()["requests"]
    return int(requests[0]["prompt_tokens_done"]) if requests else 0


def computed(server: Serve) -> int:
    """Prompt tokens computed since the start."""
    statistics = server.status()["engine"]["statistics"]
    return 0 if statistics is None else int(statistics["prompt_tokens"])


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_during_prefill_frees_its_slot(server: Serve, stream: bool) -> None:
    """B3: at most one chunk later; what it had not computed by then is never computed."""
    before = computed(server)
    with post(server, prompt="x" * LONG, stream=stream):
        until("prefill", lambda: prefilled(server) >= 4 * CHUNK)
        (request,) = server.status()["requests"]
        assert request["prompt_tokens"] == LONG
        assert request["completion_tokens"] == 0
    server.idle()
    assert computed(server) - before < LONG // 4
    assert server.status()["admission"]["running"] == 0
    assert server.complete().status_code == 200


def test_health_and_refusals_answer_while_a_long_prompt_is_computed(server: Serve) -> None:
    """A2: and cancelling the one that waits does not touch the one that runs."""
    with post(server, prompt="x" * LONG):
        until("prefill", lambda: prefilled(server) >= CHUNK)
        assert server.is_ready()
        with post(server, prompt="y"):
            until("one waits", lambda: server.status()["admission"]["waiting"] == 1)
            refused = server.complete()
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "text_generation_busy")
        until("nobody waits", lambda: server.status()["admission"]["waiting"] == 0)
        done = prefilled(server)
        until("the prefill goes on", lambda: prefilled(server) > done)
    server.idle()
