"""Images in the OpenAPI document: requests that it allows are answered, and others are refused, by each model."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fronts.web.server import front, says
from tests.fronts.web.test_openapi import references
from tests.support.aio import in_loop
from tests.support.images import data_url, inline_service, vision_text

CHAT, EMBEDDINGS, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/embeddings", "/v1/messages", "/v1/responses"
URL = data_url()
PART = {"type": "image_url", "image_url": {"url": URL, "detail": "low"}}
FLAT = {"type": "input_image", "image_url": URL, "detail": "auto"}
BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": URL.partition(",")[2]}}
CALL = {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f"}}]}
USE = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
CALLED = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": [*content]}


ALLOWED: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {"messages": [user(PART, {"type": "text", "text": "a"})]}),
    "chat, as a response has it": (CHAT, {"messages": [user(FLAT)]}),
    "result": (CHAT, {"messages": [user(PART), CALL, {"role": "tool", "tool_call_id": "c", "content": [PART]}]}),
    "object": (EMBEDDINGS, {"input": [{"image": URL, "text": "a"}, "b"]}),
    "object of parts": (EMBEDDINGS, {"input": {"content": [PART, {"type": "text", "text": "a"}]}}),
    "embedded chat": (EMBEDDINGS, {"messages": [user(PART)]}),
    "message": (MESSAGES, {"messages": [user(BLOCK, {"type": "text", "text": "a"})], "max_tokens": 4}),
    "message with a result": (
        MESSAGES,
        {
            "messages": [
                user(BLOCK),
                {"role": "assistant", "content": [USE]},
                user({"type": "tool_result", "tool_use_id": "c", "content": [BLOCK]}),
            ],
            "max_tokens": 4,
        },
    ),
    "response": (RESPONSES, {"input": [user(FLAT)]}),
    "response with a result": (
        RESPONSES,
        {"input": [user(FLAT), CALLED, {"type": "function_call_output", "call_id": "c", "output": [FLAT]}]},
    ),
}
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "no URL": (CHAT, {"messages": [user({"type": "image_url", "image_url": "cat.png"})]}),
    "detail": (EMBEDDINGS, {"input": {"content": [{**PART, "image_url": {"url": URL, "detail": "some"}}]}}),
    "source": (MESSAGES, {"messages": [user({"type": "image", "source": {"type": "file"}})], "max_tokens": 4}),
    "of the assistant": (RESPONSES, {"input": [{"role": "assistant", "content": [FLAT]}]}),
    "file": (RESPONSES, {"input": [user({**FLAT, "file_id": "file-1"})]}),
}


def allows(document: dict[str, Any], path: str, body: dict[str, Any]) -> bool:
    import jsonschema  # takes a second: by its worker alone, not in each that collects the tests

    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    whole = {**schema, "components": document["components"]}
    return bool(jsonschema.Draft202012Validator(whole).is_valid(body))


@pytest.mark.parametrize("name", [*ALLOWED, *REFUSED])
@in_loop
async def test_the_document_of_a_vision_model_allows_the_images_that_it_reads(name: str) -> None:
    path, body = (ALLOWED | REFUSED)[name]
    body = {"model": "m", **body}
    async with front(says("A loom."), images=inline_service(), text=vision_text()) as f:
        document = (await f.get("/openapi.json")).json
        answer = await f.post(path, body)
        assert answer.status == (200 if name in ALLOWED else 400), answer.body
        assert allows(document, path, body) == (name in ALLOWED)


@pytest.mark.parametrize("name", ALLOWED)
@in_loop
async def test_the_document_of_a_text_model_allows_none(name: str) -> None:
    path, body = ALLOWED[name]
    body = {"model": "m", **body}
    async with front() as f:
        document = (await f.get("/openapi.json")).json
        assert (await f.post(path, body)).status == 400
        assert not allows(document, path, body)
        assert allows(document, EMBEDDINGS, {"model": "m", "input": ["a", {"text": "b"}]})


@in_loop
async def test_every_reference_of_a_vision_model_leads_somewhere() -> None:
    async with front(images=inline_service(), text=vision_text()) as f:
        found = (await f.get("/openapi.json")).json
    assert references(found) <= {f"#/components/schemas/{name}" for name in found["components"]["schemas"]}
