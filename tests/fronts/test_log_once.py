"""Warnings about requests: each once, and a bounded number of them."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from treadle.fronts import text_jobs
from treadle.fronts.log_once import MOST, LogOnce
from treadle.fronts.prepared import Prepared
from treadle.fronts.text_jobs import Tokenized, prompts_of
from treadle.fronts.web.responses import tools as response_tools
from treadle.fronts.web.responses.tools import Tools

log = logging.getLogger("treadle.made_up")


def test_a_warning_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    once = LogOnce(log)
    for _ in range(3):
        once.warn("key", "the field %s was ignored", "a")
        once.warn(("key", 2), "the field %s was ignored", "b")
    assert caplog.messages == ["the field a was ignored", "the field b was ignored"]


def test_many_warnings_end_with_a_line_that_says_so(caplog: pytest.LogCaptureFixture) -> None:
    once = LogOnce(log)
    for i in range(10 * MOST):
        once.warn(i, "the field %d was ignored", i)
    assert len(caplog.messages) == MOST + 1
    assert "further ones are not logged" in caplog.messages[-1]


def test_tools_without_an_enforced_schema_are_reported_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(text_jobs, "_loose_tools", LogOnce(text_jobs.log))
    params: Any = None  # prompts within the context need none
    limits: Any = type("Limits", (), {"context": 10})
    for names in ("a", "ab", "ba"):
        loose = dict.fromkeys(names, "properties.x.uniqueItems is not supported")
        prompts_of(Tokenized([0], [b""], [], Prepared(loose_tools=loose)), params, limits, "messages")
    assert [message.split(" may")[0] for message in caplog.messages] == ["calls of the tool a", "calls of the tool b"]


def test_tools_that_the_server_does_not_run_are_reported_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(response_tools, "_hosted_tools", LogOnce(response_tools.log))
    for _ in range(2):
        Tools().read([{"type": "web_search"}, {"type": "web_search_20260101"}])
    assert [message.split(", ")[0] for message in caplog.messages] == [
        "requests have the tool web_search",
        "requests have the tool web_search_20260101",
    ]
    for i in range(10 * MOST):
        Tools().read([{"type": f"web_search_{i}"}])
    assert len(caplog.messages) == MOST + 1
