"""The call that a fleet proposes: one that its model answers."""

from __future__ import annotations

import httpx
import pytest

from tests.fronts.web.server import front
from tests.support.aio import in_loop
from tests.support.bytes_text import bytes_text
from treadle.cli.fleet_run import FleetReporter
from treadle.fleet.fleet import takes_chats
from treadle.network_exposure import Reach


@pytest.mark.parametrize("template", [True, False])
@in_loop
async def test_a_worker_tells_whether_it_takes_chats(template: bool) -> None:
    text = bytes_text() if template else bytes_text(chat_template=None)
    async with front(text=text, require_model=True) as f:
        transport = httpx.ASGITransport(app=f.app)
        async with httpx.AsyncClient(transport=transport) as http:
            assert await takes_chats(http, "http://localhost", "m") is template


@in_loop
async def test_a_worker_that_does_not_answer_is_taken_to_chat() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("nobody", request=request)

    async with httpx.AsyncClient(transport=httpx.MockTransport(refuse)) as http:
        assert await takes_chats(http, "http://localhost", "m")


@pytest.mark.parametrize(
    ("embeds", "chats", "path"),
    [(False, True, "chat/completions"), (False, False, "completions"), (True, False, "embeddings")],
)
def test_the_proposed_call_is_one_that_the_model_answers(
    embeds: bool, chats: bool, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    reporter = FleetReporter(Reach(("http://127.0.0.1:1",), (), ()), has_key=False)
    reporter.ready("http://127.0.0.1:1", "m", embeds=embeds, chats=chats)
    assert f"curl -s http://127.0.0.1:1/v1/{path} -H" in capsys.readouterr().err
