"""Parts of requests that are left out, and the lines that say so."""

from __future__ import annotations

import pytest

from tests.fronts.web.anthropic.scenes import COUNT, HI, PATH, TOOLS, answering
from tests.support.aio import in_loop
from treadle.fronts.log_once import MOST
from treadle.fronts.web.anthropic import messages
from treadle.fronts.web.anthropic.reports import Reports


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "REPORTS", Reports())


@pytest.mark.parametrize("padding", ["", "x" * 70_000])
@in_loop
async def test_unknown_fields_and_searches_are_logged_once(padding: str, caplog: pytest.LogCaptureFixture) -> None:
    search = {"type": "tool_search_tool_bm25_20251119", "name": "tool_search_tool_bm25"}
    body = {"messages": HI, "max_tokens": 5, "made_up": 1, "metadata": {"user_id": padding}, "tools": [search, *TOOLS]}
    async with answering("Hello.") as f:
        for path in (PATH, COUNT, PATH):
            assert (await f.post(path, body)).status == 200
    lines = [record.getMessage() for record in caplog.records if record.name.endswith("anthropic.reports")]
    assert len(lines) == 2
    assert "'made_up'" in lines[0]
    assert "tool_search_tool_bm25_20251119" in lines[1]


def test_the_log_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    reports = Reports()
    for i in range(10 * MOST):
        reports.unknown_fields([f"field {i}"])
    assert len(caplog.records) == MOST + 1
    assert "further ones are not logged" in caplog.messages[-1]
