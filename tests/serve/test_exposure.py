"""Servers that are opened to the network on purpose, and one that is not."""

from __future__ import annotations

import re

import httpx

from tests.serve.conftest import Start, Tiny
from tests.serve.server import until
from treadle.network_exposure import _routed_addresses


def test_a_server_without_a_key_does_not_open_to_the_network_unasked(start: Start, tiny: Tiny) -> None:
    """D23: nothing has listened, and the one line names both cures."""
    server = start(tiny("gemma3"), "--host", "0.0.0.0", env={"TREADLE_API_KEY": ""})
    assert server.stopped() == 2
    (line,) = server.said.splitlines()
    assert line.startswith("treadle: error: --host 0.0.0.0 opens the server to the network without a key")
    assert "TREADLE_API_KEY" in line
    assert "--no-auth" in line


def test_an_open_server_says_where_it_is_and_that_anyone_may_come_in(start: Start, tiny: Tiny) -> None:
    """S2 holds there too; an allowed page's stream is for it to read."""
    page = "http://localhost:3000"
    options = ("--host", "0.0.0.0", "--no-auth", "--grpc-port", "0", "--grpc-no-auth")
    server = start(tiny("gemma3"), *options, "--allowed-host", "mybox.lan", "--cors-origin", page).ready()
    banner = until("the banner", lambda: server.said.partition("Ready after")[2].partition("Try:")[0])
    for line in (
        "HTTP: anyone who reaches these addresses: no key is asked for (--no-auth)",
        "gRPC: anyone who reaches these addresses: no key is asked for (--grpc-no-auth)",
        "names: addresses, localhost, host.containers.internal, host.docker.internal, mybox.lan",
        f"pages: of {page}",
    ):
        assert line in banner
    port = server.url.rpartition(":")[2]
    for address in [text for text in _routed_addresses() if ":" not in text]:
        assert f"http://{address}:{port}" in banner
        assert server.http.get(f"http://{address}:{port}/health/live").status_code == 200
    assert re.search(r"gRPC +grpc://127\.0\.0\.1:\d+", banner)
    for host, status in (("mybox.lan", 200), ("evil.example", 403), ("evilhost", 403)):
        assert server.http.get(f"{server.url}/v1/models", headers={"host": host}).status_code == status
    asked = {"origin": page, "access-control-request-method": "POST"}
    assert httpx.options(f"{server.url}/v1/completions", headers=asked, trust_env=False).status_code == 204
    body = {"prompt": "hello", "max_tokens": 4, "stream": True}
    answer = server.http.post(f"{server.url}/v1/completions", json=body, headers={"origin": page})
    assert answer.headers["access-control-allow-origin"] == page
    assert answer.text.endswith("data: [DONE]\n\n")
