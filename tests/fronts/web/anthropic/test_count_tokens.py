"""Counts of tokens: always those that the answer to the same request reports."""

from __future__ import annotations

import random
from typing import Any

from tests.fronts.web.anthropic.scenes import COUNT, HI, PATH, TOOLS, text
from tests.fronts.web.server import front, says
from tests.support.aio import in_loop

WORDS = ("sun", "Rome", "é", "<think>", "<|im_end|>", "\n", "日本", "")


def phrase(draw: random.Random) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(draw.randint(0, 6)))


def texts(draw: random.Random) -> Any:
    """A string, or blocks of text."""
    if draw.random() < 0.5:
        return phrase(draw)
    marks = [{}, {"cache_control": {"type": "ephemeral"}}]
    return [{"type": "text", "text": phrase(draw), **draw.choice(marks)} for _ in range(draw.randint(1, 3))]


def exchange(draw: random.Random, number: int) -> list[dict[str, Any]]:
    """Some messages that may follow each other."""
    call_id = f"toolu_{number}"
    call = {"type": "tool_use", "id": call_id, "name": "weather", "input": {"city": phrase(draw)}}
    thought = {"type": "thinking", "thinking": phrase(draw), "signature": "s"}
    result = {"type": "tool_result", "tool_use_id": call_id, "content": texts(draw), "is_error": draw.random() < 0.3}
    blocks = [*([thought] if draw.random() < 0.5 else []), call]
    return draw.choice(
        [
            [{"role": "user", "content": texts(draw)}],
            [{"role": "assistant", "content": texts(draw)}, {"role": "user", "content": texts(draw)}],
            [{"role": "assistant", "content": blocks}, {"role": "user", "content": [result]}],
            [{"role": "system", "content": texts(draw)}],
        ]
    )


def request(draw: random.Random) -> dict[str, Any]:
    messages = [message for number in range(draw.randint(1, 4)) for message in exchange(draw, number)]
    body: dict[str, Any] = {"model": "claude-x", "messages": [*HI, *messages]}
    if draw.random() < 0.2:
        body["messages"].append({"role": "assistant", "content": "It is"})
    options = {
        "system": texts(draw),
        "tools": TOOLS,
        "thinking": draw.choice([{"type": "adaptive"}, {"type": "disabled"}, {"type": "enabled", "budget_tokens": 9}]),
        "output_config": {"effort": draw.choice(["low", "high"])},
    }
    body |= {name: value for name, value in options.items() if draw.random() < 0.5}
    if "tools" in body:
        body["tool_choice"] = draw.choice([{"type": "auto"}, {"type": "none"}, None])
    return body


@in_loop
async def test_a_count_is_what_the_answer_reports_for_random_requests() -> None:
    draw = random.Random(1900)
    async with front(says("Hi."), text=text(), prefix_cache=True) as f:
        for _ in range(150):
            body = request(draw)
            counted = await f.post(COUNT, body)
            assert counted.status == 200, (body, counted.body)
            answer = await f.post(PATH, {**body, "max_tokens": 2})
            assert answer.status == 200, (body, answer.body)
            usage = answer.json["usage"]
            kinds = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
            assert counted.json == {"input_tokens": sum(usage[kind] for kind in kinds)}
        assert f.idle()


@in_loop
async def test_a_count_takes_no_slot_and_needs_no_engine() -> None:
    async with front(says("Hi.")) as f:
        f.engine.admission.capabilities = None
        client = await f.post(COUNT, {"messages": HI})
        assert client.json["input_tokens"] > 2
        assert not f.runner.rows
        assert f.engine.gate.rows == 0


@in_loop
async def test_a_prompt_beyond_the_context_is_counted() -> None:
    async with front(context=64) as f:
        body = {"messages": [{"role": "user", "content": "x" * 500}]}
        assert (await f.post(COUNT, body)).json["input_tokens"] > 500
