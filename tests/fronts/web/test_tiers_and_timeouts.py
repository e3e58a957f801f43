"""`service_tier`, `timeout`, and the ids that clients give to their requests."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from tests.fronts.web.server import forever, front, says, settle
from tests.fronts.web.test_bad_input import refused
from tests.fronts.web.test_keys import key, keys
from tests.fronts.web.test_order import ended, send
from tests.support.aio import in_loop
from tests.support.asgi import Client, post
from treadle.telemetry.access_log import ACCESS

__all__ = ["keys"]  # a fixture
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HI = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("fields", "priority", "tier"),
    [
        ({"service_tier": "auto"}, 0, "default"),
        ({"service_tier": "default"}, 0, "default"),
        ({"service_tier": "flex"}, 1, "flex"),
        ({"service_tier": "priority"}, -1, "priority"),
        ({"service_tier": "flex", "priority": 0}, 0, "default"),
        ({"service_tier": "auto", "priority": 7}, 7, "flex"),
        ({"priority": 7}, 7, None),
    ],
)
@in_loop
async def test_a_tier_is_a_priority_and_the_answer_names_the_tier_that_was_used(
    fields: dict[str, Any], priority: int, tier: str | None
) -> None:
    seen: list[int] = []

    def script(request: Any, position: int) -> int:
        seen.append(request.priority)
        return says("ok")(request, position)

    async with front(script) as f:
        whole, stream = await f.chat(**fields), await f.chat(**fields, stream=True)
        text = await f.complete(**fields)
        answers = [whole.json, text.json, *stream.events[:-1]]
        assert {answer.get("service_tier") for answer in answers} == {tier}
        assert {*seen} == {priority}


@in_loop
async def test_a_key_that_may_not_go_first_is_served_as_the_default(keys: Path) -> None:
    async with front(api_keys=keys) as f:
        for who, tier in (("alice", "default"), ("boss", "priority")):
            client = await f.post(CHAT, {"messages": HI, "service_tier": "priority"}, headers=key(who))
            assert (client.status, client.json["service_tier"]) == (200, tier)


@in_loop
async def test_a_tier_of_a_large_body_counts_too() -> None:
    async with front(context=200_000) as f:
        messages = [{"role": "user", "content": "x" * 100_000}]
        client = await f.post(CHAT, {"messages": messages, "service_tier": "flex"})
        assert client.json["service_tier"] == "flex"


@in_loop
async def test_other_tiers_are_refused() -> None:
    async with front() as f:
        refused(await f.chat(service_tier="scale"), 400, "service_tier", "auto, default, flex, priority")
        refused(await f.chat(service_tier=5), 400, "service_tier", "a string")


def skips(seconds: float, position: int) -> Any:
    """A script without an end; once a choice is so long, the event loop's clock moves on."""
    loop = asyncio.get_running_loop()
    now, skipped = loop.time, set[float]()

    def script(request: Any, at: int) -> int:
        if at == position:
            skipped.add(seconds)
        return ord("x")

    loop.time = lambda: now() + sum(skipped)  # type: ignore[method-assign]
    return script


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, TEXT])
@in_loop
async def test_an_answer_is_cut_when_its_time_is_over(path: str, stream: bool) -> None:
    async with front(skips(30.0, 50), keepalive_s=60.0) as f:
        shape = {"messages": HI} if path == CHAT else {"prompt": "hi"}
        client = await f.post(path, shape | {"timeout": 30, "n": 2, "stream": stream})
        assert client.status == 200
        if stream:
            lasts = [e["choices"][0] for e in client.events[:-1] if e["choices"][0]["finish_reason"]]
        else:
            lasts = client.json["choices"]
            assert client.json["usage"]["completion_tokens"] >= 2 * 49
        assert [(c["finish_reason"], c["stop_reason"]) for c in lasts] == [("length", "timeout")] * 2
        await settle()
        assert f.idle()


@in_loop
async def test_an_answer_in_time_says_nothing_of_it() -> None:
    async with front() as f:
        choice = (await f.chat(timeout=60)).json["choices"][0]
        assert (choice["finish_reason"], "stop_reason" in choice) == ("stop", False)


@pytest.mark.parametrize("stream", [False, True])
@in_loop
async def test_a_request_that_can_not_begin_in_time_is_a_503(stream: bool) -> None:
    async with front(forever, pump=False, running=1) as f:
        first = send(f, stream=True)
        await f.step(2)
        client = await ended(post(CHAT, {"messages": HI, "timeout": 0.02, "stream": stream}).start(f.app))
        assert (client.status, client.json["error"]["code"]) == (503, "text_generation_busy")
        assert "timeout of 0.02 s" in client.json["error"]["message"]
        assert "retry-after" in client.headers
        first.leave()
        await f.step(2)
        await ended(first)
        assert f.idle()


@pytest.mark.parametrize("timeout", [0, -1, 2**31])
@in_loop
async def test_a_timeout_has_a_range(timeout: float) -> None:
    async with front() as f:
        refused(await f.chat(timeout=timeout), 400, "timeout", "above 0")


@in_loop
async def test_ids_of_a_client_are_in_its_access_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger=ACCESS)
    given: list[dict[str, str]] = [
        {"x-request-id": "trace/1", "x-client-request-id": "0f8fad5b-d9cb-469f-a165-70867728950e"},
        {"x-client-request-id": "bad id"},
    ]
    async with front() as f:
        clients: list[Client] = [await f.post(CHAT, {"messages": HI}, headers=headers) for headers in given]
    lines = [record.fields for record in caplog.records]  # type: ignore[attr-defined]
    assert [line["request"] for line in lines] == [client.headers["x-request-id"] for client in clients]
    assert (lines[0]["request"], lines[0]["client_request"]) == ("trace/1", given[0]["x-client-request-id"])
    assert lines[1]["request"].startswith("req-")
    assert "client_request" not in lines[1]
