"""Cancels of running requests by their ids."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from tests.fronts.web.server import Front, forever, front
from tests.fronts.web.test_keys import key, keys
from tests.fronts.web.test_order import LONG, ended, to_phase
from tests.support.aio import in_loop
from tests.support.asgi import Client, post
from treadle.telemetry.access_log import ACCESS

__all__ = ["keys"]  # a fixture
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


def sent(f: Front, headers: dict[str, str] | None = None, path: str = CHAT, **fields: Any) -> Client:
    return post(path, LONG | fields, headers=headers or {}).start(f.app)


async def cancelled(f: Front, request_id: str, headers: dict[str, str] | None = None) -> Client:
    return await f.post(f"/v1/requests/{request_id}/cancel", {}, headers=headers or {})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
@in_loop
async def test_a_cancelled_answer_ends_with_abort_and_its_slot_is_free_in_the_next_step(
    phase: str, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger=ACCESS)
    async with front(forever, pump=False, running=1) as f:
        client = sent(f, {"x-request-id": "mine"}, stream=stream, n=1)
        await to_phase(f, phase, client)
        done = await cancelled(f, "mine")
        assert (done.status, done.json) == (200, {"request_id": "mine", "status": "cancelled"})
        await f.step(1)
        assert f.idle()
        await ended(client)
        assert (client.status, client.headers["x-request-id"]) == (200, "mine")
        if stream:
            assert client.events[-1] == "[DONE]"
            choice = client.events[-2]["choices"][0]
            text = "".join(event["choices"][0]["delta"].get("content") or "" for event in client.events[:-1])
        else:
            choice, usage = client.json["choices"][0], client.json["usage"]
            text = choice["message"]["content"]
            assert usage["completion_tokens"] == len(text)
        assert choice["finish_reason"] == "abort"
        assert bool(text) == (phase == "decode")
        assert (await cancelled(f, "mine")).status == 404
    lines = [record.fields for record in caplog.records]  # type: ignore[attr-defined]
    assert [line["error"] for line in lines if line["path"] == CHAT] == ["request_cancelled"]


@in_loop
async def test_the_id_of_the_answer_cancels_all_of_its_choices() -> None:
    async with front(forever, pump=False) as f:
        client = sent(f, stream=True, n=3)
        await f.step(70)
        assert (await cancelled(f, client.events[0]["id"])).status == 200
        await f.step(1)
        await ended(client)
        assert [e["choices"][0]["finish_reason"] for e in client.events[-4:-1]] == ["abort"] * 3
        assert f.idle()


@pytest.mark.parametrize("phase", ["tokenizing", "waiting"])
@in_loop
async def test_a_request_that_is_cancelled_before_it_runs_is_a_499(phase: str) -> None:
    async with front(forever, pump=False, running=1) as f:
        gate = asyncio.Event()
        other = sent(f, {"x-request-id": "other"}) if phase == "waiting" else None
        await f.step(2)
        if phase == "tokenizing":
            f.texts.pool.gate = gate.wait
        client = sent(f, {"x-request-id": "a/b:c"}, stream=True)
        await to_phase(f, phase, client)
        assert (await cancelled(f, "a/b:c")).status == 200
        gate.set()
        await f.step(1)
        await ended(client)
        assert (client.status, client.json["error"]["code"]) == (499, "request_cancelled")
        if other is not None:
            assert (await cancelled(f, "other")).status == 200
            await f.step(1)
            await ended(other)
        assert f.idle()


@pytest.mark.parametrize("stream", [False, True])
@in_loop
async def test_each_dialect_says_that_its_answer_was_cancelled(stream: bool) -> None:
    async with front(forever, pump=False) as f:
        mine, fields = {"x-request-id": "mine"}, {"model": "m", "max_tokens": 4000, "stream": stream}
        messages, response, ollama = (
            post("/v1/messages", LONG | fields, headers=mine).start(f.app),
            post("/v1/responses", {"model": "m", "input": "hi", "stream": stream}, headers=mine).start(f.app),
            post("/api/chat", {"messages": LONG["messages"], "stream": stream}, headers=mine).start(f.app),
        )
        await f.step(70)
        assert (await cancelled(f, "mine")).status == 200
        await f.step(1)
        for client in (messages, response, ollama):
            await ended(client)
        assert f.idle()
        error = messages.events[-1] if stream else messages.json
        assert (messages.status, error["type"]) == (200 if stream else 499, "error")
        assert error["error"]["type"] == "api_error"
        assert "cancelled by its id" in error["error"]["message"]
        assert b'stop_reason":"' not in messages.body
        answer = response.events[-1]["response"] if stream else response.json
        assert (answer["status"], answer["incomplete_details"]) == ("cancelled", None)
        assert json.loads(ollama.body.splitlines()[-1])["done_reason"] == "abort"


@in_loop
async def test_requests_with_the_same_id_run_side_by_side_and_are_cancelled_together() -> None:
    async with front(forever, pump=False) as f:
        both = [sent(f, {"x-request-id": "trace"}, stream=True) for _ in range(2)]
        await f.step(25)
        assert (await cancelled(f, "trace")).status == 200
        await f.step(1)
        assert [(await ended(client)).events[-1] for client in both] == ["[DONE]"] * 2
        assert f.idle()


@in_loop
async def test_only_the_same_key_and_admins_cancel_a_request(keys: Path) -> None:
    async with front(forever, pump=False, api_keys=keys) as f:
        for who, status in (("slow", 404), ("alice", 200), ("boss", 200)):
            client = sent(f, key("alice") | {"x-request-id": "r"}, stream=True)
            await f.step(25)
            answer = await cancelled(f, "r", key(who))
            assert answer.status == status
            if status == 404:
                assert answer.json["error"]["code"] == "request_not_found"
                assert (await cancelled(f, "r", key("alice"))).status == 200
            await f.step(1)
            await ended(client)
        assert f.idle()


@in_loop
async def test_a_scored_prompt_that_is_cut_short_has_the_scores_it_got() -> None:
    async with front(forever, pump=False) as f:
        fields = {"prompt": "x" * 200, "echo": True, "logprobs": 1, "max_tokens": 50}
        clients = [
            post(TEXT, fields | {"stream": stream}, headers={"x-request-id": "r"}).start(f.app)
            for stream in (False, True)
        ]
        await f.step(3)
        assert (await cancelled(f, "r")).status == 200
        await f.step(1)
        whole, stream = [await ended(client) for client in clients]
        choice = whole.json["choices"][0]
        assert (choice["finish_reason"], choice["text"]) == ("abort", "x" * 200)
        assert choice["logprobs"]["token_logprobs"][0] is None
        assert stream.events[-2]["choices"][0]["finish_reason"] == "abort"
        assert f.idle()
