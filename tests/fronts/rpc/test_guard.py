"""Who may call over gRPC: keys, this machine, certificates, scopes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from tests.fronts.rpc.worker import WIRES, Scene, read, until, worker
from tests.fronts.web.server import forever
from tests.support.aio import in_loop
from treadle.fronts.auth_throttle import MOST_WRONG
from treadle.fronts.rpc import guard
from treadle.keys import ALL, Key, KeyLimits, digest
from treadle.keys.file import add

TLS = Path(__file__).parents[2] / "support" / "tls"
Metadata = tuple[tuple[str, str], ...]


def bearer(name: str) -> Metadata:
    return (("authorization", f"Bearer {name}-key"),)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    add(path, Key("alice", digest(b"alice-key")))
    add(path, Key("bob", digest(b"bob-key")))
    add(path, Key("boss", digest(b"boss-key"), ALL))
    add(path, Key("slow", digest(b"slow-key"), limits=KeyLimits(requests_per_minute=1)))
    return path


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients here come from elsewhere."""
    monkeypatch.setattr(guard, "host_of", lambda context: "10.0.0.7")


def wire_calls(wire: Any, name: str, metadata: Metadata) -> dict[str, Callable[[], Any]]:
    """Every method of one wire, by its name."""
    pb, stub = wire.pb, wire.stub
    return {
        f"{name} Generate": lambda: read(stub.Generate(wire.request(), metadata=metadata)),
        f"{name} Abort": lambda: stub.Abort(pb.AbortRequest(request_ids=["x"]), metadata=metadata),
        f"{name} HealthCheck": lambda: stub.HealthCheck(pb.HealthCheckRequest(), metadata=metadata),
        f"{name} GetModelInfo": lambda: stub.GetModelInfo(pb.GetModelInfoRequest(), metadata=metadata),
        f"{name} GetServerInfo": lambda: stub.GetServerInfo(pb.GetServerInfoRequest(), metadata=metadata),
        f"{name} GetTokenizer": lambda: drained(stub.GetTokenizer(common_pb2.GetTokenizerRequest(), metadata=metadata)),
    }


def calls(w: Scene, metadata: Metadata = ()) -> dict[str, Callable[[], Any]]:
    """Every method that needs a caller, by its name."""
    found: dict[str, Callable[[], Any]] = {}
    for name in WIRES:
        found |= wire_calls(w.wire(name), name, metadata)
    vllm = w.vllm
    found["vllm GetLoads"] = lambda: vllm.stub.GetLoads(vllm.pb.GetLoadsRequest(), metadata=metadata)
    reflection = reflection_pb2_grpc.ServerReflectionStub(w.channel)
    found["reflection"] = lambda: reflected(reflection, metadata)
    health = health_pb2_grpc.HealthStub(w.channel)
    found["health List"] = lambda: health.List(health_pb2.HealthListRequest(), metadata=metadata)
    return found


async def drained(call: Any) -> list[Any]:
    return [message async for message in call]


async def reflected(stub: Any, metadata: Metadata) -> list[Any]:
    """The answer to a stream of one request. Where a refusal comes before the request is sent, the client may report an
    error of its own in place of it: it then calls again."""
    listing = reflection_pb2.ServerReflectionRequest(list_services="")
    while True:
        try:
            return await drained(stub.ServerReflectionInfo(iter([listing]), metadata=metadata))
        except grpc.aio.AioRpcError as error:
            if error.details() != "Internal error from Core":
                raise


async def flush(w: Scene, metadata: Metadata = ()) -> Any:
    return await w.vllm.stub.FlushCache(common_pb2.FlushCacheRequest(), metadata=metadata)


async def code(call: Any) -> grpc.StatusCode:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def codes(w: Scene, metadata: Metadata = ()) -> dict[str, grpc.StatusCode]:
    return {name: await code(call()) for name, call in calls(w, metadata).items()}


OK, DENIED = grpc.StatusCode.OK, grpc.StatusCode.PERMISSION_DENIED
UNKNOWN = grpc.StatusCode.UNAUTHENTICATED


@in_loop
async def test_without_keys_everyone_may_do_everything() -> None:
    async with worker(prefix_cache=True) as w:
        assert {*(await codes(w)).values()} == {OK}
        assert {*(await codes(w, bearer("any"))).values()} == {OK}
        assert (await flush(w)).success


@pytest.mark.usefixtures("far")
@in_loop
async def test_every_method_but_health_needs_a_key(keys: Path) -> None:
    """D6, S1"""
    async with worker(api_keys=keys, prefix_cache=True) as w:
        refused = await codes(w)
        assert {*refused.values()} == {UNKNOWN}, refused
        assert len(refused) >= 15
        assert await code(flush(w)) is UNKNOWN
        assert {*(await codes(w, bearer("eve"))).values()} == {UNKNOWN}
        assert {*(await codes(w, bearer("alice"))).values()} == {OK}
        assert {*(await codes(w, (("x-api-key", "alice-key"),))).values()} == {OK}
        assert w.idle()


@pytest.mark.usefixtures("far")
@in_loop
async def test_health_answers_everyone(keys: Path) -> None:
    async with worker(api_keys=keys) as w:
        stub = health_pb2_grpc.HealthStub(w.channel)
        assert (await stub.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING
        watch = stub.Watch(health_pb2.HealthCheckRequest(), metadata=bearer("eve"))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()


@in_loop
async def test_this_machine_may_generate_without_a_key_as_the_gateway_does(keys: Path) -> None:
    """E1: but not empty the cache; and a wrong key is refused here too."""
    async with worker(api_keys=keys, prefix_cache=True) as w:
        assert {*(await codes(w)).values()} == {OK}
        assert await code(flush(w)) is DENIED
        assert {*(await codes(w, bearer("eve"))).values()} == {UNKNOWN}


@in_loop
async def test_grpc_auth_asks_this_machine_too(keys: Path) -> None:
    async with worker(api_keys=keys, grpc_auth=True) as w:
        assert {*(await codes(w)).values()} == {UNKNOWN}
        assert {*(await codes(w, bearer("alice"))).values()} == {OK}


@pytest.mark.usefixtures("far")
@in_loop
async def test_grpc_no_auth_lets_everyone_generate_and_nobody_flush(keys: Path) -> None:
    async with worker(api_keys=keys, grpc_no_auth=True, prefix_cache=True) as w:
        assert {*(await codes(w)).values()} == {OK}
        assert {*(await codes(w, bearer("eve"))).values()} == {UNKNOWN}
        assert await code(flush(w)) is DENIED
        assert await code(flush(w, bearer("alice"))) is DENIED
        assert (await flush(w, bearer("boss"))).success


@in_loop
async def test_a_refusal_says_why_and_is_counted(keys: Path) -> None:
    async with worker(api_keys=keys, grpc_auth=True) as w:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await flush(w, bearer("alice"))
        assert "needs the scope 'admin'" in (raised.value.details() or "")
        assert dict(raised.value.trailing_metadata())["treadle-error"] == "insufficient_scope"
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await flush(w)
        assert dict(raised.value.trailing_metadata())["treadle-error"] == "invalid_api_key"
        assert w.engine.gate.statistics()["refused"] == {"insufficient_scope": 1, "invalid_api_key": 1}


@in_loop
async def test_an_id_is_its_callers_own(keys: Path) -> None:
    """D6: nobody aborts, blocks or finds out about another's request by its id; admin aborts anyone's."""
    async with worker(forever, api_keys=keys, grpc_auth=True) as w:
        streams = {}
        for name in ("alice", "bob"):
            request = w.vllm.request("same-id", max_tokens=4000)
            streams[name] = aiter(w.vllm.stub.Generate(request, metadata=bearer(name)))
            await anext(streams[name])

        async def abort(name: str) -> None:
            await w.vllm.stub.Abort(w.vllm.pb.AbortRequest(request_ids=["same-id", "no"]), metadata=bearer(name))

        await abort("slow")
        await abort("bob")
        assert (await read(streams["bob"])).end.finish_reason == "abort"
        assert (await anext(streams["alice"])).HasField("chunk"), "hers goes on"
        await abort("boss")
        assert (await read(streams["alice"])).end.finish_reason == "abort"
        await until(w.idle)


@in_loop
async def test_an_abort_that_comes_early_is_for_its_caller_alone(keys: Path) -> None:
    async with worker(api_keys=keys, grpc_auth=True) as w:
        await w.mlx.stub.Abort(w.mlx.pb.AbortRequest(request_ids=["soon"]), metadata=bearer("bob"))
        answer = await read(w.mlx.stub.Generate(w.mlx.request("soon"), metadata=bearer("alice")))
        assert answer.end.finish_reason == "stop"
        answer = await read(w.mlx.stub.Generate(w.mlx.request("soon"), metadata=bearer("bob")))
        assert answer.end.finish_reason == "abort"


@in_loop
async def test_keys_part_cached_prompts(keys: Path) -> None:
    """S3"""
    async with worker(api_keys=keys) as w:
        for metadata in (bearer("alice"), bearer("bob"), (), bearer("alice")):
            await read(w.mlx.stub.Generate(w.mlx.request(), metadata=metadata))
        salts = [request.salt for request in w.runner.seen]
        assert salts[0] == salts[3]
        assert len({*salts}) == 3


@in_loop
async def test_a_keys_own_limit_is_resource_exhausted_with_the_time_to_wait(keys: Path) -> None:
    async with worker(api_keys=keys) as w:
        await read(w.mlx.stub.Generate(w.mlx.request(), metadata=bearer("slow")))
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await read(w.mlx.stub.Generate(w.mlx.request(), metadata=bearer("slow")))
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        trailing = dict(raised.value.trailing_metadata())
        assert trailing["treadle-error"] == "rate_limit_exceeded"
        assert 55_000 <= int(trailing["retry-after-ms"]) <= 60_000
        assert w.engine.gate.statistics()["refused"] == {"rate_limit_exceeded": 1}
        assert w.idle()


@in_loop
async def test_a_key_over_its_limit_is_told_so_on_a_full_worker_and_takes_no_place_in_line(keys: Path) -> None:
    async with worker(forever, running=1, waiting=0, api_keys=keys) as w:
        stream = w.mlx.stub.Generate(w.mlx.request(max_tokens=4000), metadata=bearer("slow"))
        await anext(aiter(stream))
        for wire in (w.mlx, w.vllm):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await read(wire.stub.Generate(wire.request("r2"), metadata=bearer("slow")))
            assert dict(raised.value.trailing_metadata())["treadle-error"] == "rate_limit_exceeded"
        assert w.engine.gate.statistics()["refused"] == {"rate_limit_exceeded": 2}
        assert w.engine.gate.statistics()["promises"]["open"] == 0
        stream.cancel()
        await until(w.idle)


@in_loop
async def test_a_call_that_waits_in_vain_costs_its_key_nothing(keys: Path) -> None:
    async with worker(forever, running=1, waiting=1, max_wait_s=0.05, api_keys=keys) as w:
        stream = w.mlx.stub.Generate(w.mlx.request(max_tokens=4000), metadata=bearer("alice"))
        await anext(aiter(stream))
        for _ in range(2):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await read(w.mlx.stub.Generate(w.mlx.request("r2"), metadata=bearer("slow")))
            assert dict(raised.value.trailing_metadata())["treadle-error"] == "text_generation_busy"
        stream.cancel()
        await until(w.idle)


@pytest.mark.usefixtures("far")
@in_loop
async def test_guessing_keys_is_slowed(keys: Path) -> None:
    async with worker(api_keys=keys) as w:
        for i in range(MOST_WRONG):
            assert await code(flush(w, bearer(f"wrong{i}"))) is UNKNOWN
        assert await code(flush(w, bearer("boss"))) is grpc.StatusCode.RESOURCE_EXHAUSTED


@in_loop
async def test_two_keys_of_one_kind_are_refused(keys: Path) -> None:
    async with worker(api_keys=keys) as w:
        assert await code(flush(w, bearer("boss") + bearer("eve"))) is grpc.StatusCode.INVALID_ARGUMENT
        both = (*bearer("boss"), ("x-api-key", "wrong"))
        assert (await flush(w, both)).success
        assert await code(flush(w, (("authorization", "Basic boss-key"),))) is DENIED, "no key: as this machine's"


@in_loop
async def test_a_message_of_a_stranger_is_not_parsed(keys: Path) -> None:
    """D9: megabytes of it would hold up the event loop."""
    async with worker(api_keys=keys, grpc_auth=True) as w:
        method = w.channel.unary_stream("/vllm.grpc.engine.VllmEngine/Generate")
        assert await code(drained(method(b"\xff" * 1000))) is UNKNOWN
        bad = await code(drained(method(b"\xff" * 1000, metadata=bearer("alice"))))
        assert bad is grpc.StatusCode.INVALID_ARGUMENT
        assert await code(w.channel.unary_unary("/vllm.grpc.engine.VllmEngine/Nope")(b"")) is (
            grpc.StatusCode.UNIMPLEMENTED
        )


@in_loop
async def test_bytes_that_are_no_message_end_their_call_alone(caplog: pytest.LogCaptureFixture) -> None:
    """gRPC's own answer is UNKNOWN, and a traceback in the log for each."""
    async with worker() as w:
        broken, c = b"\xff" * 9, w.channel
        answers = {
            "Generate": drained(c.unary_stream("/mlx.grpc.engine.MlxEngine/Generate")(broken)),
            "GetTokenizer": drained(c.unary_stream("/vllm.grpc.engine.VllmEngine/GetTokenizer")(broken)),
            "Abort": c.unary_unary("/vllm.grpc.engine.VllmEngine/Abort")(broken),
            "Check": c.unary_unary("/grpc.health.v1.Health/Check")(broken),
            "Watch": drained(c.unary_stream("/grpc.health.v1.Health/Watch")(broken)),
            "reflection": drained(
                c.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")(iter([broken]))
            ),
        }
        found = {name: await code(call) for name, call in answers.items()}
        assert found == dict.fromkeys(answers, grpc.StatusCode.INVALID_ARGUMENT)
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("strict", [False, True])
@in_loop
async def test_a_certificate_is_trusted_as_admin_unless_keys_are_asked_of_everyone(keys: Path, strict: bool) -> None:
    more: dict[str, Any] = {"grpc_auth": strict, "host": "localhost", "grpc_client_ca": TLS / "ca.pem"}
    more |= {"grpc_cert": TLS / "server.pem", "grpc_key": TLS / "server.key"}
    async with worker(api_keys=keys, prefix_cache=True, **more) as w:
        parts = [(TLS / name).read_bytes() for name in ("ca.pem", "client.key", "client.pem")]
        async with grpc.aio.secure_channel(w.address, grpc.ssl_channel_credentials(*parts)) as channel:
            stub = type(w.vllm.stub)(channel)

            async def flushed(metadata: Metadata = ()) -> grpc.StatusCode:
                return await code(stub.FlushCache(common_pb2.FlushCacheRequest(), metadata=metadata))

            assert await flushed() is (UNKNOWN if strict else OK)
            assert await flushed(bearer("eve")) is UNKNOWN
            assert await flushed(bearer("alice")) is DENIED
            assert await flushed(bearer("boss")) is OK
