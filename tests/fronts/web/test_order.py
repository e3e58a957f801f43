"""The order of a request: refusals before work, headers after admission, everything taken back when the client goes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.fronts.web.server import Front, forever, front, settle
from tests.support.aio import in_loop
from tests.support.asgi import Client, post
from treadle.engine.client import EngineClient
from treadle.engine.status import status_of
from treadle.fronts.web import app as app_module

CHAT = "/v1/chat/completions"
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
LONG: dict[str, Any] = {"messages": [{"role": "user", "content": "x" * 1000}]}


def send(f: Front, **fields: Any) -> Client:
    return post(CHAT, HI | fields).start(f.app)


async def ended(client: Client) -> Client:
    assert client.task is not None
    await client.task
    return client


@in_loop
async def test_no_header_goes_out_before_the_scheduler_has_admitted_the_request() -> None:
    """D2: a waiter whose time is up still gets a plain 503."""
    async with front(forever, pump=False, running=1) as f:
        first = send(f, stream=True)
        await f.step(2)
        assert first.status == 200
        second = send(f, stream=True)
        await f.step(5)
        assert second.status is None
        first.leave()
        await f.step(2)
        assert second.status == 200
        second.leave()
        await f.step(2)
        await asyncio.gather(ended(first), ended(second))
        assert f.idle()


@in_loop
async def test_a_refusal_comes_before_tokenizing_and_says_when_to_come_again() -> None:
    """D1: no room is a 503 at once, with a code and Retry-After."""
    async with front(forever, pump=False, running=1, waiting=0) as f:
        first = send(f, stream=True)
        await f.step(2)
        runs = f.texts.pool.runs
        for stream in (False, True):
            client = await f.chat(stream=stream)
            assert client.status == 503
            assert client.json["error"]["code"] == "text_generation_busy"
            assert client.headers["content-type"] == "application/json"
            assert int(client.headers["retry-after"]) >= 1
            assert 1 <= int(client.headers["retry-after-ms"]) <= 1000 * int(client.headers["retry-after"])
        assert f.texts.pool.runs == runs
        first.leave()
        await f.step(2)
        await ended(first)


@pytest.mark.parametrize("named", [True, False], ids=["ticket", "same request"])
@in_loop
async def test_the_place_that_was_promised_is_kept_for_the_client_that_comes_back(named: bool) -> None:
    """D12: a newcomer does not get it, and the SDKs need no change."""
    async with front(forever, pump=False, running=1, waiting=0) as f:
        first = send(f, stream=True)
        await f.step(2)
        refused = await post(CHAT, HI, headers={"x-stainless-retry-count": "0"}).run(f.app)
        assert refused.status == 503
        first.leave()
        await f.step(2)
        await ended(first)
        newcomer = await post(CHAT, HI, headers={"x-stainless-retry-count": "0", "user-agent": "another"}).run(f.app)
        assert newcomer.status == 503
        assert "promised to requests that came earlier" in newcomer.json["error"]["message"]
        ticket = refused.headers["x-treadle-ticket"]
        key = {"x-treadle-ticket": ticket} if named else {"x-stainless-retry-count": "1"}
        back = post(CHAT, HI | ({"stream": True} if named else {}), headers=key).start(f.app)
        await f.step(3)
        assert f.engine.gate.rows == 1
        assert f.engine.gate.statistics()["promises"]["kept"] == 1
        back.leave()
        await f.step(2)
        await ended(back)
        assert f.idle()


@in_loop
async def test_where_nobody_could_come_in_a_request_is_refused_before_its_body_is_read() -> None:
    """D1: a refusal costs next to nothing, however large the body. Other routes, and the key, come first."""
    async with front(forever, pump=False, running=1, waiting=0, api_key="k") as f:
        key = {"authorization": "Bearer k"}
        first = post(CHAT, HI | {"stream": True}, headers=key).start(f.app)
        await f.step(2)
        endless = Client("POST", CHAT, [b"{", b" " * 1000, b"never asked for"], key)
        refused = await endless.run(f.app)
        assert (refused.status, refused.json["error"]["code"]) == (503, "text_generation_busy")
        assert len(endless._parts) == 3, "nobody has taken a piece of the body"
        assert f.telemetry.metrics.value("treadle_refused_total", {"reason": "queue_full"}) == 1
        assert (await Client("POST", CHAT, b"{}").run(f.app)).status == 401
        assert (await Client("GET", CHAT, headers=key).run(f.app)).status == 405
        first.leave()
        await f.step(2)
        await ended(first)


@pytest.mark.parametrize("stream", [False, True])
@in_loop
async def test_a_waiter_whose_time_is_up_is_refused_before_the_first_byte(stream: bool) -> None:
    """D2."""
    async with front(forever, pump=False, running=1, max_wait_s=0.0) as f:
        first = send(f, stream=True)
        await f.step(2)
        second = send(f, stream=stream)
        await f.step(3)
        await ended(second)
        assert second.status == 503
        assert second.json["error"]["code"] == "text_generation_busy"
        assert "retry-after" in second.headers
        first.leave()
        await f.step(2)
        await ended(first)
        assert f.idle()


@in_loop
async def test_while_the_model_loads_every_request_is_a_503_with_retry_after() -> None:
    async with front() as f:
        f.texts.loaded = None
        client = await f.chat()
        assert client.status == 503
        assert client.json["error"]["code"] == "engine_unavailable"
        assert "retry-after" in client.headers


@in_loop
async def test_a_draining_server_refuses_new_work_and_ends_what_runs() -> None:
    """C3."""
    async with front(pump=False) as f:
        running = send(f)
        await f.step(2)
        f.engine.drain()
        refused = await f.chat()
        assert (refused.status, refused.json["error"]["code"]) == (503, "server_stopping")
        ready = await f.get("/health/ready")
        assert (ready.status, ready.json["error"]["code"]) == (503, "server_stopping")
        assert ready.headers["retry-after"] == refused.headers["retry-after"]
        assert (await f.get("/health/live")).status == 200
        await f.step(20)
        assert (await ended(running)).status == 200


async def to_phase(f: Front, phase: str, client: Client) -> None:
    """Move the server until `client`'s request is in `phase`."""
    if phase == "body":
        return
    await settle()
    if phase == "tokenizing":
        return
    if phase == "prefill":
        await f.step(3)
        assert status_of(f.engine)["requests"][-1]["phase"] == "prefill"
    if phase == "decode":
        await f.step(25)
        assert status_of(f.engine)["requests"][-1]["phase"] == "decode"
    if phase == "waiting":
        await f.step(2)
        assert status_of(f.engine)["requests"][-1]["phase"] == "waiting"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["body", "tokenizing", "waiting", "prefill", "decode"])
@in_loop
async def test_a_client_may_leave_in_every_phase_and_leaves_nothing_behind(phase: str, stream: bool) -> None:
    """B3, B6: within one step its slot is free and nobody else noticed."""
    async with front(forever, pump=False, running=1) as f:
        never = asyncio.Event()
        other = None
        if phase == "waiting":
            other = send(f, stream=True)
            await f.step(2)
        if phase == "tokenizing":
            f.texts.pool.gate = never.wait
        client = post(CHAT, [b"{", b"", b""] if phase == "body" else LONG | {"stream": stream})
        if phase == "body":
            client._parts = client._parts[:1]
        client.start(f.app)
        await to_phase(f, phase, client)
        client.leave()
        await f.step(1)
        await ended(client)
        if other is not None:
            assert f.engine.gate.rows == 1
            other.leave()
            await f.step(1)
            await ended(other)
        assert f.idle()
        assert not client.complete


@pytest.mark.parametrize("stream", [False, True])
@in_loop
async def test_an_engine_that_fails_for_good_ends_every_request_with_its_error(stream: bool) -> None:
    """B7: nobody waits on something that will not come."""
    async with front(forever, pump=False) as f:
        client = send(f, stream=stream)
        await f.step(5)
        f.engine.supervisor._fail("it died too often")
        await ended(client)
        error = client.events[-1]["error"] if stream else client.json["error"]
        assert error["code"] == "engine_died"
        assert client.complete
        assert client.status == (200 if stream else 500)


@in_loop
async def test_a_request_the_model_can_not_compute_fails_alone() -> None:
    """B7: its terminal event is an error event; the stream ends without [DONE]."""
    async with front(forever, pump=False) as f:
        client = send(f, stream=True)
        await f.step(3)
        f.runner.fail = ValueError("bad row")
        await f.step(12)
        f.runner.fail = None
        await f.step(2)
        await ended(client)
        assert client.events[-1]["error"]["code"] == "engine_step_failed"
        assert f.engine.health().ready
        client = send(f, max_tokens=2)
        await f.step(10)
        assert (await ended(client)).status == 200


@in_loop
async def test_one_thousand_disconnects_at_any_byte_leave_nothing() -> None:
    async with front(running=4, waiting=4) as f:
        for i in range(1000):
            client = post(CHAT, HI | {"stream": i % 2 == 0, "n": 1 + i % 3}, leave_after=1 + (i * 37) % 3000)
            await client.run(f.app)
        await settle()
        assert f.idle()


@in_loop
async def test_status_shows_the_request_under_the_id_its_client_knows() -> None:
    """D3."""
    async with front(forever, pump=False) as f:
        client = send(f, stream=True)
        await f.step(5)
        await client.until(lambda c: len(c.events) > 1)
        (request,) = (await f.get("/v1/status")).json["requests"]
        assert request["id"] == client.events[0]["id"]
        assert request["kind"] == "chat"
        client.leave()
        await f.step(1)
        await ended(client)


def test_the_front_asks_the_client_for_nothing_it_has_not() -> None:
    """A change of the engine client's names shows here and not in production."""
    for name in ("reserve", "check_room", "health"):
        assert callable(getattr(EngineClient, name))


@in_loop
async def test_a_body_counts_until_it_is_tokenized_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Complete bodies used to leave the budget while they waited for a text worker."""
    monkeypatch.setattr(app_module, "BODIES_BYTES", 4 * 100_000)
    large = {"prompt": "x" * 70_000, "stream": True, "max_tokens": 4000}
    async with front(forever, pump=False, context=100_000) as f:
        opened = asyncio.Event()
        f.texts.pool.gate = opened.wait
        first = post("/v1/completions", large).start(f.app)
        await settle()
        refused = await post("/v1/completions", large).run(f.app)
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        assert "your large requests" in refused.json["error"]["message"]
        assert f.engine.gate.statistics()["refused"]["body_bytes"] == 1
        small = post("/v1/completions", large | {"prompt": "x" * 60_000}).start(f.app)
        opened.set()
        await settle()
        third = post("/v1/completions", large).start(f.app)
        await f.step(2)
        for client in (first, small, third):
            assert client.status in (None, 200), client.body
            client.leave()
        await f.step(2)
        await asyncio.gather(*map(ended, (first, small, third)))
        assert f.idle()
