"""What a real server writes: each line in the form that was asked for, also from the engine's process."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from typing import Any

from tests.serve.conftest import Start, Tiny
from tests.serve.server import Serve, until

OFFSET = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}"
STORM = 40
JSON = ("--log-format", "json", "--log-client")


def lines(server: Serve) -> list[dict[str, Any]]:
    """Everything it wrote to standard error; not one line is of another form."""
    return [json.loads(line) for line in server.said.splitlines()]


def ready(server: Serve) -> str:
    """The URL that it tells of in JSON; the server is ready."""

    def told() -> dict[str, Any] | None:
        whole = server.said.rpartition("\n")[0]
        return next((line for line in map(json.loads, whole.splitlines()) if line["message"] == "ready"), None)

    line: dict[str, Any] = until("ready", told, 60.0)
    return str(line["url"])


def test_everything_is_json_from_listening_to_the_end(start: Start, tiny: Tiny) -> None:
    """The engine's own lines too: it is told to say everything."""
    server = start(tiny("gemma3"), *JSON, "--log-level", "debug", env={"TZ": "Asia/Kolkata"})
    url = ready(server)
    assert server.http.post(f"{url}/v1/completions", json={"prompt": "hello", "max_tokens": 3}).status_code == 200
    server.process.send_signal(signal.SIGTERM)
    assert server.stopped() == 0
    said = lines(server)
    assert all(re.fullmatch(OFFSET + r"\+05:30", line["time"]) for line in said)
    messages = [line["message"] for line in said if line["logger"] == "treadle.serve"]
    assert [messages[0], *messages[-4:]] == ["listening", "ready", "access", "draining", "stopped"]
    (access,) = [line for line in said if line["logger"] == "treadle.access" and line["method"] == "POST"]
    assert (access["status"], access["completion_tokens"]) == (200, 3)
    assert re.fullmatch(r"127\.0\.0\.1:\d+", access["client"])


def test_no_line_holds_a_prompt(start: Start, tiny: Tiny) -> None:
    """Also where it was refused, or parsed elsewhere, and at the level that says most."""
    server = start(tiny("gemma3"), "--log-level", "debug", "--context", "512")
    server.ready()
    mark = "zebracrossing"
    chat = {"messages": [{"role": "user", "content": mark}], "max_tokens": 2}
    bodies = [{"prompt": mark}, {"prompt": mark, mark: 1, "max_tokens": mark}, {"prompt": [mark] * 3000}]
    found = [server.http.post(f"{server.url}/v1/completions", json=body).status_code for body in bodies]
    found += [server.complete(mark * 100, max_tokens=2).status_code]
    assert found[1:] == [400, 400, 400]
    assert server.http.post(f"{server.url}/v1/chat/completions", json=chat).status_code in (200, 400)
    server.process.send_signal(signal.SIGTERM)
    assert server.stopped() == 0
    assert "path=/v1/completions status=400" in server.said
    assert mark not in server.said


def test_a_failed_start_is_a_line_of_json(start: Start, tiny: Tiny) -> None:
    """C1. It is the engine's process that finds it out."""
    server = start(tiny("gemma3"), *JSON, "--memory", "9999TiB")
    assert server.stopped(60) == 1
    *_, last = lines(server)
    assert (last["level"], last["code"]) == ("error", "start_failed")
    assert "--memory is 9999.0 TiB, and " in last["message"]


def test_a_port_that_is_taken_is_a_line_of_json(start: Start, tiny: Tiny) -> None:
    """gRPC's C core would write a line of its own form."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = start(tiny("gemma3"), *JSON, "--grpc-port", str(port))
        assert server.stopped(60) == 2
    (line,) = lines(server)
    assert (line["code"], "--grpc-port" in line["message"]) == ("config_error", True)


def test_an_engine_that_dies_is_told_in_json(start: Start, tiny: Tiny) -> None:
    server = start(tiny("gemma3"), *JSON)
    ready(server)
    os.kill(server.child(), signal.SIGKILL)
    until("a restart", lambda: "restart 1" in server.said)
    (line,) = [line for line in lines(server) if line["level"] == "warning"]
    assert line["logger"] == "treadle.engine.supervisor"
    assert "killed by SIGKILL" in line["message"]


def test_a_storm_of_refusals_is_two_lines_and_metrics_have_them_all(start: Start, tiny: Tiny) -> None:
    """D1, D3. What has been counted is told at the end, too."""
    server = start(tiny("gemma3"), "--max-running", "1", "--max-wait", "0", env={"TZ": "UTC"}).ready()
    with server.stream() as stream:
        assert {server.complete().status_code for _ in range(STORM)} == {503}
        metrics = server.get("/metrics").text
        assert f'treadle_refused_total{{reason="queue_full"}} {STORM}.0' in metrics
        assert server.status()["admission"]["refused"] == {"queue_full": STORM}
        stream.next()
    server.process.send_signal(signal.SIGTERM)
    assert server.stopped() == 0
    refusals = [line for line in server.said.splitlines() if "status=503" in line]
    assert len(refusals) == 2
    assert re.match(OFFSET + "Z info treadle.access request ", refusals[0])
    assert f" treadle.access refused status=503 error=text_generation_busy refused={STORM - 1} in_s=" in refusals[1]
    assert "client=" not in server.said
