"""SDKs and libraries against a real server of a tiny model: chats of three turns, structured output and tool calls.

The cases are those of `benchmarks/clients`, in an environment of their own (`make clients`). Each client has its number
of cases here, so that none is left out unseen.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from benchmarks.clients import sdks, servers
from benchmarks.clients.results import Row

from tests.support.clients import NODE_MODULES, PYTHON, require_clients

pytestmark = pytest.mark.timeout(300)
CASES = {
    "@anthropic-ai/sdk": 4,
    "LangChain ChatAnthropic": 2,
    "LangChain ChatOllama": 2,
    "LangChain ChatOpenAI": 9,
    "anthropic (Python)": 2,
    "litellm": 23,
    "llm": 2,
    "ollama (JavaScript)": 2,
    "ollama (Python)": 2,
    "openai (JavaScript)": 8,
    "openai (Python)": 26,
}
NOT_INSTALLED = {"Pydantic AI", "Vercel AI SDK", "Vercel AI SDK, anthropic", "Vercel AI SDK, openai", "instructor"}
"""Clients of the whole matrix alone (docs/compatibility.md)."""
CASE_S = 60.0
"""Longest time of a case: most take well under a second, and the first ones import packages."""


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    require_clients()
    folder: Path = tmp_path_factory.mktemp("sdks")
    with servers.tiny_server(folder / "tiny", folder / "server.log") as url:
        found = sdks.run(PYTHON, NODE_MODULES, url, "tiny", limit_s=CASE_S)
    assert set(found["missing"]) == NOT_INSTALLED
    return [Row(**row) for row in found["rows"]]


def test_every_installed_client_is_expected(rows: list[Row]) -> None:
    assert sorted({row.name for row in rows}) == sorted(CASES)


@pytest.mark.parametrize("client", CASES)
def test_all_cases_of_a_client_pass(
    client: str, rows: list[Row], record_property: Callable[[str, object], None]
) -> None:
    own = [row for row in rows if row.name == client]
    failed = "\n".join(row.line() for row in own if not row.passed)
    assert not failed, failed
    assert len(own) == CASES[client]
    record_property("summary", f"{client} {own[0].version}: {len(own)} cases passed")
