"""Pages of allowed origins: their browsers' questions, and headers on whatever they are answered."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tests.fronts.web.server import Front, forever, front
from tests.support.aio import in_loop
from tests.support.asgi import Client, post
from treadle.fronts.web.answer import Answer

PAGE = "http://localhost:3000"
CHAT = "/v1/chat/completions"
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
STAINLESS = (
    "authorization,content-type,x-stainless-arch,x-stainless-lang,x-stainless-os,x-stainless-package-version,"
    "x-stainless-retry-count,x-stainless-runtime,x-stainless-runtime-version,x-stainless-timeout"
)


async def asks(f: Front, origin: str = PAGE, **more: str) -> Client:
    headers = {"origin": origin, "access-control-request-method": "POST", **more}
    return await Client("OPTIONS", CHAT, headers=headers).run(f.app)


def read_by(client: Client) -> str | None:
    return client.headers.get("access-control-allow-origin")


@pytest.mark.parametrize("key", [None, "secret"])
@in_loop
async def test_a_preflight_of_an_allowed_origin_is_answered_without_a_key(key: str | None) -> None:
    async with front(cors_origin=(PAGE,), api_key=key) as f:
        client = await asks(f, **{"access-control-request-headers": STAINLESS})
        assert (client.status, client.body, read_by(client)) == (204, b"", PAGE)
        assert client.headers["access-control-allow-methods"] == "GET, HEAD, POST, DELETE"
        assert client.headers["access-control-allow-headers"] == STAINLESS
        assert int(client.headers["access-control-max-age"]) > 0
        assert client.headers["vary"] == "Origin"
        assert "access-control-allow-private-network" not in client.headers
        assert "access-control-allow-credentials" not in client.headers


@pytest.mark.parametrize("origin", ["http://localhost:3001", "https://localhost:3000", "http://evil.example", "null"])
@in_loop
async def test_a_preflight_of_another_origin_is_refused_with_the_flag(origin: str) -> None:
    async with front(cors_origin=(PAGE,)) as f:
        client = await asks(f, origin)
        assert (client.status, client.json["error"]["code"], read_by(client)) == (403, "foreign_site", None)
        assert "--cors-origin" in client.json["error"]["message"]
        assert client.headers["vary"] == "Origin"


@in_loop
async def test_a_preflight_from_a_page_into_the_private_network_is_allowed() -> None:
    async with front(cors_origin=(PAGE,)) as f:
        client = await asks(f, **{"access-control-request-private-network": "true"})
        assert client.headers["access-control-allow-private-network"] == "true"


@pytest.mark.parametrize("names", ["a\nb", "a,,b", "a b", "", "\u00e4", "x" * 5000])
@in_loop
async def test_only_names_of_headers_are_echoed(names: str) -> None:
    async with front(cors_origin=(PAGE,)) as f:
        client = await asks(f, **{"access-control-request-headers": names})
        assert client.status == 204
        assert "access-control-allow-headers" not in client.headers


@in_loop
async def test_options_without_a_question_is_no_preflight() -> None:
    async with front(cors_origin=(PAGE,)) as f:
        assert (await Client("OPTIONS", CHAT, headers={"origin": PAGE}).run(f.app)).status == 405
        asked = {"access-control-request-method": "POST"}
        assert (await Client("OPTIONS", CHAT, headers=asked).run(f.app)).status == 405


@pytest.mark.parametrize("stream", [False, True])
@in_loop
async def test_a_page_of_an_allowed_origin_reads_its_answer(stream: bool) -> None:
    async with front(cors_origin=("http://other", "HTTP://LocalHost:3000")) as f:
        client = await f.post(CHAT, HI | {"stream": stream}, headers={"origin": PAGE})
        assert (client.status, read_by(client)) == (200, PAGE)
        exposed = client.headers["access-control-expose-headers"].split(", ")
        assert {
            "x-request-id",
            "retry-after",
            "retry-after-ms",
            "x-treadle-ticket",
            "x-ratelimit-remaining-requests",
        } <= {*exposed}
        assert client.headers["vary"] == "Origin"


@in_loop
async def test_a_page_reads_refusals_too() -> None:
    """A 401, a 404, a 400, and the 403 of a host name."""
    async with front(cors_origin=(PAGE,), api_key="k", allowed_host=("a.lan",)) as f:
        key = {"origin": PAGE, "authorization": "Bearer k"}
        for status, client in (
            (401, await f.post(CHAT, HI, headers={"origin": PAGE})),
            (404, await f.get("/nope", headers=key)),
            (400, await f.post(CHAT, {}, headers=key)),
        ):
            assert (client.status, read_by(client)) == (status, PAGE)
        client = Client("GET", "/v1/models")
        client._headers = [(b"host", b"b.lan"), (b"origin", PAGE.encode())]
        await client.run(f.app)
        assert (client.status, read_by(client)) == (403, PAGE)


@in_loop
async def test_a_page_reads_that_the_server_is_busy_and_for_how_long() -> None:
    async with front(forever, pump=False, running=1, waiting=0, cors_origin=(PAGE,)) as f:
        first = post(CHAT, HI | {"stream": True}).start(f.app)
        await f.step(2)
        refused = await f.post(CHAT, HI, headers={"origin": PAGE})
        assert (refused.status, read_by(refused)) == (503, PAGE)
        assert "retry-after" in refused.headers["access-control-expose-headers"]
        first.leave()
        await f.step(2)
        assert first.task is not None
        await first.task


@in_loop
async def test_a_page_reads_that_the_server_failed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(*_: object) -> None:
        raise RuntimeError("ours")

    caplog.set_level(logging.CRITICAL)
    monkeypatch.setattr(Answer, "__call__", fail)
    async with front(cors_origin=(PAGE,)) as f:
        client = await f.post(CHAT, HI, headers={"origin": PAGE})
        assert (client.status, read_by(client)) == (500, PAGE)


@in_loop
async def test_others_read_nothing_though_some_may() -> None:
    """S2, and a cache between must not give one page what was for another."""
    async with front(cors_origin=(PAGE,)) as f:
        for headers in ({"origin": "http://evil.example"}, {}):
            client = await f.get("/v1/models", headers=headers)
            assert (client.status, read_by(client), client.headers["vary"]) == (200, None, "Origin")
        client = await f.post(CHAT, HI, headers={"origin": "http://evil.example"})
        assert (client.status, read_by(client)) == (403, None)


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "app://any"])
@in_loop
async def test_the_star_is_every_site_and_never_credentials(origin: str) -> None:
    async with front(cors_origin=("*",)) as f:
        for client in (await asks(f, origin), await f.post(CHAT, HI, headers={"origin": origin})):
            assert client.status in (200, 204)
            assert read_by(client) == "*"
            assert "access-control-allow-credentials" not in client.headers
        assert read_by(await f.get("/v1/models")) is None


@in_loop
async def test_an_allowed_page_is_no_way_around_the_host_check_or_the_key() -> None:
    async with front(cors_origin=("*",), api_key="k") as f:
        assert (await f.post(CHAT, HI, headers={"origin": PAGE})).status == 401
    async with front(cors_origin=("*",)) as f:
        client = Client("POST", CHAT, b"{}")
        client._headers = [(b"host", b"evil.example"), (b"origin", b"http://evil.example")]
        assert (await client.run(f.app)).status == 403
