"""E1 to E3 with the real gateway in front: what its clients get, and what becomes of the workers' places."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.conftest import Start, Tiny
from tests.serve.gateway import Gateway, grpc_url
from tests.serve.server import Serve, until

WORKER = ("--grpc-port", "0", "--served-model-name", "m")


@pytest.fixture(scope="module", params=["vllm", "mlx"])
def gateway(
    request: pytest.FixtureRequest, start_shared: Start, tiny: Tiny, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Serve, Gateway]]:
    wire = request.param
    server = start_shared(tiny("llama"), *WORKER, "--grpc-wire", wire).ready()
    with Gateway(tmp_path_factory.mktemp("gateway") / "log", grpc_url(server)) as gateway:
        yield wire, server, gateway.ready()


def events(data: Iterator[str]) -> list[dict[str, Any]]:
    found = []
    for text in data:
        if text == "[DONE]":
            return found
        found.append(json.loads(text))
    raise AssertionError("no [DONE]")


def test_chat_and_completions_are_what_the_worker_says_itself(gateway: tuple[str, Serve, Gateway]) -> None:
    """E1: the same tokens through the gateway as over HTTP, with the same counts."""
    _, server, front = gateway
    chat = front.chat().json()
    own = server.http.post(
        f"{server.url}/v1/chat/completions",
        json={"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "temperature": 0},
    ).json()
    assert chat["choices"][0]["finish_reason"] == "length"
    for count in ("prompt_tokens", "completion_tokens"):
        assert chat["usage"][count] == own["usage"][count]
    assert front.complete().json()["usage"]["completion_tokens"] == 8
    server.idle()


def test_a_stream_has_its_finish_reason_and_its_usage(gateway: tuple[str, Serve, Gateway]) -> None:
    _, server, front = gateway
    with front.stream(max_tokens=8, stream_options={"include_usage": True}) as data:
        found = events(data)
    reasons = [choice["finish_reason"] for event in found for choice in event["choices"] if choice["finish_reason"]]
    usage = [event["usage"] for event in found if event.get("usage")]
    assert reasons == ["length"]
    assert usage[-1]["completion_tokens"] == 8
    server.idle()


def test_the_gateway_knows_what_is_cached(gateway: tuple[str, Serve, Gateway]) -> None:
    """It reads the events: their blocks' size is in no other message that it gets by then."""
    wire, server, front = gateway
    if wire == "mlx":
        return
    front.complete("a prompt that fills a block of its own. " * 8)
    until("a block", lambda: re.search(r"Learned block_size from KV event .*block_size=32", plain(front.said)))
    assert "state snapshot" in plain(front.said)
    server.idle()


def plain(text: str) -> str:
    """Without the colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def test_the_richer_wire_has_stop_strings_and_several_choices(gateway: tuple[str, Serve, Gateway]) -> None:
    """E2; the plain wire's gateway refuses them itself."""
    wire, server, front = gateway
    text = front.complete(max_tokens=12).json()["choices"][0]["text"]
    stop = text[3:5]
    stopped = front.complete(max_tokens=12, stop=[stop])
    several = front.chat(n=2, temperature=1.0, seed=1)
    if wire == "mlx":
        assert (stopped.status_code, several.status_code) == (400, 400)
        return
    choice = stopped.json()["choices"][0]
    assert (choice["finish_reason"], choice["text"]) == ("stop", text[: text.index(stop)])
    assert len(several.json()["choices"]) == 2
    server.idle()


PERSON = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}, "name": {"enum": ["Ada", "Max"]}},
    "required": ["age", "name"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON}}
TOOL = {"type": "function", "function": {"name": "find", "parameters": PERSON}}


def test_the_richer_wire_has_structured_output_and_forced_tools(gateway: tuple[str, Serve, Gateway]) -> None:
    """E2, F7: the model answers noise otherwise."""
    wire, server, front = gateway
    whole = front.chat(response_format=FORMAT, max_tokens=200)
    if wire == "mlx":
        assert whole.status_code == 400
        return
    choice = whole.json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert json.loads(choice["message"]["content"]).keys() == {"age", "name"}
    with front.stream(response_format=FORMAT, max_tokens=200) as data:
        text = "".join(choice["delta"].get("content") or "" for event in events(data) for choice in event["choices"])
    assert json.loads(text)["name"] in ("Ada", "Max")
    assert re.fullmatch("[ab]{3}", front.complete(regex="[ab]{3}").json()["choices"][0]["text"])
    named = {"type": "function", "function": {"name": "find"}}
    (call,) = front.chat(tools=[TOOL], tool_choice=named, max_tokens=200).json()["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "find"
    assert json.loads(call["function"]["arguments"]).keys() == {"age", "name"}
    server.idle()


def test_a_schema_that_cannot_be_served_is_a_400_with_its_place(gateway: tuple[str, Serve, Gateway]) -> None:
    wire, server, front = gateway
    schema = {"type": "object", "properties": {"age": {"type": "integr"}}}
    answer = front.chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
    assert answer.status_code == 400
    if wire == "vllm":
        assert "json_schema.properties.age.type must be one of" in answer.json()["error"]["message"]
    server.idle()


def test_log_probabilities_reach_the_client(gateway: tuple[str, Serve, Gateway]) -> None:
    _, _, front = gateway
    content = front.chat(logprobs=True, top_logprobs=2, max_tokens=4).json()["choices"][0]["logprobs"]["content"]
    assert content
    assert all(len(entry["top_logprobs"]) == 2 and entry["logprob"] <= 0 for entry in content)


def test_bad_input_is_a_400_and_harms_nobody(gateway: tuple[str, Serve, Gateway]) -> None:
    """gateway.md 2.3: an empty prompt stalled the worker that came before, a foreign token id killed it."""
    _, server, front = gateway
    pid = server.child()
    with front.stream(max_tokens=300) as healthy:
        next(healthy)
        assert front.complete("").status_code == 400
        foreign = front.http.post(
            "/generate", json={"model": "m", "input_ids": [5, 999_999], "sampling_params": {"max_new_tokens": 4}}
        )
        assert foreign.status_code == 400, foreign.text
        empty = front.http.post("/generate", json={"model": "m", "input_ids": [], "sampling_params": {}})
        assert 400 <= empty.status_code < 500, empty.text
        events(healthy)
    assert server.child() == pid
    server.idle()


@pytest.mark.parametrize("count", [1, 4, 8, 16, 64])
def test_many_at_once_all_complete(gateway: tuple[str, Serve, Gateway], count: int) -> None:
    """E3: upstream stalls at 16. Those that find no room are retried by the gateway, or told so with a 429."""
    _, server, front = gateway
    with ThreadPoolExecutor(count) as pool:
        answers = list(pool.map(lambda i: front.chat(f"number {i}", max_tokens=4), range(count)))
    codes = {answer.status_code for answer in answers}
    assert codes <= ({200} if count <= 16 else {200, 429})
    server.idle()


def test_clients_that_leave_free_their_places(gateway: tuple[str, Serve, Gateway]) -> None:
    """gateway.md fact 7: a stream is aborted, a plain request's call is cancelled."""
    _, server, front = gateway
    with front.stream(max_tokens=50_000) as data:
        next(data)
    server.idle()
    leaver = threading.Thread(target=_leaves, args=(front,))
    leaver.start()
    leaver.join()
    server.idle()


def _leaves(front: Gateway) -> None:
    body = {"model": "m", "prompt": "hello", "max_tokens": 50_000}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{front.url}/v1/completions", json=body, timeout=0.5, trust_env=False)


def test_one_of_two_workers_may_die(start: Start, tiny: Tiny, tmp_path: Path) -> None:
    """F8: what had not been answered yet goes to the other one; new requests never notice."""
    workers = [start(tiny("llama"), *WORKER) for _ in range(2)]
    options = ("--policy", "round_robin")
    with Gateway(tmp_path / "log", *(grpc_url(worker.ready()) for worker in workers), options=options) as front:
        front.ready()
        until("both workers known", lambda: _known(front) == 2)
        with ThreadPoolExecutor(8) as pool:
            waiting = [pool.submit(front.complete, f"number {i}", max_tokens=1_200) for i in range(8)]
            until("both at work", lambda: all(w.status()["admission"]["rows"] for w in workers))
            os.kill(workers[0].process.pid, signal.SIGKILL)
            codes = [future.result().status_code for future in waiting]
        assert codes == [200] * 8
        assert [front.chat(f"later {i}").status_code for i in range(8)] == [200] * 8
        workers[1].idle()


POISON = 77


@pytest.mark.parametrize(("wire", "at"), [("vllm", 5), ("mlx", 0)])
def test_a_poison_never_reaches_a_second_worker(start: Start, tiny: Tiny, tmp_path: Path, wire: str, at: int) -> None:
    """D5: the gateway retries what is UNAVAILABLE on the next worker, and its breaker counts INTERNAL."""
    env = {"TREADLE_TEST_POISON": json.dumps({"token": POISON, "at": at})}
    more = {"module": "tests.support.poison", "env": env}
    workers = [start(tiny("llama"), *WORKER, "--grpc-wire", wire, **more) for _ in range(2)]
    options = ("--policy", "round_robin")
    with Gateway(tmp_path / "log", *(grpc_url(worker.ready()) for worker in workers), options=options) as front:
        front.ready()
        until("both workers known", lambda: _known(front) == 2)
        answer = _poisoned(front)
        assert answer.status_code not in (200, 429, 500, 503), answer.text
        deaths = [sum(worker.status()["engine"]["deaths"].values()) for worker in workers]
        least, most = sorted(deaths)
        assert least == 0, "no other worker ever tried it"
        assert 2 <= most <= 3, "alone in the end; once more where it acts later than what was heard of it"
        until("both ready", lambda: all(worker.is_ready() for worker in workers))
        for _ in range(12):  # ten failures in a row would open the gateway's breaker
            assert _poisoned(front).status_code not in (200, 429, 500, 503)
        assert sum(sum(worker.status()["engine"]["deaths"].values()) for worker in workers) <= 6, (
            "each worker finds it once"
        )
        until("answers again", lambda: front.chat("later").status_code == 200)
        for worker in workers:
            worker.idle()


def _poisoned(front: Gateway) -> httpx.Response:
    ask = {"max_new_tokens": 20, "temperature": 0, "ignore_eos": True}
    return front.http.post("/generate", json={"model": "m", "input_ids": [5, POISON, 6], "sampling_params": ask})


def _known(front: Gateway) -> int:
    return len(front.http.get("/workers").json().get("workers", ()))
