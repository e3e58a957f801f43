"""Calls before their message: keys, places, and the time that a message may take."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tests.fronts.rpc.worker import Scene, refused, until, worker
from tests.support.aio import in_loop
from treadle.core.refusals import Refusal
from treadle.fronts.connections import Connections
from treadle.fronts.rpc import call_slots, interceptor
from treadle.fronts.rpc.call_slots import EXTRA_CALLS, CallSlots
from treadle.keys import Key, digest
from treadle.keys.file import add

METHODS = (
    "/mlx.grpc.engine.MlxEngine/Generate",
    "/vllm.grpc.engine.VllmEngine/Abort",
    "/vllm.grpc.engine.VllmEngine/GetTokenizer",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
)
OPEN_METHODS = ("/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch")
SOON_S = 60.0


def unsent(w: Scene, method: str, **metadata: str) -> Any:
    """A call whose message never comes."""
    return w.channel.stream_stream(method)(metadata=tuple(metadata.items()))


async def code(call: Any) -> grpc.StatusCode:
    async with asyncio.timeout(SOON_S):
        return await call.code()


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    add(path, Key("alice", digest(b"alice-key")))
    return path


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients come from where their metadata says."""

    def host_of(context: Any) -> str:
        return str(dict(context.invocation_metadata()).get("peer", "10.0.0.1"))

    monkeypatch.setattr(call_slots, "host_of", host_of)


@pytest.mark.parametrize("key", ["", "wrong"])
@pytest.mark.parametrize("method", METHODS)
@in_loop
async def test_who_has_no_key_is_refused_before_the_message(keys: Path, method: str, key: str) -> None:
    async with worker(api_keys=keys, grpc_auth=True) as w:
        assert await code(unsent(w, method, **({"x-api-key": key} if key else {}))) is grpc.StatusCode.UNAUTHENTICATED
        assert w.engine.gate.statistics()["refused"] == {"invalid_api_key": 1}


@pytest.mark.parametrize("method", METHODS + OPEN_METHODS)
@in_loop
async def test_a_message_that_does_not_come_ends_its_call(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    monkeypatch.setattr(interceptor, "MESSAGE_S", 0.05)
    books = Connections(front="gRPC")
    async with worker(connections=books) as w:
        call = unsent(w, method)
        assert await code(call) is grpc.StatusCode.DEADLINE_EXCEEDED
        assert dict(await call.trailing_metadata())["treadle-error"] == "message_timeout"
        await until(lambda: books.parts["calls"].open == 0)
        assert books.statistics()["calls"]["refused"] == {"message_timeout": 1}
        assert w.engine.gate.statistics()["refused"] == {"message_timeout": 1}
        assert (await w.mlx.answer()).end.finish_reason


@pytest.mark.parametrize("method", METHODS[:-1] + OPEN_METHODS)
@in_loop
async def test_a_call_that_ends_without_its_message_is_refused(method: str) -> None:
    async with worker() as w:
        call = unsent(w, method)
        await call.done_writing()
        assert await code(call) is grpc.StatusCode.INVALID_ARGUMENT


@in_loop
async def test_a_stream_of_requests_may_not_fall_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interceptor, "MESSAGE_S", 0.05)
    async with worker() as w:
        call = reflection_pb2_grpc.ServerReflectionStub(w.channel).ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        assert (await call.read()).list_services_response.service
        assert await code(call) is grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.usefixtures("peers")
@in_loop
async def test_one_address_does_not_take_the_places_of_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(call_slots, "EXTRA_CALLS_PER_PEER", -10)  # of 6: with two sequences at work and two waiting
    books = Connections(front="gRPC")
    async with worker(connections=books) as w:
        calls = books.parts["calls"]
        held = [unsent(w, METHODS[0]) for _ in range(6)]
        await until(lambda: calls.open == 6)
        with caplog.at_level(logging.WARNING):
            surplus = [unsent(w, METHODS[0]) for _ in range(50)]
            assert {await code(call) for call in surplus} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert len(caplog.messages) == 1
        assert caplog.messages[0].startswith("gRPC calls are refused (1 so far): one address already has 6")
        metadata = (("peer", "10.0.0.2"),)
        stub = w.mlx.stub
        assert [part async for part in stub.Generate(w.mlx.request(), metadata=metadata)]
        assert w.engine.gate.statistics()["refused"] == {"peer_calls": 50}
        for call in held:
            call.cancel()
        await until(lambda: calls.open == 0)
        assert (await w.mlx.answer("r2")).end.finish_reason


@pytest.mark.usefixtures("peers")
@in_loop
async def test_long_lived_streams_have_a_share_for_each_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_slots, "STREAMS_PER_PEER", 3)
    monkeypatch.setattr(call_slots, "MAX_STREAMS", 4)
    books = Connections(front="gRPC")
    async with worker(connections=books) as w:
        stub = health_pb2_grpc.HealthStub(w.channel)

        def watch(peer: str) -> Any:
            return stub.Watch(health_pb2.HealthCheckRequest(), metadata=(("peer", peer),))

        held = [watch("10.0.0.1") for _ in range(2)]
        listing = reflection_pb2_grpc.ServerReflectionStub(w.channel).ServerReflectionInfo()
        await until(lambda: books.parts["streams"].open == 3)
        assert (await refused(watch("10.0.0.1"))).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        other = watch("10.0.0.2")
        assert (await other.read()).status == health_pb2.HealthCheckResponse.SERVING
        assert (await refused(watch("10.0.0.2"))).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await stub.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING
        assert books.statistics()["streams"]["refused"] == {"peer_streams": 1, "streams": 1}
        for call in (*held, listing, other):
            call.cancel()
        await until(lambda: books.parts["streams"].open == 0)


@in_loop
async def test_a_client_that_leaves_before_its_message_writes_nothing_to_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    books = Connections(front="gRPC")
    async with worker(connections=books) as w:
        for _ in range(20):
            calls = [unsent(w, METHODS[0]) for _ in range(10)]
            await until(lambda: books.parts["calls"].open == 10)
            for call in calls:
                call.cancel()
            await until(lambda: books.parts["calls"].open == 0)
    assert not caplog.records


def test_a_share_holds_all_that_one_gateway_may_want_and_is_never_all() -> None:
    for sequences in (1, 32, 512, 4096, 100_000):
        books = CallSlots(sequences).calls
        assert books.limit == 2 * sequences + EXTRA_CALLS
        assert books.per_peer is not None
        assert books.per_peer <= books.limit * 3 / 4
        assert books.per_peer >= 2 * sequences or sequences > 4096
    assert {*books.kind.cures} == {Refusal.CALLS, Refusal.PEER_CALLS, Refusal.MESSAGE_TIMEOUT}
