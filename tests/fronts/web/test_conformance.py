"""llm-comply, a public conformance suite of three APIs, against the front with scripted answers."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fronts.web.server import front, on_port
from tests.fronts.web.test_tools import text
from tests.support.aio import in_loop
from tests.support.answers import Answers
from tests.support.images import MARKS, inline_service, vision

CALL = '<tool_call>{"name": "get_weather", "arguments": {"location": "San Francisco, CA"}}</tool_call>'


async def comply(url: str, format_: str) -> list[dict[str, Any]]:
    """The result of each test."""
    program = Path(sys.executable).parent / "llm-comply"
    options = ("--format", format_, "-u", f"{url}/v1", "-k", "none", "-m", "m", "--json")
    done = await asyncio.create_subprocess_exec(
        program, *options, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await done.communicate()
    found: list[dict[str, Any]] = json.loads(output)["results"]
    return found


@pytest.mark.parametrize(("format_", "count"), [("openai-chat", 9), ("anthropic", 9), ("open-responses", 13)])
@in_loop
async def test_all_tests_pass(format_: str, count: int) -> None:
    model = vision(text(MARKS))
    answers = Answers(model, "Hello there, friend.", by_prompt={"get_weather": CALL})
    async with front(answers, text=model, images=inline_service(), require_model=True) as f, on_port(f.app) as url:
        results = await comply(url, format_)
    failed = {one["name"]: one["errors"] for one in results if one["status"] not in ("passed", "skipped")}
    assert not failed, failed
    assert len(results) == count
    assert "Image Input" in [one["name"] for one in results if one["status"] == "passed"]
