"""Refusals in Anthropic's shape: their status, their type, and the field that they name."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest

from tests.fronts.web.anthropic.scenes import COUNT, HI, PATH, TOOLS
from tests.fronts.web.server import Front, forever, front, on_port
from tests.support.aio import in_loop
from tests.support.asgi import Client, get, post

LARGE = "x" * 70_000
TEXT = {"type": "text", "text": "hi"}


def user(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


def check(client: Client, status: int, kind: str, *named: str, details: Any = None) -> str:
    """Check an error's shape; return its message."""
    assert client.status == status, client.body
    body = client.json
    assert set(body) == {"type", "error", "request_id"}
    assert body["type"] == "error"
    assert set(body["error"]) == {"type", "message"} | ({"details"} if details else set())
    assert body["error"].get("details") == details
    assert body["error"]["type"] == kind
    assert body["request_id"] == client.headers["request-id"] == client.headers["x-request-id"]
    text: str = body["error"]["message"]
    for name in named:
        assert name in text, text
    return text


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
RESULT = {"type": "tool_result", "tool_use_id": "t", "content": [IMAGE]}
FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": [5]}, "messages[0]"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    (user(5), "messages[0].content[0]"),
    (user(TEXT, {"text": "x"}), "messages[0].content[1].type"),
    (user(TEXT, {"type": "text"}), "messages[0].content[1].text"),
    (user(TEXT, IMAGE), "messages[0].content[1].source.data is an image, and the model reads text only"),
    (user(RESULT), "messages[0].content[0].content[0].source.data is an image"),
    (user(IMAGE | {"source": {"type": "file", "file_id": "f"}}), "messages[0].content[0].source.type 'file'"),
    (user(IMAGE | {"source": {"type": "base64", "data": "x"}}), "messages[0].content[0].source.media_type"),
    (user({"type": "image"}), "messages[0].content[0].source is missing"),
    (user(IMAGE | {"source": {"type": "url", "url": "/etc/passwd"}}), "messages[0].content[0].source.url"),
    (user({"type": "video"}), "messages[0].content[0].type 'video'"),
    (user({"type": "tool_result"}), "messages[0].content[0].tool_use_id"),
    (user({"type": "tool_use", "id": "t", "name": "f", "input": {}}), "messages[0].content[0].type 'tool_use'"),
    (user({"type": "thinking", "thinking": "x"}), "messages[0].content[0].type 'thinking'"),
    (user({"type": "document", "source": {"type": "url", "url": "x"}}), "messages[0].content[0].source.type 'url'"),
    (
        user({"type": "document", "source": {"type": "text", "data": "x"}, "citations": {"enabled": True}}),
        "messages[0].content[0].citations.enabled",
    ),
    (
        user({"type": "document", "source": {"type": "text", "data": "x"}, "citations": {"enabled": 0}}),
        "messages[0].content[0].citations.enabled is a number",
    ),
    (user({"type": "web_search_tool_result", "tool_use_id": "t", "content": []}), "'web_search_tool_result'"),
    ({"messages": [{"role": "system", "content": [IMAGE]}]}, "messages[0].content[0].type"),
    ({"system": 5}, "system"),
    ({"system": [IMAGE]}, "system[0].type 'image' is not supported here: images are in messages of the user"),
    ({"model": 5}, "model"),
    ({"model": ""}, "model"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 2.5}, "max_tokens"),
    ({"max_tokens": 2**31}, "max_tokens"),
    ({"max_tokens": None}, "max_tokens"),
    ({"temperature": 1.01}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"top_p": 2}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"stop_sequences": "x"}, "stop_sequences"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
    ({"stream": "yes"}, "stream"),
    ({"tools": {}}, "tools"),
    ({"tools": [5]}, "tools[0]"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ({"tools": [{"name": "f", "input_schema": 5}]}, "tools[0].input_schema"),
    ({"tools": [{"name": "f", "input_schema": {"type": "string"}}]}, "tools[0].input_schema.type"),
    ({"tools": [{"name": "f", "input_schema": {}, "input_examples": [1]}]}, "tools[0].input_examples[0]"),
    ({"tools": [{"name": "f g", "input_schema": {}}]}, "tools[0].name"),
    ({"tools": [*TOOLS, TOOLS[0]]}, "tools[2].name"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type 'web_search_20250305'"),
    ({"tools": [{"type": "computer_20250124", "name": "computer"}]}, "tools[0].type"),
    ({"tools": [{"name": "f", "strict": True, "input_schema": {"not": {}}}]}, "tools[0].input_schema.not"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"tool_choice": {"type": []}}, "tool_choice.type"),
    ({"tool_choice": {"type": "any"}}, "tool_choice.type"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "nope"}}, "tool_choice.name"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"thinking": True}, "thinking"),
    ({"thinking": {}}, "thinking.type"),
    ({"thinking": {"type": "on"}}, "thinking.type"),
    ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "adaptive", "display": "all"}}, "thinking.display"),
    ({"output_config": {"effort": "huge"}}, "output_config.effort"),
    ({"output_config": {"format": {"type": "text"}}}, "output_config.format.type"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    (
        {"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}},
        "output_config.format.schema.not",
    ),
    ({"mcp_servers": [{"type": "url", "url": "http://x"}]}, "mcp_servers"),
    ({"mcp_servers": {}}, "mcp_servers"),
    ({"container": "c"}, "container"),
    ({"compaction": {"type": "summarize"}}, "compaction is not supported here"),
]


@pytest.mark.parametrize("large", [False, True])
@in_loop
async def test_each_field_is_refused_by_its_name(large: bool) -> None:
    async with front(context=100_000) as f:
        for fields, name in FIELDS:
            body = {"messages": HI, "max_tokens": 5, **fields, **({"padding": LARGE} if large else {})}
            check(await f.post(PATH, body), 400, "invalid_request_error", name)


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("path", [PATH, COUNT])
@pytest.mark.parametrize("thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}, {}, "x"])
@in_loop
async def test_a_thread_is_refused_with_the_details_by_which_clients_send_everything(
    thread: Any, path: str, large: bool
) -> None:
    async with front(context=100_000) as f:
        body = {"messages": HI, "max_tokens": 5, **({"padding": LARGE} if large else {})}
        assert (await f.post(path, {**body, "thread": None})).status == 200
        client = await f.post(path, {**body, "thread": thread})
        details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        check(client, 400, "invalid_request_error", "thread is not", "send all messages", details=details)


@in_loop
async def test_a_body_that_is_no_json_object_is_refused() -> None:
    async with front() as f:
        for body in (b"", b"{", b"[]", b'{"a": NaN}', b"\xff"):
            for path in (PATH, COUNT):
                check(await f.post(path, [body]), 400, "invalid_request_error")


@in_loop
async def test_max_tokens_is_needed_for_an_answer_and_not_for_a_count() -> None:
    async with front() as f:
        check(await f.post(PATH, {"messages": HI}), 400, "invalid_request_error", "max_tokens is missing")
        assert (await f.post(COUNT, {"messages": HI})).status == 200


@in_loop
async def test_random_bad_bodies_get_a_400_in_the_right_shape() -> None:
    draw = random.Random(19)
    values = [5, -1, 2.5, "x", "", [], [5], {}, {"type": []}, {"type": "x"}, True, [[]], [{}], {"a": {"b": []}}]
    names = ["messages", "system", "tools", "tool_choice", "thinking", "output_config", "max_tokens", "stop_sequences"]
    async with front() as f:
        for _ in range(300):
            bad = {name: draw.choice(values) for name in draw.sample(names, draw.randint(1, 4))}
            client = await f.post(draw.choice([PATH, COUNT]), {"messages": HI, "max_tokens": 5, **bad})
            if client.status != 200:
                check(client, 400, "invalid_request_error")


# Other statuses -------------------------------------------------------------------------------------------------


@in_loop
async def test_keys_are_taken_from_both_headers_and_wrong_ones_refused() -> None:
    async with front(api_key="secret") as f:
        body = {"messages": HI, "max_tokens": 5}
        for headers in ({"x-api-key": "secret"}, {"authorization": "Bearer secret"}):
            assert (await f.post(PATH, body, headers=headers)).status == 200
        for path in (PATH, COUNT):
            check(await f.post(path, body, headers={"x-api-key": "no"}), 401, "authentication_error")


@in_loop
async def test_what_is_not_there_is_not_found() -> None:
    async with front() as f:
        body = {"messages": HI, "max_tokens": 5}
        check(await f.post(PATH, {**body, "model": "gpt"}), 404, "not_found_error", "'gpt'")
        check(await f.post(COUNT, {**body, "model": "gpt"}), 404, "not_found_error")
        check(await f.post(f"{PATH}/batches", body), 404, "not_found_error")
        check(await f.get("/v1/nope", headers={"anthropic-version": "2023-06-01"}), 404, "not_found_error")
        check(await f.get(PATH), 405, "invalid_request_error")
        check(await f.post("/v1/v1/messages", body, headers={"anthropic-version": "1"}), 404, "not_found_error", PATH)


@in_loop
async def test_a_foreign_page_and_a_large_body_are_refused_in_shape() -> None:
    async with front(max_body_bytes=1000) as f:
        body = {"messages": HI, "max_tokens": 5}
        foreign = await f.post(PATH, body, headers={"origin": "https://evil.example"})
        check(foreign, 403, "permission_error")
        check(await f.post(PATH, {**body, "padding": LARGE}), 413, "request_too_large")


@in_loop
async def test_headers_that_are_too_large_are_refused_in_shape() -> None:
    async with front() as f, on_port(f.app) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(b"POST /v1/messages HTTP/1.1\r\nhost: localhost\r\nx: " + b"x" * 70_000 + b"\r\n\r\n")
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b" 431 " in head
    assert json.loads(body)["error"]["type"] == "invalid_request_error"
    assert json.loads(body)["type"] == "error"


@in_loop
async def test_overload_is_a_503_with_retry_after() -> None:
    async with front(forever, running=1, waiting=0, pump=False) as f:
        running = post(PATH, {"messages": HI, "max_tokens": 50}).start(f.app)
        await f.step(3)
        refused = await f.post(PATH, {"messages": HI, "max_tokens": 50})
        check(refused, 503, "overloaded_error")
        assert int(refused.headers["retry-after"]) >= 1
        await count_goes_on(f)
        running.leave()
        await f.step(3)


async def count_goes_on(f: Front) -> None:
    """A count takes no slot: it is answered while none is free."""
    assert (await f.post(COUNT, {"messages": HI})).status == 200


@in_loop
async def test_a_prompt_that_is_too_long_is_refused_in_the_words_that_clients_search_for() -> None:
    async with front(context=64) as f:
        client = await f.post(PATH, {"messages": [{"role": "user", "content": "x" * 200}], "max_tokens": 5})
        counted = await f.post(COUNT, {"messages": [{"role": "user", "content": "x" * 200}]})
        tokens = counted.json["input_tokens"]
        text = check(client, 400, "invalid_request_error")
        assert text.startswith(f"prompt is too long: {tokens} tokens > 63 maximum")


@in_loop
async def test_an_answer_that_is_a_page_of_openais_keeps_its_shape() -> None:
    async with front() as f:
        assert set((await f.chat(max_tokens="x")).json["error"]) == {"message", "type", "param", "code"}
        assert "request-id" not in (await get("/v1/models").run(f.app)).headers
