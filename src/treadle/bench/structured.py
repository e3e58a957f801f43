"""Workloads with structured answers: JSON schemas beside free text, and agents that call tools."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import msgspec

from .lorem import text
from .plan import FunctionCall, Moment, PromptMessage, Request, ToolCall
from .schemas import random_schema, random_value

Options = Mapping[str, float]


def json_requests(rng: random.Random, options: Options) -> list[Request]:
    """Two phases of `c` clients in a closed loop: first all of them free, then half of them with a schema."""
    schemas = [random_schema(rng, int(options["properties"])) for _ in range(int(options["schemas"]))]
    half, each = max(1, int(options["c"]) // 2), int(options["each"])
    first = _half(rng, options, "baseline", half) + _half(rng, options, "companion", half)
    begin = Moment(f"baseline {half - 1}.{each - 1}")
    free = _half(rng, options, "free", half, begin)
    constrained = [
        msgspec.structs.replace(
            request, max_tokens=int(options["json_tokens"]), fields=_response_format(schemas[i % len(schemas)])
        )
        for i, request in enumerate(_half(rng, options, "constrained", half, begin))
    ]
    return [*first, *free, *constrained]


def _half(rng: random.Random, options: Options, role: str, clients: int, begin: Moment | None = None) -> list[Request]:
    return [
        Request(
            f"{role} {client}.{turn}",
            (PromptMessage("user", text(rng, int(options["prompt"]))),),
            int(options["tokens"]),
            after=Moment(f"{role} {client}.{turn - 1}") if turn else begin,
            role=role,
        )
        for client in range(clients)
        for turn in range(int(options["each"]))
    ]


def _response_format(schema: dict[str, Any]) -> dict[str, Any]:
    named = {"name": "answer", "schema": schema, "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": named}}


def tool_requests(rng: random.Random, options: Options) -> list[Request]:
    """Agents of one application: a system prompt and tools that they share, then turns that each carry the whole
    conversation with its calls and results. Those are scripted, so that every server reads the same."""
    system = PromptMessage("system", text(rng, int(options["system"])))
    tools = [_tool(rng, i, int(options["properties"])) for i in range(int(options["tools"]))]
    fields = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    return [
        request
        for agent in range(int(options["agents"]))
        for request in _conversation(rng, options, agent, system, fields)
    ]


def _tool(rng: random.Random, index: int, properties: int) -> dict[str, Any]:
    name = f"{'_'.join(text(rng, 2).lower().rstrip('.').split())}_{index}"
    function = {"name": name, "description": text(rng, 8), "parameters": random_schema(rng, properties)}
    return {"type": "function", "function": function}


def _conversation(
    rng: random.Random, options: Options, agent: int, system: PromptMessage, fields: dict[str, Any]
) -> list[Request]:
    messages: tuple[PromptMessage, ...] = (system, PromptMessage("user", text(rng, int(options["turn"]))))
    requests = []
    for turn in range(int(options["turns"])):
        request = Request(
            f"{agent}.{turn}",
            messages,
            int(options["tokens"]),
            at_s=agent * options["every_s"],
            after=Moment(f"{agent}.{turn - 1}") if turn else None,
            role="later turn" if turn else "first turn",
            session=f"{agent}",
            fields=fields,
        )
        requests.append(request)
        messages += _call_and_result(rng, f"call_{agent}_{turn}", fields["tools"], int(options["turn"]))
    return requests


def _call_and_result(
    rng: random.Random, id_: str, tools: list[dict[str, Any]], words: int
) -> tuple[PromptMessage, PromptMessage]:
    function = rng.choice(tools)["function"]
    arguments = msgspec.json.encode(random_value(rng, function["parameters"])).decode()
    call = ToolCall(id_, FunctionCall(function["name"], arguments))
    return (
        PromptMessage("assistant", "", tool_calls=(call,)),
        PromptMessage("tool", text(rng, words), tool_call_id=id_),
    )
