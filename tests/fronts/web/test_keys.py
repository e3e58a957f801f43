"""Several API keys over HTTP: scopes, what each may see, limits, and who is told what."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest

from tests.fronts.web.server import Front, forever, front, settle
from tests.support.aio import in_loop
from tests.support.asgi import Client
from treadle.core.messages import Submit
from treadle.engine.quarantine import Quarantine, quarantined
from treadle.fronts import accounts as accounts_module
from treadle.fronts.auth_throttle import MOST_WRONG
from treadle.fronts.authentication import Authenticator
from treadle.keys import ALL, Key, KeyLimits, digest
from treadle.keys.file import add

THERE = "10.0.0.7"


def key(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}-key"}


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    add(path, Key("alice", digest(b"alice-key")))
    add(path, Key("boss", digest(b"boss-key"), ALL))
    add(path, Key("slow", digest(b"slow-key"), limits=KeyLimits(2, 1000, 1)))
    return path


async def asks(f: Front, method: str, path: str, headers: dict[str, str], *, peer: str = "127.0.0.1") -> Client:
    return await From(peer, method, path, b'{"prompt": "hi", "max_tokens": 2}', headers).run(f.app)


class From(Client):
    """A client at another address."""

    def __init__(self, peer: str, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._peer = peer

    async def run(self, app: Any) -> Client:
        async def moved(scope: Any, receive: Any, send: Any) -> None:
            await app(scope | {"client": (self._peer, 5)}, receive, send)

        return await super().run(moved)


@in_loop
async def test_each_key_opens_and_no_other_does(keys: Path) -> None:
    async with front(api_keys=keys, api_key="single") as f:
        for headers in (key("alice"), key("boss"), {"x-api-key": "slow-key"}, {"authorization": "Bearer single"}):
            assert (await asks(f, "POST", "/v1/completions", headers)).status == 200
        for headers in ({}, key("eve"), {"x-api-key": digest(b"alice-key").hex()}, {"authorization": "Bearer alice"}):
            refused = await asks(f, "POST", "/v1/completions", headers)
            assert (refused.status, refused.json["error"]["code"]) == (401, "invalid_api_key")


@in_loop
async def test_admin_is_a_scope_apart(keys: Path) -> None:
    """S1: a key for use neither drops others' cached prompts nor reads what everyone does."""
    async with front(api_keys=keys, prefix_cache=True) as f:
        for method, path in (("POST", "/v1/prefix_cache/reset"), ("GET", "/metrics")):
            refused = await asks(f, method, path, key("alice"))
            assert (refused.status, refused.json["error"]["code"]) == (403, "insufficient_scope")
            assert refused.json["error"]["type"] == "permission_error"
            assert "needs the scope 'admin': use an API key that has it" in refused.json["error"]["message"]
            assert (await asks(f, method, path, key("boss"))).status == 200
        for path in ("/v1/models", "/health", "/health/ready", "/docs", "/openapi.json", "/", "/v1/status"):
            assert (await asks(f, "GET", path, key("alice"))).status == 200


@in_loop
async def test_going_before_others_needs_admin(keys: Path) -> None:
    """D16"""
    async with front(api_keys=keys) as f:
        for name, priority, status in (("alice", -1, 403), ("alice", 0, 200), ("alice", 3, 200), ("boss", -7, 200)):
            client = await f.post("/v1/completions", {"prompt": "hi", "priority": priority}, headers=key(name))
            assert client.status == status, (name, priority)
        refused = await f.post("/v1/completions", {"prompt": "hi", "priority": -1}, headers=key("alice"))
        assert (refused.json["error"]["code"], refused.json["error"]["param"]) == ("insufficient_scope", "priority")
        assert f.idle()


@pytest.mark.parametrize(("peer", "status"), [("127.0.0.1", 200), ("::1", 200), (THERE, 403)])
@in_loop
async def test_without_keys_only_this_machine_goes_before_others(peer: str, status: int) -> None:
    """D16: with --no-auth strangers are as good as each other."""
    async with front(host="0.0.0.0", no_auth=True) as f:
        body = b'{"prompt": "hi", "max_tokens": 1, "priority": -1}'
        assert (await From(peer, "POST", "/v1/completions", body).run(f.app)).status == status


@in_loop
async def test_a_key_for_use_sees_its_own_requests_alone(keys: Path) -> None:
    async with front(forever, api_keys=keys) as f:
        streams = {}
        for name in ("alice", "boss"):
            headers = {"content-type": "application/json", **key(name)}
            body = b'{"prompt": "hi", "stream": true, "max_tokens": 4000}'
            streams[name] = Client("POST", "/v1/completions", body, headers).start(f.app)
            await streams[name].until(lambda c: bool(c.chunks))
        ids = {name: next(e["id"] for e in stream.events if e != "[DONE]") for name, stream in streams.items()}
        seen = {name: (await asks(f, "GET", "/v1/status", key(name))).json for name in ("alice", "boss", "slow")}
        rows = {name: [request["id"] for request in status["requests"]] for name, status in seen.items()}
        assert rows == {"alice": [ids["alice"]], "boss": [ids["alice"], ids["boss"]], "slow": []}
        assert [usage["key"] for usage in seen["alice"]["keys"]] == ["alice"]
        assert {usage["key"]: usage["running"] for usage in seen["boss"]["keys"]} == {"alice": 1, "boss": 1, "slow": 0}
        assert seen["alice"]["engine"]["statistics"] is None
        assert seen["boss"]["engine"]["statistics"]
        assert set(seen["alice"]["prefix_cache"]) == {"enabled"}
        assert ids["boss"] not in str(seen["alice"])
        for stream in streams.values():
            stream.leave()
            assert stream.task is not None
            await asyncio.gather(stream.task, return_exceptions=True)
        await settle()


@in_loop
async def test_a_requests_id_shows_no_other_keys_request(keys: Path) -> None:
    """gRPC clients choose the ids of their requests: two keys may use one, and so may two requests of one key."""
    async with front(forever, api_keys=keys) as f:

        async def seen(name: str) -> list[int]:
            rows = (await asks(f, "GET", "/v1/status", key(name))).json["requests"]
            return [row["prompt_tokens"] for row in rows if row["id"] == "job-1"]

        with contextlib.ExitStack() as live:

            def starts(name: str, tokens: int) -> contextlib.ExitStack:
                one = live.enter_context(contextlib.ExitStack())
                held = f.engine.reserve(
                    rows=1,
                    prompt_tokens=tokens,
                    completion_tokens=4000,
                    kind="grpc",
                    tag="job-1",
                    tenant=f"key {name}",
                )
                one.enter_context(held).submit([Submit(id="", prompt=(65,) * tokens, max_tokens=4000)])
                return one

            starts("boss", 5)
            first = starts("alice", 3)
            starts("alice", 4)
            assert (await seen("alice"), await seen("slow"), await seen("boss")) == ([3, 4], [], [5, 3, 4])
            first.close()
            await settle()
            assert await seen("alice") == [4], "the end of one hides no other"
        await settle()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "n": 2, "temperature": 1}),
        ("/v1/responses", {"input": "hi", "model": "m"}),
    ],
)
@in_loop
async def test_a_whole_answer_tells_what_its_own_tokens_leave(
    path: str, body: dict[str, object], mixed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accounts_module, "MINUTE_S", 1e12)  # nothing refills meanwhile
    async with front(api_keys=mixed) as f:
        answer = await f.post(path, body, headers=key("few"))
        assert answer.status == 200, answer.json
        usage = answer.json["usage"]
        used = usage["total_tokens"]
        assert used > usage.get("prompt_tokens", usage.get("input_tokens")) > 0
        assert answer.headers["x-ratelimit-remaining-tokens"] == str(1000 - used)
        (told,) = (await f.get("/v1/status", headers=key("few"))).json["keys"]
        assert told["tokens"] == used, "and is charged once"


@in_loop
async def test_a_keys_requests_a_minute(keys: Path) -> None:
    async with front(api_keys=keys) as f:
        first = await asks(f, "POST", "/v1/completions", key("slow"))
        assert first.headers["x-ratelimit-limit-requests"] == "2"
        assert first.headers["x-ratelimit-limit-tokens"] == "1000"
        for _ in range(3):
            assert (await asks(f, "GET", "/v1/models", key("slow"))).status == 200, "what generates counts"
        assert (await asks(f, "POST", "/v1/completions", key("slow"))).status == 200
        refused = await asks(f, "POST", "/v1/completions", key("slow"))
        assert (refused.status, refused.json["error"]["code"]) == (429, "rate_limit_exceeded")
        assert refused.json["error"]["type"] == "rate_limit_error"
        assert 25 <= int(refused.headers["retry-after"]) <= 30
        assert 25_000 <= int(refused.headers["retry-after-ms"]) <= 30_000
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        other = await asks(f, "POST", "/v1/completions", key("alice"))
        assert other.status == 200
        assert not [name for name in other.headers if name.startswith("x-ratelimit")]
        assert f.telemetry.metrics.value("treadle_refused_total", {"reason": "rate_limit_exceeded"}) == 1
        refusals = (await asks(f, "GET", "/v1/status", key("boss"))).json["admission"]["refused"]
        assert refusals == {"rate_limit_exceeded": 1}
        assert f.idle()


@in_loop
async def test_refusals_have_the_limits_too(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And count for nothing where nothing was computed."""
    async with front(api_keys=keys) as f:
        wrong = await f.post("/v1/completions", {"prompt": "hi", "temperature": 9}, headers=key("slow"))
        assert (wrong.status, wrong.headers["x-ratelimit-remaining-requests"]) == (400, "2")

        def refuse(self: Quarantine, request: Submit) -> None:
            raise quarantined()

        monkeypatch.setattr(Quarantine, "check", refuse)
        poison = await asks(f, "POST", "/v1/completions", key("slow"))
        assert (poison.status, poison.headers["x-ratelimit-remaining-requests"]) == (422, "2")
        assert f.idle()


@in_loop
async def test_a_keys_sequences_at_once(keys: Path) -> None:
    async with front(forever, api_keys=keys) as f:
        body = b'{"prompt": "hi", "stream": true, "max_tokens": 4000}'
        stream = Client("POST", "/v1/completions", body, key("slow")).start(f.app)
        await stream.until(lambda c: bool(c.chunks))
        refused = await asks(f, "POST", "/v1/completions", key("slow"))
        assert (refused.status, refused.headers["retry-after"]) == (429, "1")
        stream.leave()
        assert stream.task is not None
        await asyncio.gather(stream.task, return_exceptions=True)
        never = await f.post("/v1/completions", {"prompt": "hi", "n": 2, "temperature": 1}, headers=key("slow"))
        assert (never.status, never.json["error"]["param"]) == (400, "n")
        await settle()
        assert f.idle()


@in_loop
async def test_a_refusal_for_lack_of_room_costs_a_key_nothing(keys: Path) -> None:
    async with front(api_keys=keys) as f:
        f.engine.drain()
        for _ in range(5):
            assert (await asks(f, "POST", "/v1/completions", key("slow"))).status == 503
        usage = {entry["key"]: entry for entry in (await asks(f, "GET", "/v1/status", key("boss"))).json["keys"]}
        assert usage["slow"] == {"key": "slow", "running": 0, "requests": 0, "tokens": 0, "refused": 0}


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """`few` may have two requests a minute, `one` a single sequence, `rich` what it likes."""
    path = tmp_path / "mixed.toml"
    add(path, Key("few", digest(b"few-key"), limits=KeyLimits(2, 1000, None)))
    add(path, Key("one", digest(b"one-key"), limits=KeyLimits(None, None, 1)))
    add(path, Key("rich", digest(b"rich-key")))
    return path


def starts(f: Front, name: str) -> Client:
    body = b'{"prompt": "hi", "stream": true, "max_tokens": 4000}'
    return Client("POST", "/v1/completions", body, key(name)).start(f.app)


async def leaves(f: Front, *clients: Client) -> None:
    for client in clients:
        client.leave()
    await f.step(3)
    await asyncio.gather(*(client.task for client in clients if client.task), return_exceptions=True)


@in_loop
async def test_a_request_that_is_displaced_or_waits_in_vain_costs_its_key_nothing(mixed: Path) -> None:
    async with front(forever, pump=False, running=1, waiting=1, api_keys=mixed) as f:
        first = starts(f, "few")
        await f.step(2)
        for _ in range(3):
            waits = starts(f, "few")
            await f.step(2)
            other = starts(f, "rich")
            await f.step(2)
            assert (waits.status, waits.json["error"]["code"]) == (503, "text_generation_busy")
            await leaves(f, other)
        (usage,) = (await f.get("/v1/status", headers=key("few"))).json["keys"]
        assert (usage["running"], usage["requests"], usage["tokens"]) == (1, 0, 0)
        left = starts(f, "few")
        await f.step(2)
        assert left.status is None, "one of the two a minute is left, and it waits"
        await leaves(f, first, left)
        assert f.idle()


@in_loop
async def test_a_key_over_its_limit_is_told_so_on_a_full_server_and_takes_no_place_in_line(mixed: Path) -> None:
    async with front(forever, pump=False, running=1, waiting=0, api_keys=mixed) as f:
        first = starts(f, "one")
        await f.step(2)
        for path in ("/v1/completions", "/v1/chat/completions"):
            over = await Client("POST", path, b"{}", key("one")).run(f.app)
            assert (over.status, over.json["error"]["code"]) == (429, "rate_limit_exceeded")
            assert "x-treadle-ticket" not in over.headers
        admission = f.engine.gate.statistics()
        assert admission["promises"]["open"] == 0
        assert admission["refused"] == {"rate_limit_exceeded": 2}
        assert (await Client("POST", "/v1/completions", b"{}", key("rich")).run(f.app)).status == 503
        await leaves(f, first)


@in_loop
async def test_a_key_over_its_limit_displaces_nobody(mixed: Path) -> None:
    """It is known only from its body that it asks for more sequences than its key may have."""
    async with front(forever, pump=False, running=1, waiting=3, api_keys=mixed) as f:
        rich = [starts(f, "rich") for _ in range(4)]
        await f.step(2)
        body = {"prompt": "hi", "n": 2, "temperature": 1}
        never = await f.post("/v1/completions", body, headers=key("one"))
        assert (never.status, never.json["error"]["param"]) == (400, "n")
        await f.step(2)
        assert [client.status for client in rich] == [200, None, None, None]
        assert f.engine.gate.statistics()["refused"] == {}
        await leaves(f, *rich)


@in_loop
async def test_tokens_that_a_client_left_unread_are_charged(mixed: Path) -> None:
    """Who takes a stream without reading it, and leaves, has used what was generated."""
    async with front(forever, pump=False, running=1, api_keys=mixed) as f:
        stream = starts(f, "few")
        await f.step(2)
        stream.readable.clear()
        await f.step(50)
        generated = f.engine.dispatch.generations[0].completion_tokens
        assert generated >= 50
        stream.leave()
        await f.step(3)
        assert stream.task is not None
        await asyncio.gather(stream.task, return_exceptions=True)
        (usage,) = (await f.get("/v1/status", headers=key("few"))).json["keys"]
        assert usage["tokens"] >= 2 + generated


@in_loop
async def test_guessing_keys_is_slowed_and_told(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = partialmethod(Authenticator.__init__, clock=lambda: 1000.0)  # however slow this machine is
    monkeypatch.setattr(Authenticator, "__init__", at_once)
    async with front(api_keys=keys, host="0.0.0.0") as f:
        for i in range(MOST_WRONG):
            assert (await asks(f, "GET", "/v1/models", key(f"wrong{i}"), peer=THERE)).status == 401
        refused = await asks(f, "GET", "/v1/models", key("alice"), peer=THERE)
        assert (refused.status, refused.json["error"]["code"]) == (429, "too_many_wrong_keys")
        assert refused.headers["retry-after"] == "2"
        assert (await asks(f, "GET", "/health/live", key("wrong"), peer=THERE)).status == 200
        assert (await asks(f, "GET", "/v1/models", key("alice"))).status == 200
        metric = f.telemetry.metrics.value
        assert metric("treadle_refused_total", {"reason": "invalid_api_key"}) == MOST_WRONG
        assert metric("treadle_refused_total", {"reason": "too_many_wrong_keys"}) == 1


@pytest.mark.parametrize("name", ["authorization", "x-api-key"])
@pytest.mark.parametrize("second", ["Bearer wrong", "Bearer alice-key"])
@in_loop
async def test_a_second_header_of_a_kind_is_refused(name: str, second: str, keys: Path) -> None:
    """D25: a proxy in front may have read the other one."""
    async with front(api_keys=keys) as f:
        client = Client("GET", "/v1/models")
        right = b"Bearer alice-key" if name == "authorization" else b"alice-key"
        client._headers += [(name.encode(), right), (name.encode(), second.encode())]
        await client.run(f.app)
        assert client.status == 400
        assert f"one {name} header" in client.json["error"]["message"]


@in_loop
async def test_neither_keys_nor_hashes_are_told_anywhere(keys: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    async with front(api_keys=keys) as f:
        for name in ("alice", "boss", "slow", "eve"):
            for path in ("/v1/status", "/metrics", "/", "/openapi.json"):
                body = (await asks(f, "GET", path, key(name))).body.decode()
                assert "-key" not in body.replace("x-api-key", "").replace("api-key", "")
                assert digest(b"alice-key").hex() not in body
            await asks(f, "POST", "/v1/completions", key(name))
    lines = [f"{record.getMessage()} {record.__dict__.get('fields')}" for record in caplog.records]
    assert any("'key': 'alice'" in line for line in lines), "the name is told"
    assert not any("alice-key" in line or digest(b"alice-key").hex() in line for line in lines)


@in_loop
async def test_each_keys_use_is_a_metric_and_labels_are_the_keys_there_are(keys: Path) -> None:
    from treadle.fronts.authentication import Authenticator
    from treadle.keys import KeySource
    from treadle.telemetry.metrics import Metrics

    metrics, door = Metrics(), Authenticator(KeySource(None, keys))
    metrics.watch_keys(door)
    for i in range(50):
        door.caller([b"alice-key"], f"10.0.0.{i}")
    text = metrics.render().decode()
    for name in ("requests_total", "tokens_total", "refused_total", "running"):
        lines = [line for line in text.splitlines() if line.startswith(f"treadle_key_{name}{{")]
        assert {line.split('"')[1] for line in lines} == {"alice", "boss", "slow"}


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("httpss://evil.example", 403),
        ("blob:http://evil.example", 403),
        ("blob://x", 403),
        ("data://x", 403),
        ("javascript://x", 403),
        ("ftp://evil.example", 403),
        ("ws://evil.example", 403),
        ("app://evil.example/x", 403),
        ("://", 403),
        ("app://.", 200),
        ("tauri://localhost", 200),
        ("capacitor://localhost", 200),
        ("chrome-extension://aapbdbdomjkkjkaonfhkkikfgjllcleb", 200),
        ("moz-extension://0c2d37fb-7b41-4b6a-8e1c-0d1c2a1f5e3a", 200),
        ("vscode-webview://1abcd", 200),
    ],
)
@in_loop
async def test_only_schemes_of_programs_are_programs(origin: str, status: int) -> None:
    """D25"""
    async with front() as f:
        client = await f.post("/v1/completions", {"prompt": "x", "max_tokens": 1}, headers={"origin": origin})
        assert client.status == status


@in_loop
async def test_keys_part_cached_prompts(keys: Path, salt_of: Callable[..., Any]) -> None:
    """S3"""
    async with front(api_keys=keys) as f:
        salts = {name: await salt_of(f, key(name)) for name in ("alice", "boss", "slow")}
        assert len({*salts.values()}) == 3
        assert await salt_of(f, key("alice")) == salts["alice"]


@pytest.fixture
def salt_of() -> Callable[..., Any]:
    async def found(f: Front, headers: dict[str, str]) -> str:
        assert (await f.post("/v1/completions", {"prompt": "hi", "max_tokens": 1}, headers=headers)).status == 200
        return f.runner.seen[-1].salt

    return found
