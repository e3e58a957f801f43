"""Stored responses: continued, retrieved, listed, deleted, separated by key, and bounded."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from typing import Any

import pytest

from tests.fronts.web.responses.calls import (
    CALL,
    PATH,
    WEATHER,
    answering,
    output_text,
    prompt_of,
    respond,
    send,
    user,
)
from tests.fronts.web.server import Front, settle
from tests.support.aio import in_loop
from tests.support.asgi import Client
from treadle.fronts.web.responses.store import Chunk, ResponseNotFound, ResponseStore
from treadle.telemetry.access_log import ACCESS


async def stored(f: Front) -> dict[str, Any]:
    found: dict[str, Any] = (await f.get("/v1/status")).json["responses"]
    return found


async def call(f: Front, method: str, path: str, query: str = "", key: str = "") -> Client:
    client = Client(method, path, headers={"authorization": f"Bearer {key}"} if key else {})
    run = client.run

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await f.app({**scope, "query_string": query.encode()}, receive, send)

    return await run(app)


@in_loop
async def test_a_conversation_goes_on_from_the_previous_response_without_its_instructions() -> None:
    async with answering(f"<think>2+2</think>Look.\n{CALL}", "Sunny.", "Bye.") as f:
        first = await respond(f, "hi", tools=[WEATHER], instructions="Be brief.")
        result = {"type": "function_call_output", "call_id": first["output"][-1]["call_id"], "output": "sun"}
        second = await respond(f, [result], tools=[WEATHER], previous_response_id=first["id"])
        assert second["previous_response_id"] == first["id"]
        assert prompt_of(f).endswith(
            '<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nLook.<tool_call>{"name": "weather", "arguments": '
            '{"city": "Rome"}}</tool_call><|im_end|>\n<|im_start|>tool\nsun<|im_end|>\n<|im_start|>assistant\n'
        )
        assert "Be brief." not in prompt_of(f)
        third = await respond(f, "thanks", previous_response_id=second["id"])
        assert output_text(third) == "Bye."
        assert "Sunny.<|im_end|>\n<|im_start|>user\nthanks" in prompt_of(f)


@in_loop
async def test_a_large_request_is_stored_and_continued_alike() -> None:
    async with answering("Hello.", "Again.") as f:
        large = "x" * 80_000
        first = await respond(f, [user(large)], tools=[WEATHER], metadata={"a": "b"})
        assert first["metadata"] == {"a": "b"}
        assert first["tools"][0]["name"] == "weather"
        await respond(f, "on", previous_response_id=first["id"])
        assert f"user\n{large}<|im_end|>\n<|im_start|>assistant\nHello.<|im_end|>\n<|im_start|>user\non" in prompt_of(f)
        listed = await f.get(f"{PATH}/{first['id']}/input_items")
        assert listed.json["data"][0]["content"] == [{"type": "input_text", "text": large}]


@in_loop
async def test_a_response_is_retrieved_as_it_was_answered_and_deleted_for_good() -> None:
    async with answering("Hello.") as f:
        found = await respond(f)
        path = f"{PATH}/{found['id']}"
        assert (await f.get(path)).json == found
        later = await respond(f, "on", previous_response_id=found["id"])
        deleted = await call(f, "DELETE", path)
        assert deleted.json == {"id": found["id"], "object": "response", "deleted": True}
        for client in (await f.get(path), await call(f, "DELETE", path)):
            assert (client.status, client.json["error"]["code"]) == (404, "response_not_found")
        await respond(f, "on", previous_response_id=later["id"])
        assert "hi<|im_end|>\n<|im_start|>assistant\nHello." in prompt_of(f)


@in_loop
async def test_the_input_is_listed_by_page_in_both_orders() -> None:
    async with answering("Hello.") as f:
        first = await respond(f, [user(str(i)) for i in range(3)])
        second = await respond(f, "last", previous_response_id=first["id"])
        path = f"{PATH}/{second['id']}/input_items"
        whole = (await call(f, "GET", path, "order=asc")).json
        texts = [item["content"][0]["text"] for item in whole["data"]]
        assert (texts, whole["has_more"]) == (["0", "1", "2", "Hello.", "last"], False)
        assert [item["role"] for item in whole["data"]][-2:] == ["assistant", "user"]
        page = (await call(f, "GET", path, f"limit=2&after={whole['data'][4]['id']}")).json
        assert [item["id"] for item in page["data"]] == [whole["data"][3]["id"], whole["data"][2]["id"]]
        assert (page["first_id"], page["has_more"]) == (whole["data"][3]["id"], True)
        for query in ("limit=0", "limit=101", "limit=x", "order=up", "after=none"):
            client = await call(f, "GET", path, query)
            name = query.partition("=")[0]
            assert (client.status, client.json["error"]["param"]) == (404 if name == "after" else 400, name)


@in_loop
async def test_items_can_be_given_by_reference() -> None:
    async with answering("Hello.") as f:
        found = await respond(f)
        reference = {"type": "item_reference", "id": found["output"][0]["id"]}
        await respond(f, [user("hi"), reference, user("on")])
        assert "assistant\nHello.<|im_end|>\n<|im_start|>user\non" in prompt_of(f)
        large = await respond(f, [user("x" * 70_000), reference])
        assert "x<|im_end|>\n<|im_start|>assistant\nHello." in prompt_of(f)
        assert large["status"] == "completed"
        client = await send(f, [{"id": "msg_none"}])
        assert (client.status, client.json["error"]["code"]) == (404, "response_not_found")
        assert "msg_none" in client.json["error"]["message"]


@in_loop
async def test_what_is_not_stored_leaves_nothing() -> None:
    async with answering("Hello.") as f:
        found = await respond(f, store=False)
        assert (await f.get(f"{PATH}/{found['id']}")).status == 404
        assert await stored(f) == {"stored": 0, "bytes": 0, "limit_bytes": 256 * 2**20, "evicted": 0}
        client = await send(f, "on", previous_response_id=found["id"])
        assert (client.status, client.json["error"]["param"]) == (404, "previous_response_id")
        assert "store: false" in client.json["error"]["message"]


@in_loop
async def test_a_client_that_leaves_leaves_nothing_in_the_store() -> None:
    async with answering("x" * 400, pump=False) as f:
        client = Client("POST", PATH, json.dumps({"model": "m", "input": "hi", "stream": True}).encode())
        client.start(f.app)
        await f.step(3)
        assert (await stored(f))["stored"] == 1
        client.leave()
        await f.step(3)
        assert (await stored(f))["bytes"] == 0
        assert f.idle()


@in_loop
async def test_a_server_without_a_store_answers_and_keeps_nothing() -> None:
    async with answering("Hello.", response_store=0) as f:
        found = await respond(f)
        assert (await f.get(f"{PATH}/{found['id']}")).status == 404
        client = await send(f, background=True)
        assert (client.status, client.json["error"]["param"]) == (400, "background")
        assert "--response-store" in client.json["error"]["message"]


@in_loop
async def test_nothing_of_one_key_is_visible_to_another() -> None:
    async with answering("Hello.") as f:
        mine, other = {"authorization": "Bearer one"}, {"authorization": "Bearer two"}
        client = await f.post(PATH, {"model": "m", "input": "hi", "max_output_tokens": 9}, headers=mine)
        found = client.json
        path = f"{PATH}/{found['id']}"
        assert (await f.get(path, headers=mine)).status == 200
        for method, where in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
            assert (await call(f, method, path + where, key="two")).status == 404
        for given in (
            {"input": "on", "previous_response_id": found["id"]},
            {"input": [{"id": found["output"][0]["id"]}]},
        ):
            assert (await f.post(PATH, {"model": "m", **given}, headers=other)).status == 404


@in_loop
async def test_a_full_store_evicts_the_oldest_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    async with answering("Hello.", response_store=20_000) as f:
        ids = [(await respond(f))["id"] for _ in range(9)]
        assert (await f.get(f"{PATH}/{ids[0]}")).status == 404
        assert (await f.get(f"{PATH}/{ids[-1]}")).status == 200
        now = await stored(f)
        assert 0 < now["bytes"] <= 20_000
        assert now["evicted"] == 9 - now["stored"] > 0
        assert caplog.text.count("the response store is full") == 1
        metrics = (await f.get("/metrics")).body.decode()
        assert f"treadle_evicted_responses_total {now['evicted']}.0" in metrics
        assert f"treadle_stored_responses_bytes {now['bytes']:g}" in metrics or f"{float(now['bytes'])}" in metrics


# The store itself -----------------------------------------------------------------------------------------------


def add(
    store: ResponseStore, name: str, tenant: bytes = b"a", history: list[Chunk] | None = None, size: int = 1000
) -> Any:
    found = store.add(tenant, name, history or [], [f"in_{name}"], [b"x" * size])
    store.end(found, b"{}", [f"out_{name}"], [b"y"])
    return found


def test_shared_items_are_counted_once_and_outlive_their_response() -> None:
    store = ResponseStore(10**6)
    first = add(store, "1")
    alone = store.size
    second = add(store, "2", history=first.chunks, size=10)
    assert store.size < alone + 1000
    store.remove(first)
    store.remove(first)
    assert [item for item, _ in second.input_items()] == ["in_1", "out_1", "in_2"]
    assert store.items(b"a", ["in_1"]) == {"in_1": b"x" * 1000}
    store.remove(second)
    assert (store.size, len(store)) == (0, 0)
    with pytest.raises(ResponseNotFound):
        store.items(b"a", ["in_1"])


def test_the_tenant_that_holds_most_loses_its_response_used_last() -> None:
    store = ResponseStore(12_000)
    add(store, "small", b"b")
    for name in ("1", "2", "3"):
        add(store, name, size=2000)
    store.get(b"a", "1")
    add(store, "4", size=3000)
    assert store.get(b"b", "small")
    assert store.get(b"a", "1")
    with pytest.raises(ResponseNotFound):
        store.get(b"a", "2")
    assert store.size <= 12_000


def test_a_response_that_is_generated_is_not_evicted() -> None:
    store = ResponseStore(1000)
    running = store.add(b"a", "1", [], ["in"], [b"x" * 5000])
    add(store, "2")
    assert store.get(b"a", "1") is running
    store.end(running, b"{}", [], [])
    with pytest.raises(ResponseNotFound):
        store.get(b"a", "1")
    assert (store.size, store.evicted) == (0, 2)


def test_evictions_are_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    store = ResponseStore(1, clock=lambda: now[0])
    for i in range(3):
        add(store, str(i))
    now[0] = 61.0
    add(store, "4")
    assert [re.findall(r"evicted (\d+)", record.getMessage()) for record in caplog.records] == [["1"], ["3"]]


# In the background ----------------------------------------------------------------------------------------------


@in_loop
async def test_a_background_response_is_queued_polled_and_streamed_again() -> None:
    async with answering("Hello.", pump=False) as f:
        posting = asyncio.create_task(f.post(PATH, {"model": "m", "input": "hi", "background": True}))
        await settle()
        found = (await posting).json
        assert (found["status"], found["background"]) == ("queued", True)
        path = f"{PATH}/{found['id']}"
        assert (await f.get(path)).json["status"] == "queued"
        await f.step(3)
        assert (await f.get(path)).json["status"] == "in_progress"
        reading = Client("GET", path)
        streaming = asyncio.create_task(stream(f, reading, "stream=true&starting_after=2"))
        await f.step(9)
        await streaming
        ended = (await f.get(path)).json
        assert (ended["status"], output_text(ended)) == ("completed", "Hello.")
        assert reading.events[0]["sequence_number"] == 3
        assert reading.events[-1]["response"] == ended
        again = await stream(f, Client("GET", path), "stream=true")
        assert [event["type"] for event in again.events[:3]] == [
            f"response.{kind}" for kind in ("created", "queued", "in_progress")
        ]
        assert again.events[3:] == reading.events
        assert f.idle()


async def stream(f: Front, client: Client, query: str) -> Client:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await f.app({**scope, "query_string": query.encode()}, receive, send)

    return await client.run(app)


@in_loop
async def test_a_stream_of_a_background_response_may_be_left() -> None:
    async with answering("Hello.", pump=False) as f:
        client = Client(
            "POST", PATH, json.dumps({"model": "m", "input": "hi", "background": True, "stream": True}).encode()
        )
        client.start(f.app)
        await f.step(4)
        found = client.events[0]["response"]
        client.leave()
        await f.step(9)
        assert output_text((await f.get(f"{PATH}/{found['id']}")).json) == "Hello."


@in_loop
async def test_a_background_response_is_cancelled_and_frees_its_place() -> None:
    async with answering("x" * 400, pump=False) as f:
        client = await f.post(PATH, {"model": "m", "input": "hi", "background": True})
        path = f"{PATH}/{client.json['id']}"
        await f.step(6)
        for _ in range(2):
            cancelled = await call(f, "POST", f"{path}/cancel")
            assert (cancelled.status, cancelled.json["status"]) == (200, "cancelled")
        assert output_text(cancelled.json).startswith("x")
        await f.step(2)
        assert f.idle()
        assert (await f.get(path)).json == cancelled.json


@in_loop
async def test_a_background_response_has_a_line_of_its_own_in_the_access_log(caplog: pytest.LogCaptureFixture) -> None:
    """The request's line comes before its answer is generated, so the tokens are in the other one."""
    caplog.set_level(logging.INFO, ACCESS)

    def lines() -> list[dict[str, Any]]:
        found = [dict(record.__dict__["fields"]) for record in caplog.records if record.name == ACCESS]
        caplog.clear()
        return [line for line in found if line["path"] == PATH]

    async with answering("Hello.", pump=False, api_key="k") as f:
        posting = f.post(PATH, {"model": "m", "input": "hi", "background": True}, headers={"authorization": "Bearer k"})
        found = (await posting).json
        (queued,) = lines()
        assert (queued["background"], queued["status"], queued["id"]) == ("queued", 200, found["id"])
        assert "completion_tokens" not in queued
        await f.step(12)
        (ended,) = lines()
        assert (ended["background"], ended["status"], ended["rows"]) == ("ended", 200, 1)
        assert (ended["id"], ended["request"], ended["key"]) == (found["id"], queued["request"], "api-key")
        assert (ended["prompt_tokens"] > 0, ended["completion_tokens"]) == (True, len("Hello.") + 1)
        assert {"ttft_s", "wait_s", "total_s"} <= ended.keys()
        assert "error" not in ended


@in_loop
async def test_the_line_of_a_background_response_says_what_ended_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, ACCESS)

    def ends() -> list[tuple[int, str, bool]]:
        found = [record.__dict__["fields"] for record in caplog.records if record.name == ACCESS]
        caplog.clear()
        ended = [line for line in found if line.get("background") == "ended"]
        return [(line["status"], line["error"], line["completion_tokens"] > 0) for line in ended]

    async with answering("x" * 400, "x" * 400, pump=False, running=1, waiting=0, max_wait_s=0.0) as f:
        body = {"model": "m", "input": "hi", "background": True}
        client = await f.post(PATH, body)
        await f.step(6)
        assert (await f.post(PATH, body)).status == 503
        assert ends() == [], "a request that was refused has its line alone"
        await call(f, "POST", f"{PATH}/{client.json['id']}/cancel")
        assert ends() == [(499, "request_cancelled", True)]
        await f.step(2)
        assert (await f.post(PATH, body)).status == 200
        await f.step(6)
        await f.engine.stop()
        await settle()
        assert ends() == [(503, "server_stopping", True)]


@in_loop
async def test_only_background_responses_can_be_cancelled_or_streamed_again() -> None:
    async with answering("Hello.") as f:
        path = f"{PATH}/{(await respond(f))['id']}"
        client = await call(f, "POST", f"{path}/cancel")
        assert (client.status, "background: true" in client.json["error"]["message"]) == (400, True)
        client = await call(f, "GET", path, "stream=true")
        assert (client.status, client.json["error"]["param"]) == (400, "stream")


@in_loop
async def test_a_deleted_background_response_ends() -> None:
    async with answering("x" * 400, pump=False) as f:
        client = await f.post(PATH, {"model": "m", "input": "hi", "background": True})
        await f.step(4)
        assert (await call(f, "DELETE", f"{PATH}/{client.json['id']}")).status == 200
        await f.step(2)
        assert f.idle()
        assert (await stored(f))["bytes"] == 0


@in_loop
async def test_background_requests_are_refused_as_others_are() -> None:
    async with answering("x" * 400, pump=False, running=1, waiting=0, max_wait_s=0.0) as f:
        first = await f.post(PATH, {"model": "m", "input": "hi", "background": True})
        assert first.status == 200
        await f.step(2)
        busy = await f.post(PATH, {"model": "m", "input": "hi", "background": True})
        assert busy.status == 503
        assert "retry-after" in busy.headers
        assert (await stored(f))["stored"] == 1
    async with answering("Hello.") as f:
        long = await send(f, "x" * 200_000, background=True)
        assert (long.status, long.json["error"]["code"]) == (400, "context_length_exceeded")
        assert (await stored(f))["stored"] == 0


@in_loop
async def test_a_background_response_fails_with_the_server() -> None:
    async with answering("x" * 400, pump=False) as f:
        client = await f.post(PATH, {"model": "m", "input": "hi", "background": True})
        await f.step(3)
        await f.engine.stop()
        await settle()
        found = (await f.get(f"{PATH}/{client.json['id']}")).json
        assert found["status"] == "failed"
        assert found["error"]["code"] == "server_error"


@in_loop
async def test_a_response_that_is_generated_can_not_be_continued() -> None:
    async with answering("x" * 400, pump=False) as f:
        client = await f.post(PATH, {"model": "m", "input": "hi", "background": True})
        refused = await f.post(PATH, {"model": "m", "input": "on", "previous_response_id": client.json["id"]})
        assert (refused.status, refused.json["error"]["param"]) == (400, "previous_response_id")
