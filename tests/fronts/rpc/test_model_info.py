"""What a worker says of itself: not a word until it is ready, and the truth from then on."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import io
import json
import zipfile
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from tests.fronts.rpc.worker import WIRES, Scene, refused, until, worker
from tests.fronts.web.server import forever
from tests.support.aio import in_loop
from tests.support.bytes_text import VOCABULARY
from tests.support.tiny import make_tiny
from treadle.config import Settings
from treadle.errors import ConfigError
from treadle.fronts.rpc.server import RpcServer
from treadle.fronts.served_models import ServedModel
from treadle.text import TextModel

TLS = Path(__file__).parents[2] / "support" / "tls"
both = pytest.mark.parametrize("name", WIRES)


async def checked(w: Scene, service: str = "") -> Any:
    stub = health_pb2_grpc.HealthStub(w.channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status


def unary_calls(w: Scene, name: str) -> dict[str, Any]:
    """Every call of a wire that is answered in one message, as a function to make it."""
    wire = w.wire(name)

    def call(rpc: str) -> Any:
        return getattr(wire.stub, rpc)(getattr(wire.pb, f"{rpc}Request")())

    names = ["HealthCheck", "GetModelInfo", "GetServerInfo", *(["GetLoads"] if name == "vllm" else [])]
    return {rpc: functools.partial(call, rpc) for rpc in names}


async def all_unavailable(w: Scene, name: str, why: str) -> None:
    for rpc, call in unary_calls(w, name).items():
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call()
        assert (rpc, error.value.code()) == (rpc, grpc.StatusCode.UNAVAILABLE)
        assert why in error.value.details()
    wire = w.wire(name)
    for call in (wire.generate(), wire.stub.GetTokenizer(common_pb2.GetTokenizerRequest())):
        assert (await refused(call)).code() is grpc.StatusCode.UNAVAILABLE


@both
@in_loop
async def test_until_it_is_ready_every_call_is_unavailable(name: str) -> None:
    """C1, gateway.md fact 5: "not healthy" with an OK would be registered as ready."""
    async with worker(start=False) as w:
        await all_unavailable(w, name, "not ready")
        assert await checked(w) == health_pb2.HealthCheckResponse.NOT_SERVING
        await w.engine.start()
        assert (await unary_calls(w, name)["HealthCheck"]()).healthy
        assert await checked(w) == health_pb2.HealthCheckResponse.SERVING
        assert (await w.wire(name).answer()).end.finish_reason == "stop"


@both
@in_loop
async def test_the_tokenizer_belongs_to_being_ready(name: str) -> None:
    async with worker() as w:
        loaded, w.texts.loaded = w.texts.loaded, None
        await all_unavailable(w, name, "loading")
        w.texts.loaded = loaded
        assert (await unary_calls(w, name)["HealthCheck"]()).healthy


@both
@in_loop
async def test_while_it_drains_new_calls_are_unavailable_and_running_ones_go_on(name: str) -> None:
    """C3"""
    async with worker(forever) as w:
        call = w.wire(name).generate("running", max_tokens=100)
        stream = aiter(call)
        count = len((await anext(stream)).chunk.token_ids)
        w.engine.drain()
        await all_unavailable(w, name, "")
        assert await checked(w) == health_pb2.HealthCheckResponse.NOT_SERVING
        async for message in stream:
            count += len(message.chunk.token_ids)
        assert count == 100


@both
@in_loop
async def test_the_model_is_described_as_a_gateway_needs_it(name: str) -> None:
    async with worker(context=512, default_sampling={"temperature": 0.6}) as w:
        info = await unary_calls(w, name)["GetModelInfo"]()
        text = w.texts.model()
        assert (info.served_model_name, info.model_path) == ("m", str(text.folder))
        assert (info.max_context_length, info.max_req_input_len, info.vocab_size) == (512, 511, VOCABULARY)
        assert info.is_generation
        assert list(info.eos_token_ids) == list(text.eos_token_ids)
        assert info.bos_token_id == (text.special_id("bos_token") or 0)
        if name == "vllm":
            assert json.loads(info.default_sampling_params_json) == {"temperature": 0.6}


@in_loop
async def test_a_template_of_ones_own_must_be_fetched(tmp_path: Path) -> None:
    """A gateway on the same machine would read the folder's own template else."""
    async with worker(chat_template=tmp_path / "t.jinja") as w:
        assert (await unary_calls(w, "mlx")["GetModelInfo"]()).model_path == "m"


@both
@in_loop
async def test_the_server_counts_its_requests(name: str) -> None:
    async with worker(forever, running=2, context=100_000) as w:
        calls = [w.wire(name).generate(f"r{i}", prompt=(1, 2, 3)) for i in range(3)]
        await until(lambda: len(w.server.calls) == 3 and len(w.runner.rows) == 2)
        info = await unary_calls(w, name)["GetServerInfo"]()
        assert (info.active_requests, info.server_type) == (3, "treadle")
        assert info.uptime_seconds > 0
        if name == "vllm":
            assert info.max_num_seqs == 2
            (load,) = (await unary_calls(w, name)["GetLoads"]()).loads
            assert (load.num_running_reqs, load.num_waiting_reqs, load.num_total_reqs) == (2, 1, 3)
            assert (load.max_running_requests, load.num_waiting_uncached_tokens) == (2, 3)
        for call in calls:
            call.cancel()
        await until(w.idle)


@in_loop
async def test_load_tells_the_rate_between_two_looks() -> None:
    async with worker() as w:
        facts_rate = []
        for _ in range(2):
            (load,) = (await w.vllm.stub.GetLoads(w.vllm.pb.GetLoadsRequest())).loads
            facts_rate.append(load.gen_throughput)
            await w.mlx.answer(f"r{len(facts_rate)}")
        assert facts_rate == [0.0, 0.0]
        assert not (await w.vllm.stub.GetLoads(w.vllm.pb.GetLoadsRequest(dp_rank=1))).loads


@both
@in_loop
async def test_the_tokenizer_comes_as_a_zip_with_its_digest_last(name: str, tmp_path: Path) -> None:
    async with worker() as w:
        w.texts.loaded = TextModel.load(make_tiny(tmp_path / "tiny"))
        stub = w.wire(name).stub
        chunks = [chunk async for chunk in stub.GetTokenizer(common_pb2.GetTokenizerRequest())]
        data = b"".join(chunk.data for chunk in chunks)
        assert [chunk.sha256 for chunk in chunks[:-1]] == [""] * (len(chunks) - 1)
        assert chunks[-1].sha256 == hashlib.sha256(data).hexdigest()
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            names = set(archive.namelist())
            template = archive.read("chat_template.jinja").decode()
        assert {"tokenizer.json", "config.json"} <= names
        assert not {n for n in names if n.endswith(".safetensors") or "/" in n}
        own = w.texts.model().chat_template
        assert own is not None
        assert template == own.source


@in_loop
async def test_what_is_not_there_yet_says_so() -> None:
    async with worker() as w:
        stub = w.vllm.stub
        for call in (
            stub.StartProfile(common_pb2.StartProfileRequest()),
            stub.StopProfile(common_pb2.StopProfileRequest()),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await call
            assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED
            assert "this worker" in error.value.details()
        error = await refused(stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest()))
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED


@in_loop
async def test_health_knows_its_services_and_tells_of_changes() -> None:
    async with worker(start=False) as w:
        stub = health_pb2_grpc.HealthStub(w.channel)
        for service in ("mlx.grpc.engine.MlxEngine", "vllm.grpc.engine.VllmEngine"):
            assert await checked(w, service) == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await checked(w, "stranger")
        assert error.value.code() is grpc.StatusCode.NOT_FOUND
        watch = stub.Watch(health_pb2.HealthCheckRequest())
        seen = [(await anext(aiter(watch))).status]
        await w.engine.start()
        seen.append((await anext(aiter(watch))).status)
        assert seen == [health_pb2.HealthCheckResponse.NOT_SERVING, health_pb2.HealthCheckResponse.SERVING]
        watch.cancel()
        statuses = (await stub.List(health_pb2.HealthListRequest())).statuses
        assert {status.status for status in statuses.values()} == {health_pb2.HealthCheckResponse.SERVING}
        unknown = stub.Watch(health_pb2.HealthCheckRequest(service="stranger"))
        assert (await anext(aiter(unknown))).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        unknown.cancel()


async def listed(w: Scene) -> set[str]:
    stub = reflection_pb2_grpc.ServerReflectionStub(w.channel)

    async def asks() -> Any:
        yield reflection_pb2.ServerReflectionRequest(list_services="")

    async for answer in stub.ServerReflectionInfo(asks()):
        return {service.name for service in answer.list_services_response.service}
    raise AssertionError("no answer")


@pytest.mark.parametrize(("wire", "offered"), [("mlx", {"mlx"}), ("vllm", {"vllm"}), ("both", {"mlx", "vllm"})])
@in_loop
async def test_the_wires_that_were_asked_for_are_offered_and_no_other(wire: str, offered: set[str]) -> None:
    async with worker(grpc_wire=wire) as w:
        names = await listed(w)
        assert {name for name in WIRES if any(n.startswith(name) for n in names)} == offered
        assert {"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"} <= names
        for name in WIRES:
            call = unary_calls(w, name)["HealthCheck"]()
            if name in offered:
                assert (await call).healthy
            else:
                with pytest.raises(grpc.aio.AioRpcError) as error:
                    await call
                assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED


def files(**more: str) -> dict[str, Any]:
    return {f"grpc_{key}": TLS / name for key, name in {"cert": "server.pem", "key": "server.key", **more}.items()}


@in_loop
async def test_over_tls_strangers_stay_out() -> None:
    async with worker(**files(client_ca="ca.pem")) as w:
        root = (TLS / "ca.pem").read_bytes()
        key, certificate = (TLS / "client.key").read_bytes(), (TLS / "client.pem").read_bytes()
        pair = {"private_key": key, "certificate_chain": certificate}
        for more, welcome in ((pair, True), ({}, False)):
            credentials = grpc.ssl_channel_credentials(root, **more)
            async with grpc.aio.secure_channel(w.address, credentials) as channel:
                call = type(w.mlx.stub)(channel).HealthCheck(w.mlx.pb.HealthCheckRequest())
                if welcome:
                    assert (await call).healthy
                else:
                    with pytest.raises(grpc.aio.AioRpcError):
                        await call


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"grpc_port": 70000}, "grpc_port must be 0 to 65535"),
        ({"grpc_port": 1, "grpc_wire": "sglang"}, "grpc_wire must be one of mlx, vllm, both"),
        ({"grpc_wire": "mlx"}, "grpc_wire does nothing without grpc_port"),
        ({"grpc_host": "0.0.0.0"}, "grpc_host does nothing without grpc_port"),
        ({"grpc_no_auth": True}, "grpc_no_auth does nothing without grpc_port"),
        ({"grpc_port": 1, "grpc_cert": Path("c")}, "belong together"),
        ({"grpc_port": 1, "grpc_client_ca": Path("c")}, "give all three"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Settings(**given)


@in_loop
async def test_a_port_that_is_taken_and_a_file_that_is_not_there_are_told(tmp_path: Path) -> None:
    async with worker() as w:
        port = int(w.address.rpartition(":")[2])
        with pytest.raises(ConfigError, match=r"can't listen for gRPC on 127\.0\.0\.1"):
            await _started(w, Settings(grpc_port=port))
        missing = tmp_path / "none.pem"
        with pytest.raises(ConfigError, match=r"`grpc_(cert|key)` .*none\.pem can't be read"):
            await _started(w, Settings(grpc_port=0, grpc_cert=missing, grpc_key=missing))


async def _started(w: Scene, settings: Settings) -> None:
    server = RpcServer(ServedModel(("m",), w.engine, w.texts), settings, w.metrics)
    try:
        await server.start()
    finally:
        await server.stop(0)
        await asyncio.sleep(0)


@in_loop
async def test_the_cache_of_prompts_is_shown_and_flushed() -> None:
    async with worker(prefix_cache=True) as w:
        both = [(await w.wire(name).answer(name, prompt=b"hello there")).end.cached_tokens for name in WIRES]
        assert both == [0, 10]
        (load,) = (await w.vllm.stub.GetLoads(w.vllm.pb.GetLoadsRequest())).loads
        assert load.cache_hit_rate == pytest.approx(10 / 22)
        flushed = await w.vllm.stub.FlushCache(common_pb2.FlushCacheRequest(timeout_s=5))
        assert flushed.success
        assert "dropped" in flushed.message
        assert (await w.vllm.answer("again", prompt=b"hello there")).end.cached_tokens == 0


@pytest.mark.parametrize("stream", [True, False])
@both
@in_loop
async def test_every_message_says_what_was_reused(name: str, stream: bool) -> None:
    async with worker(prefix_cache=True) as w:
        for i, reused in enumerate((0, 4)):
            answer = await w.wire(name).answer(f"r{i}", prompt=b"abcde", stream=stream)
            assert {message.cached_tokens for message in (*answer.chunks, *answer.completes)} == {reused}


@in_loop
async def test_flushing_needs_an_engine_and_no_cache() -> None:
    async with worker() as w:
        assert (await w.vllm.stub.FlushCache(common_pb2.FlushCacheRequest())).success
        await w.engine.stop()
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await w.vllm.stub.FlushCache(common_pb2.FlushCacheRequest())
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE


@in_loop
async def test_both_wires_cache_as_those_without_a_key() -> None:
    async with worker() as w:
        for name in WIRES:
            await w.wire(name).answer(name)
        (salt,) = {request.salt for request in w.runner.seen}
        assert len(salt) == 32
