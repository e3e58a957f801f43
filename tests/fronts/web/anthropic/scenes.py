"""Servers with scripted answers for the tests of Anthropic's dialect, and readers of its answers."""

from __future__ import annotations

import functools
import json
from typing import Any

from tests.fronts.web.server import Front, front
from tests.support.answers import Answers
from tests.support.asgi import Client
from tests.support.bytes_text import bytes_text
from treadle.text import TextModel

TEMPLATE = (
    "{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools>"
    'Answer with <tool_call>{"name": ..., "arguments": ...}</tool_call>{% endif %}'
    "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\\n' }}"
    "{% if m.reasoning_content %}{{ '<think>' ~ m.reasoning_content ~ '</think>' }}{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"
)
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
CLOCK = '<tool_call>{"name": "clock", "arguments": {}}</tool_call>'
PLACE = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"name": "weather", "description": "Of a city.", "input_schema": PLACE},
    {"name": "clock", "input_schema": {"type": "object"}, "type": "custom"},
]
HI = [{"role": "user", "content": "hi"}]
MARK = {"type": "ephemeral", "ttl": "1h"}
PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"


@functools.cache
def text() -> TextModel:
    return bytes_text(
        context=100_000, added=("<tool_call>", "</tool_call>", "<think>", "</think>"), chat_template=TEMPLATE
    )


def answering(*queue: str, steps: tuple[int, ...] = (1,), **options: Any) -> Any:
    """A server whose requests get these answers, in order."""
    return front(Answers(text(), *queue, steps=steps), text=text(), **options)


async def message(f: Front, **fields: Any) -> dict[str, Any]:
    """Return a whole answer."""
    client = await f.post(PATH, {"model": "claude-x", "messages": HI, "max_tokens": 500, **fields})
    assert client.status == 200, client.body
    found: dict[str, Any] = client.json
    assert {"stop_details", "container"} < set(found)
    assert (found["type"], found["role"], found["model"]) == ("message", "assistant", "m")
    assert found["id"].startswith("msg_")
    return found


async def stream(f: Front, **fields: Any) -> list[dict[str, Any]]:
    """Return the events of a stream, whose order has been checked."""
    client = await f.post(PATH, {"messages": HI, "max_tokens": 500, "stream": True, **fields})
    assert client.status == 200, client.body
    events = events_of(client)
    check_order(events)
    return events


def events_of(client: Client) -> list[dict[str, Any]]:
    """Return a stream's events; the name of each is its type."""
    found = []
    for block in client.body.decode().split("\n\n")[:-1]:
        name, data = block.split("\n")
        value = json.loads(data.removeprefix("data: "))
        assert name == f"event: {value['type']}"
        found.append(value)
    return found


def check_order(events: list[dict[str, Any]]) -> None:
    """Check what Anthropic documents: one message, its blocks one after the other with a running index."""
    kinds = [event["type"] for event in events if event["type"] != "ping"]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    index, opened = -1, False
    for event in events:
        if event["type"] == "content_block_start":
            assert not opened
            index, opened = index + 1, True
        if event["type"].startswith("content_block"):
            assert opened
            assert event["index"] == index
        opened = opened and event["type"] != "content_block_stop"
    assert not opened


def assembled(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message of a stream, put together as the SDKs do."""
    found: dict[str, Any] = dict(events[0]["message"])
    blocks: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append({**event["content_block"], "json": ""})
        if event["type"] == "content_block_delta":
            add(blocks[-1], event["delta"])
        if event["type"] == "message_delta":
            found |= event["delta"]
            found["usage"] = found["usage"] | event["usage"]
    for block in blocks:
        text = block.pop("json")
        if text:
            block["input"] = json.loads(text)
    return {**found, "content": blocks}


def add(block: dict[str, Any], delta: dict[str, Any]) -> None:
    """Add one delta to its block."""
    kinds = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}
    if delta["type"] == "input_json_delta":
        block["json"] += delta["partial_json"]
    else:
        key = kinds[delta["type"]]
        block[key] += delta[key]


def without_ids(content: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return blocks without the ids of calls, which differ between requests."""
    return [{key: value for key, value in block.items() if key != "id"} for block in content]


def said(words: str) -> dict[str, Any]:
    """Return an answer's block of text."""
    return {"type": "text", "text": words, "citations": []}
