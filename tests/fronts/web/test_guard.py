from __future__ import annotations

import pytest

from tests.fronts.web.server import Front, front
from tests.support.aio import in_loop
from tests.support.asgi import Client

HI = {"messages": [{"role": "user", "content": "hi"}]}


async def call(f: Front, method: str, path: str, **headers: str) -> Client:
    named = {k.replace("_", "-"): v for k, v in headers.items()}
    return await Client(method, path, b'{"prompt": "x"}', named).run(f.app)


@in_loop
async def test_every_route_but_liveness_needs_the_key() -> None:
    """S1: enumerated from the app itself, so that a new route can't be forgotten."""
    async with front(api_key="secret") as f:
        routes = [
            (m, r.path) for r in f.app.routes for m in (getattr(r, "methods", None) or ["GET"]) if hasattr(r, "path")
        ]
        app_paths = set(f.app.openapi()["paths"]) | {"/docs", "/openapi.json", "/nope"}
        assert len(app_paths) >= 10
        for method, path in [*routes, *(("GET", p) for p in app_paths), ("POST", "/v1/chat/completions")]:
            client = await call(f, method, path)
            open_ = path == "/health/live" and method in ("GET", "HEAD")
            assert client.status == (200 if open_ else 401), path
            if not open_:
                assert client.json["error"]["code"] == "invalid_api_key"
                assert client.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    "headers",
    [{"authorization": "Bearer secret"}, {"authorization": "bearer  secret"}, {"x_api_key": "secret"}],
)
@in_loop
async def test_the_key_opens(headers: dict[str, str]) -> None:
    async with front(api_key="secret") as f:
        assert (await call(f, "GET", "/v1/models", **headers)).status == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer wrong"},
        {"authorization": "secret"},
        {"authorization": "Basic secret"},
        {"authorization": "Bearer "},
        {"authorization": ""},
        {"x_api_key": ""},
        {"x_api_key": "secretsecret"},
    ],
)
@in_loop
async def test_nothing_else_does(headers: dict[str, str]) -> None:
    async with front(api_key="secret") as f:
        assert (await call(f, "GET", "/v1/models", **headers)).status == 401


@pytest.mark.parametrize(
    "path", ["/health/live/", "/health/live/../ready", "//health/live", "/health/%6cive", "/HEALTH/LIVE"]
)
@in_loop
async def test_no_spelling_of_the_open_path_opens_another(path: str) -> None:
    async with front(api_key="secret") as f:
        assert (await call(f, "GET", path)).status == 401


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:8000", "[::1]:8000", "192.168.1.5", "gateway", ""])
@in_loop
async def test_a_local_server_answers_to_addresses_and_plain_names(host: str) -> None:
    async with front() as f:
        client = Client("GET", "/v1/models")
        client._headers = [(b"host", host.encode())]
        assert (await client.run(f.app)).status == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "a/?x=.b", "localhost.evil.example"])
@in_loop
async def test_a_local_server_does_not_answer_to_a_foreign_name(host: str) -> None:
    """S2: DNS rebinding."""
    async with front() as f:
        client = Client("GET", "/v1/models")
        client._headers = [(b"host", host.encode())]
        await client.run(f.app)
        assert (client.status, client.json["error"]["code"]) == (403, "foreign_site")


@in_loop
async def test_a_server_on_the_network_answers_to_its_names() -> None:
    async with front(host="0.0.0.0") as f:
        client = Client("GET", "/v1/models")
        client._headers = [(b"host", b"models.example.org")]
        assert (await client.run(f.app)).status == 200


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://evil.example", 403),
        ("https://localhost.evil.example", 403),
        ("null", 403),
        ("http://[bad", 403),
        ("http://localhost:3000", 200),
        ("http://127.0.0.1:9", 200),
        ("app://obsidian.md", 200),
    ],
)
@in_loop
async def test_a_page_of_another_site_may_not_post(origin: str, status: int) -> None:
    """S2: a simple POST needs no pre-flight, so the server must refuse it itself."""
    async with front() as f:
        client = await f.post("/v1/chat/completions", HI, headers={"origin": origin, "content-type": "text/plain"})
        assert client.status == status


@in_loop
async def test_no_answer_allows_a_foreign_site_to_read_it() -> None:
    async with front() as f:
        client = await call(f, "OPTIONS", "/v1/chat/completions", origin="http://evil.example")
        assert client.status == 403
        client = await call(f, "GET", "/v1/models", origin="http://evil.example")
        assert not [name for name in client.headers if name.startswith("access-control")]


@in_loop
async def test_a_fault_of_our_own_is_a_500_without_internals_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async with front() as f:
        f.engine.status = None  # type: ignore[assignment,method-assign]
        client = await f.get("/v1/status")
        assert client.status == 500
        assert client.json["error"]["code"] == "internal_error"
        assert "NoneType" not in client.json["error"]["message"]
    assert sum(record.exc_info is not None for record in caplog.records) == 1


@in_loop
async def test_request_ids_are_echoed_or_made() -> None:
    async with front() as f:
        assert (await call(f, "GET", "/health", x_request_id="abc-1")).headers["x-request-id"] == "abc-1"
        for bad in ("a b", "x" * 200, ""):
            made = (await call(f, "GET", "/health", x_request_id=bad)).headers["x-request-id"]
            assert made.startswith("req-")
