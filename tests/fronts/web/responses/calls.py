"""Requests for responses, and checks that every answer must pass."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pydantic
from openai.types.responses import Response, ResponseStreamEvent

from tests.fronts.web.server import Front, front
from tests.fronts.web.test_tools import text
from tests.support.answers import Answer, Answers
from tests.support.asgi import Client
from treadle.core.messages import Submit
from treadle.text import TextModel

PATH = "/v1/responses"
EVENT: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseStreamEvent)
WEATHER = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'


def answering(*queue: Answer, steps: tuple[int, ...] = (1,), **settings: Any) -> Any:
    """A front with scripted answers."""
    return front(Answers(text(), *queue, steps=steps), text=text(), **settings)


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


async def send(f: Front, given: Any = "hi", **fields: Any) -> Client:
    return await f.post(PATH, {"model": "m", "input": given, "max_output_tokens": 500, **fields})


async def respond(f: Front, given: Any = "hi", **fields: Any) -> dict[str, Any]:
    """A whole response, which the official SDK's types take."""
    client = await send(f, given, **fields)
    assert client.status == 200, client.body
    Response.model_validate(client.json)
    found: dict[str, Any] = client.json
    return found


async def events(f: Front, given: Any = "hi", **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream."""
    client = await send(f, given, stream=True, **fields)
    assert client.status == 200, client.body
    return checked(client)


def checked(client: Client) -> list[dict[str, Any]]:
    """The events of a stream: numbered, named, of the official SDK's types, and equal to the response at its end."""
    found = client.events
    names = [line[7:] for line in client.body.decode().split("\n") if line.startswith("event: ")]
    assert names == [event["type"] for event in found]
    first = found[0]["sequence_number"]
    assert [event["sequence_number"] for event in found] == [*range(first, first + len(found))]
    for event in found:
        EVENT.validate_python(event)
    done = [event for event in found if event["type"] == "response.output_item.done"]
    assert [event["output_index"] for event in done] == [*range(len(done))]
    if first == 0:
        assert found[-1]["response"]["output"] == [event["item"] for event in done]
    return found


def kinds(found: Sequence[dict[str, Any]]) -> list[str]:
    """Types of events, repeated ones once, without "response."."""
    return [kind.removeprefix("response.") for kind, _ in itertools.groupby(event["type"] for event in found)]


def joined(found: Sequence[dict[str, Any]], kind: str) -> str:
    """All deltas of a kind."""
    return "".join(event["delta"] for event in found if event["type"] == f"response.{kind}.delta")


def output_text(response: dict[str, Any]) -> str:
    parts = [part for item in response["output"] if item["type"] == "message" for part in item["content"]]
    return "".join(part["text"] for part in parts)


def requests(f: Front) -> list[Submit]:
    """The requests that were answered."""
    script = f.runner.script
    assert isinstance(script, Answers)
    return script.requests


def prompt_of(f: Front, request: int = -1, model: TextModel | None = None) -> str:
    """The prompt of a request, decoded."""
    return (model or text()).decode(requests(f)[request].prompt, skip_special_tokens=False)
