"""C3: the first signal drains with the door open, the second ends now, with a last word to all; no engine is left."""

from __future__ import annotations

import os
import pty
import re
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import httpx
import pytest
from smg_grpc_proto import mlx_engine_pb2, mlx_engine_pb2_grpc, vllm_engine_pb2, vllm_engine_pb2_grpc

from tests.serve.conftest import Start, Tiny
from tests.serve.events import Stream
from tests.serve.gateway import grpc_url
from tests.serve.server import ENDLESS, until

PROMPT_S = 10.0


@contextmanager
def silent_hub() -> Iterator[dict[str, str]]:
    """A hub that takes connections and never answers, as environment."""
    with socket.create_server(("127.0.0.1", 0)) as hub:
        yield {"HF_ENDPOINT": f"http://127.0.0.1:{hub.getsockname()[1]}", "HF_HUB_OFFLINE": "0"}


def test_sigterm_lets_what_runs_end_and_answers_until_then(start: Start, tiny: Tiny) -> None:
    """C3: ready and new work are 503, the running stream ends well, then exit 0."""
    server = start(tiny("gemma3")).ready()
    server.child()
    with server.stream(max_tokens=1000) as stream:
        server.process.send_signal(signal.SIGTERM)
        until("draining", lambda: server.get("/health/ready").status_code == 503)
        assert server.state() == "draining"
        assert server.get("/health/live").status_code == 200
        refused = server.complete()
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "server_stopping"
        assert int(refused.headers["retry-after"]) >= 1
        assert server.process.poll() is None
        stream.rest()
    assert (stream.done, stream.errors, stream.finish_reason) == (True, [], "length")
    assert len(stream.tokens) == 1000
    assert server.stopped(PROMPT_S) == 0
    server.childless()
    assert "Traceback" not in server.said


def told_that_it_stops(waiting: Future[httpx.Response], *streams: Stream) -> None:
    """Each stream ends with one error event and no good end; the request that waited gets a plain 503."""
    for stream in [stream.rest() for stream in streams]:
        assert [error["code"] for error in stream.errors] == ["server_stopping"]
        assert not stream.done
    refused = waiting.result(60)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_stopping")


def test_what_outlasts_the_drain_gets_one_error(start: Start, tiny: Tiny) -> None:
    """C3: streams one event, one that still waits a plain 503, one that does not read nothing; nobody holds it up."""
    server = start(tiny("gemma3"), "--drain", "0.5", "--max-running", "3", "--max-wait", "60").ready()
    server.child()
    with (
        server.stream("one") as one,
        server.stream("two") as two,
        server.stream("deaf"),
        ThreadPoolExecutor(1) as other,
    ):
        waiting = other.submit(server.complete)
        until("one waits", lambda: server.status()["admission"]["waiting"] == 1)
        server.process.send_signal(signal.SIGTERM)
        told_that_it_stops(waiting, one, two)
        assert server.stopped(PROMPT_S) == 0
    server.childless()
    assert "Traceback" not in server.said


def test_an_engine_that_hangs_does_not_hold_up_the_exit(start: Start, tiny: Tiny) -> None:
    server = start(tiny("gemma3"), "--drain", "0").ready()
    pid = server.child()
    with server.stream() as stream:
        os.kill(pid, signal.SIGSTOP)
        server.process.send_signal(signal.SIGTERM)
        assert [error["code"] for error in stream.rest().errors] == ["server_stopping"]
    assert server.stopped(20) == 0
    server.childless()


def test_a_second_signal_ends_streams_with_an_error_and_everyone_has_a_line(start: Start, tiny: Tiny) -> None:
    """C3: streams one event, one that waits a plain 503, one that does not read nothing; and soon."""
    server = start(tiny("gemma3"), "--max-running", "3", "--max-wait", "60").ready()
    server.child()
    with (
        server.stream("one") as one,
        server.stream("two") as two,
        server.stream("deaf"),
        ThreadPoolExecutor(1) as other,
    ):
        waiting = other.submit(server.complete)
        until("one waits", lambda: server.status()["admission"]["waiting"] == 1)
        server.process.send_signal(signal.SIGTERM)
        until("draining", lambda: server.state() == "draining")
        server.process.send_signal(signal.SIGTERM)
        told_that_it_stops(waiting, one, two)
        assert server.stopped(PROMPT_S) == 128 + signal.SIGTERM
    server.childless()
    lines = [line for line in server.said.splitlines() if "path=/v1/completions" in line]
    assert sorted(re.findall(r"status=(\d+)", " ".join(lines))) == ["200", "200", "200", "503"]
    assert all("error=server_stopping" in line for line in lines)
    assert "Traceback" not in server.said


def test_a_second_signal_is_not_held_up_by_an_engine_that_hangs(start: Start, tiny: Tiny) -> None:
    """Nor by a drain that is over and waits for that engine."""
    server = start(tiny("gemma3"), "--drain", "0").ready()
    pid = server.child()
    with server.stream() as stream:
        os.kill(pid, signal.SIGSTOP)
        server.process.send_signal(signal.SIGTERM)
        assert [error["code"] for error in stream.rest().errors] == ["server_stopping"]
        server.process.send_signal(signal.SIGTERM)
        assert server.stopped(PROMPT_S) == 128 + signal.SIGTERM
    server.childless()


def test_a_hangup_drains(start: Start, tiny: Tiny) -> None:
    """As when the terminal it was started from is closed; the engine's process lives on through it."""
    controller, terminal = pty.openpty()
    server = start(tiny("gemma3"), terminal=terminal).ready()
    server.child()
    with server.stream(max_tokens=1000) as stream:
        os.close(terminal)
        os.close(controller)
        until("draining", lambda: server.state() == "draining")
        stream.rest()
    assert (stream.done, stream.errors, len(stream.tokens)) == (True, [], 1000)
    assert server.stopped(PROMPT_S) == 0
    server.childless()
    assert "status=200" in server.said


def test_under_nohup_a_hangup_is_ignored(start: Start, tiny: Tiny) -> None:
    server = start(tiny("gemma3"), prefix=("nohup",)).ready()
    server.child()
    with server.stream(max_tokens=200) as stream:
        server.process.send_signal(signal.SIGHUP)
        assert stream.rest().done
    assert server.is_ready()
    server.process.send_signal(signal.SIGTERM)
    assert server.stopped(PROMPT_S) == 0
    server.childless()


def test_a_second_signal_ends_grpc_streams_with_a_status(start: Start, tiny: Tiny) -> None:
    """C3, E3: on both wires one that makes the gateway try another worker where nothing has been shown yet."""
    server = start(tiny("gemma3"), "--grpc-port", "0").ready()
    with grpc.insecure_channel(grpc_url(server).removeprefix("grpc://")) as channel:
        calls = [generate(channel, wire) for wire in ("mlx", "vllm")]
        for call in calls:
            next(call)
        server.process.send_signal(signal.SIGTERM)
        until("draining", lambda: server.state() == "draining")
        server.process.send_signal(signal.SIGTERM)
        for call in calls:
            with pytest.raises(grpc.RpcError) as ended:
                list(call)
            assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
            assert dict(ended.value.trailing_metadata())["treadle-error"] == "server_stopping"
    assert server.stopped(PROMPT_S) == 128 + signal.SIGTERM
    lines = [line for line in server.said.splitlines() if "method=GRPC" in line]
    assert len(lines) == 2
    assert all("status=503" in line and "error=server_stopping" in line for line in lines)


def generate(channel: grpc.Channel, wire: str) -> Any:
    """An endless generation over one of the two wires."""
    messages, stub = {
        "mlx": (mlx_engine_pb2, mlx_engine_pb2_grpc.MlxEngineStub),
        "vllm": (vllm_engine_pb2, vllm_engine_pb2_grpc.VllmEngineStub),
    }[wire]
    request = messages.GenerateRequest(request_id=wire, stream=True)
    request.tokenized.input_ids.extend([1, 2, 3])
    request.sampling_params.max_tokens = ENDLESS
    return stub(channel).Generate(request, timeout=60)


def test_ctrl_c_in_a_terminal_drains_and_a_second_ends_at_once(start: Start, tiny: Tiny) -> None:
    """The terminal signals its whole foreground group: the engine must not take it for its own."""
    controller, terminal = pty.openpty()
    try:
        server = start(tiny("gemma3"), terminal=terminal).ready()
        pid = server.child()
        with server.stream() as stream:
            os.write(controller, b"\x03")
            until("draining", lambda: server.state() == "draining")
            before = len(stream.tokens)
            while len(stream.tokens) < before + 20:
                stream.next()
            assert server.child() == pid
            os.write(controller, b"\x03")
            assert server.stopped(PROMPT_S) == 128 + signal.SIGINT
        server.childless()
    finally:
        os.close(controller)
        os.close(terminal)


@pytest.mark.parametrize("stage", ["listens on", "reading the weights"])
def test_sigterm_while_it_loads_ends_well_and_soon(start: Start, tiny: Tiny, stage: str) -> None:
    server = start(tiny("gemma3"))
    until(stage, lambda: stage in server.said)
    server.children()
    server.process.send_signal(signal.SIGTERM)
    assert server.stopped(PROMPT_S) == 0
    server.childless()
    assert "Traceback" not in server.said
    assert "error" not in server.said


def test_sigterm_while_it_waits_for_a_hub_ends_well_and_soon(start: Start) -> None:
    """A download or a conversion on a thread must not hold up the exit."""
    with silent_hub() as env:
        server = start("somebody/some-model", env=env)
        assert server.get("/health/live").status_code == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.stopped(PROMPT_S) == 0
        assert "Traceback" not in server.said


def test_an_engine_on_a_thread_drains_too(start: Start, tiny: Tiny) -> None:
    """And SIGINT, sent to the server alone, is SIGTERM."""
    server = start(tiny("gemma3"), "--in-process").ready()
    assert server.engines() == set()
    with server.stream(max_tokens=500) as stream:
        server.process.send_signal(signal.SIGINT)
        assert stream.rest().done
    assert server.stopped(PROMPT_S) == 0
    assert "Traceback" not in server.said
