from __future__ import annotations

from typing import Any

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
                error = client.json["error"]  # in the shape of the path's dialect
                assert "API key" in (error if isinstance(error, str) else error["message"])
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


async def asked_as(f: Front, *hosts: str, version: str = "1.1", path: str = "/v1/models") -> Client:
    client = Client("GET", path, version=version)
    client._headers = [(b"host", host.encode()) for host in hosts]
    return await client.run(f.app)


PLAIN = [
    *("localhost", "LOCALHOST:8000", "app.localhost", "127.0.0.1:8000", "[::1]:8000", "192.168.1.5", "0.0.0.0:8000"),
    *("host.docker.internal", "host.docker.internal:8000", "host.containers.internal", "Host.Docker.Internal."),
]
FOREIGN = [
    *("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "evilhost", "gateway"),
    *("mybox.local", "evil.internal", "a.host.docker.internal", "host.docker.internal.evil.example", "2130706433"),
]


@pytest.mark.parametrize("host", PLAIN)
@in_loop
async def test_a_server_answers_to_addresses_to_localhost_and_to_what_containers_call_their_host(host: str) -> None:
    async with front() as f:
        assert (await asked_as(f, host)).status == 200


@pytest.mark.parametrize("settings", [{}, {"host": "0.0.0.0", "no_auth": True}, {"allowed_host": ("good.lan",)}])
@pytest.mark.parametrize("host", FOREIGN)
@in_loop
async def test_without_a_key_no_server_answers_to_a_name_that_nobody_gave_it(
    host: str, settings: dict[str, Any]
) -> None:
    """S2: DNS rebinding. Names without a dot are someone's too, by a search domain."""
    async with front(**settings) as f:
        client = await asked_as(f, host)
        assert (client.status, client.json["error"]["code"]) == (403, "foreign_site")
        name = host.removesuffix(":8000")
        assert f"start it with --allowed-host {name}, or call it by its address" in client.json["error"]["message"]


@pytest.mark.parametrize(
    ("allowed", "host", "status"),
    [
        ("mybox.local", "mybox.local:8000", 200),
        ("MyBox.Local", "mybox.local", 200),
        ("mybox.local", "mybox.LOCAL.", 200),
        ("mybox.local", "a.mybox.local", 403),
        ("*.example.lan", "a.example.lan", 200),
        ("*.example.lan", "example.lan", 403),
        ("*", "evil.example", 200),
        ("mybox.local", "127.0.0.1", 200),
    ],
)
@pytest.mark.parametrize("key", [None, "secret"])
@in_loop
async def test_names_are_allowed_by_the_flag(allowed: str, host: str, status: int, key: str | None) -> None:
    """With a key too: names that are given are the only ones."""
    async with front(allowed_host=(allowed,), api_key=key) as f:
        assert (await asked_as(f, host, path="/health/live")).status == status


@in_loop
async def test_with_a_key_every_name_is_answered() -> None:
    """Behind a proxy, or in a cluster. A page that was lured here has no key."""
    async with front(api_key="secret", host="0.0.0.0") as f:
        assert (await asked_as(f, "models.example.org", path="/health/live")).status == 200
        assert (await asked_as(f, "models.example.org")).status == 401


@in_loop
async def test_the_name_that_the_server_is_bound_to_is_its_own() -> None:
    async with front(host="MyBox.lan", no_auth=True) as f:
        assert (await asked_as(f, "mybox.lan:8000")).status == 200


@pytest.mark.parametrize("key", [None, "secret"])
@pytest.mark.parametrize(
    "hosts", [(), ("",), ("localhost", "evil.example"), ("localhost", "localhost"), ("a/?x=.b",), ("a b",), ("a:b",)]
)
@in_loop
async def test_a_request_needs_one_host_that_is_one(hosts: tuple[str, ...], key: str | None) -> None:
    """S2: what reads the first Host and what reads the last must not differ. BadHost."""
    async with front(api_key=key, allowed_host=("*",)) as f:
        client = await asked_as(f, *hosts, path="/health/live")
        assert (client.status, client.json["error"]["code"]) == (400, "invalid_request")
        assert "one Host header" in client.json["error"]["message"]


@in_loop
async def test_an_old_client_may_leave_the_host_out() -> None:
    async with front() as f:
        assert (await asked_as(f, version="1.0")).status == 200


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://evil.example", 403),
        ("https://localhost.evil.example", 403),
        ("null", 403),
        ("http://[bad", 403),
        ("http://evil", 403),
        ("http://localhost#.evil.example", 403),
        ("http://localhost http://evil.example", 403),
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
async def test_a_page_of_a_lured_name_may_not_post_to_it() -> None:
    """S2: after rebinding, Host and Origin agree."""
    async with front(host="0.0.0.0", no_auth=True) as f:
        client = Client("POST", "/v1/completions", b'{"prompt": "x"}')
        client._headers = [(b"host", b"evil.example:8000"), (b"origin", b"http://evil.example:8000")]
        assert (await client.run(f.app)).status == 403


@pytest.mark.parametrize(
    ("origin", "says"),
    [
        (
            "http://evil.example",
            "web pages of http://evil.example may not call this server: start it with --cors-origin",
        ),
        ("HTTP://Evil.example:80", "start it with --cors-origin http://evil.example"),
        ("null", "web pages without an origin of their own (files, sandboxed frames)"),
    ],
)
@in_loop
async def test_a_refused_page_is_told_to_the_client_and_once_to_the_log(
    origin: str, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A browser shows its user nothing of such an answer."""
    async with front() as f:
        for _ in range(2):
            client = await f.post("/v1/completions", {"prompt": "x"}, headers={"origin": origin})
            assert says in client.json["error"]["message"]
    assert sum(says in record.getMessage() for record in caplog.records) == 1


@in_loop
async def test_refusals_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async with front() as f:
        for i in range(100):
            await asked_as(f, f"evil{i}.example")
    assert 1 <= sum("refused a request" in record.getMessage() for record in caplog.records) <= 32


@in_loop
async def test_no_answer_allows_a_foreign_site_to_read_it() -> None:
    async with front() as f:
        for origin in ("http://evil.example", "http://localhost:3000", "null"):
            for method in ("OPTIONS", "GET", "POST"):
                client = await call(f, method, "/v1/models", origin=origin, access_control_request_method="POST")
                assert not [name for name in client.headers if name.startswith("access-control") or name == "vary"]


@in_loop
async def test_a_fault_of_our_own_is_a_500_without_internals_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async with front() as f:
        f.engine.health = None  # type: ignore[assignment,method-assign]
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
