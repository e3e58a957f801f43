"""Prompts of a coding agent's successive requests: each begins with the whole one before it, in tokens, so that only
what is new is computed."""

from __future__ import annotations

import copy
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from tests.fronts.web.anthropic.scenes import CALL, PATH, TOOLS, message, text
from tests.fronts.web.server import front
from tests.support.aio import in_loop
from tests.support.answers import Answers
from tests.support.bytes_text import bytes_text
from treadle.fronts.web.anthropic.messages import ParsedMessages

TEMPLATES = Path(__file__).parents[3] / "text" / "formats" / "templates"
RECORDED = json.loads((Path(__file__).parent / "claude_code.json").read_text(encoding="utf-8"))
MARK = {"type": "ephemeral"}


def session(turns: int, *, thinking: bool = True) -> list[dict[str, Any]]:
    """The bodies of an agent's requests: the mark for the cache moves to the last block, a string becomes a block to
    carry it, and reminders come as system turns at the end."""
    body = {**RECORDED["body"], "messages": RECORDED["body"]["messages"][:2]}
    bodies = []
    for turn in range(turns):
        bodies.append(marked(body))
        answer = [{"type": "tool_use", "id": f"toolu_{turn}", "name": "Bash", "input": {"command": f"ls {turn}"}}]
        if thinking:
            answer = [{"type": "thinking", "thinking": f"try {turn}", "signature": "s"}, *answer]
        result = {"type": "tool_result", "tool_use_id": f"toolu_{turn}", "content": f"file {turn}", "is_error": False}
        new = [{"role": "assistant", "content": answer}, {"role": "user", "content": [result]}]
        if turn % 2:
            new.append({"role": "system", "content": f"A reminder, number {turn}."})
        body = {**body, "messages": [*body["messages"], *new]}
    return bodies


def marked(body: dict[str, Any]) -> dict[str, Any]:
    """A copy whose last user's message carries the mark, on a block."""
    copied = copy.deepcopy(body)
    for system in copied["system"]:
        system.pop("cache_control", None)
    copied["system"][len(copied["messages"]) % 3]["cache_control"] = MARK
    last = [m for m in copied["messages"] if m["role"] == "user"][-1]
    last["content"][-1]["cache_control"] = MARK
    return copied


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize(
    "name", ["qwen3", "hermes", "llama3", "harmony", "qwen3_coder", "glm_45", "mistral_v13", "gemma3"]
)
def test_each_prompt_of_a_session_begins_with_the_one_before(name: str, thinking: bool) -> None:
    model = bytes_text(100_000, chat_template=(TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8"))
    prompts = [
        ParsedMessages(body).prompt.rendered(model, lambda stage: None, 100_000).ids
        for body in session(6, thinking=thinking)
    ]
    for before, after in itertools.pairwise(prompts):
        assert len(after) > len(before)
        assert model.decode(after, skip_special_tokens=False).startswith(
            model.decode(before, skip_special_tokens=False)
        )
        assert list(after[: len(before)]) == list(before)


@in_loop
async def test_a_recorded_request_of_claude_code_is_answered() -> None:
    answers = Answers(text(), "<think>hm</think>Done.", "<think>hm</think>Done.")
    async with front(answers, text=text()) as f:
        for stream in (True, False):
            body = {**RECORDED["body"], "stream": stream}
            client = await f.post(f"{PATH}", body, headers=RECORDED["headers"])
            assert client.status == 200, client.body
        blocks = client.json["content"]
        assert [block["type"] for block in blocks] == ["thinking", "text"]
        prompt = text().decode(answers.requests[0].prompt, skip_special_tokens=False)
        assert "x-anthropic-billing-header" not in prompt


@in_loop
async def test_an_answer_that_is_sent_back_is_in_the_next_prompt_as_it_was_generated() -> None:
    generated = f"<think>two and two</think>Let me look.{CALL}"
    answers = Answers(text(), generated, "Done.")
    async with front(answers, text=text()) as f:
        messages: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
        fields: dict[str, Any] = {"tools": TOOLS, "thinking": {"type": "adaptive"}}
        found = await message(f, messages=messages, **fields)
        result = {"type": "tool_result", "tool_use_id": found["content"][-1]["id"], "content": "sun"}
        messages += [{"role": "assistant", "content": found["content"]}, {"role": "user", "content": [result]}]
        await message(f, messages=messages, **fields)
        before, after = (text().decode(request.prompt, skip_special_tokens=False) for request in answers.requests)
        assert after.startswith(before + generated)
