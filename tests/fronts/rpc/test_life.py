"""A call from its coming to its end: places, aborts, clients that vanish or do not read, engines that die."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from tests.fronts.rpc.worker import WIRES, read, refused, until, worker
from tests.fronts.web.server import forever, says
from tests.support.aio import in_loop
from treadle.core.messages import Submit
from treadle.fronts.rpc.context import client_of
from treadle.fronts.rpc.generate import ServiceContext

both = pytest.mark.parametrize("name", WIRES)


@both
@in_loop
async def test_no_room_is_refused_at_once_with_when_to_come_again(name: str) -> None:
    """D1, E1: RESOURCE_EXHAUSTED before the first message, so that the gateway tries another worker."""
    async with worker(forever, running=1, waiting=0) as w:
        first = w.wire(name).generate("first")
        await anext(aiter(first))
        call = w.wire(name).generate("second")
        error = await refused(call)
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        metadata = dict(error.trailing_metadata())
        assert metadata["treadle-error"] == "text_generation_busy"
        assert int(metadata["retry-after-ms"]) > 0
        first.cancel()
        await until(w.idle)
        stub, again = w.wire(name).stub, w.wire(name).request("again", max_tokens=1)
        call = stub.Generate(again, metadata=(("x-treadle-ticket", metadata["x-treadle-ticket"]),))
        await read(call)
        assert w.engine.gate.statistics()["promises"] == {"open": 0, "kept": 1, "lapsed": 0}


@in_loop
async def test_a_wait_is_bounded_though_the_gateway_sets_no_deadline() -> None:
    """D2, gateway.md fact 6; and nothing is sent before admission."""
    async with worker(forever, running=1, waiting=1, max_wait_s=0.05) as w:
        first = w.mlx.generate("first")
        await anext(aiter(first))
        error = await refused(w.mlx.generate("second"))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "no slot came free" in error.details()
        first.cancel()
        await until(w.idle)


@both
@in_loop
async def test_an_abort_ends_the_stream_with_a_complete(name: str) -> None:
    """E1: never a stream that just stops; the client has its finish reason and its usage."""
    async with worker(forever) as w:
        wire = w.wire(name)
        call = wire.generate("r1")
        await anext(aiter(call))
        await wire.abort("r1")
        answer = await read(call)
        assert answer.end.finish_reason == "abort"
        assert answer.end.prompt_tokens == 5
        assert answer.end.completion_tokens >= 1
        await until(w.idle)
        await wire.abort("r1")
        assert (await wire.answer("r2", max_tokens=2)).end.finish_reason == "length"


@both
@in_loop
async def test_an_abort_before_its_request_is_remembered(name: str) -> None:
    """gateway.md 2.3.6"""
    async with worker(forever) as w:
        wire = w.wire(name)
        await wire.abort("early")
        answer = await wire.answer("early")
        assert (answer.end.finish_reason, answer.end.completion_tokens) == ("abort", 0)
        assert not w.runner.seen
        assert (await wire.answer("early", max_tokens=2)).end.finish_reason == "length"
        await until(w.idle)


@in_loop
async def test_an_abort_while_it_waits_for_its_place_ends_it_too() -> None:
    async with worker(forever, running=1) as w:
        first = w.mlx.generate("first")
        await anext(aiter(first))
        waiting = asyncio.ensure_future(w.mlx.answer("second"))
        await until(lambda: len(w.server.calls) == 2)
        await w.mlx.abort("second")
        assert (await waiting).end.finish_reason == "abort"
        assert len(w.runner.seen) == 1
        first.cancel()
        await until(w.idle)


@in_loop
async def test_an_abort_while_it_is_tokenized_ends_it_too() -> None:
    async with worker(forever) as w:
        held = asyncio.Event()
        w.texts.pool.gate = held.wait
        waiting = asyncio.ensure_future(w.vllm.answer("r", prompt="hello", n=2))
        await until(lambda: len(w.server.calls) == 1)
        await w.vllm.abort("r")
        held.set()
        assert [end.finish_reason for end in (await waiting).completes] == ["abort", "abort"]
        assert not w.runner.seen
        await until(w.idle)


@in_loop
async def test_aborts_of_strangers_harm_nobody() -> None:
    async with worker() as w:
        call = w.mlx.generate("mine")
        await w.mlx.abort("yours", "theirs", "", "x" * 100_000)
        assert (await read(call)).end.finish_reason == "stop"


@both
@in_loop
async def test_an_id_that_is_alive_is_refused_and_the_first_goes_on(name: str) -> None:
    """gateway.md 2.3.3: a second request of the same id cut the first one short."""
    async with worker(forever) as w:
        wire = w.wire(name)
        call = wire.generate("twin", max_tokens=300)
        first = aiter(call)
        tokens = list((await anext(first)).chunk.token_ids)
        error = await refused(w.mlx.generate("twin"))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "'twin' is still running" in error.details()
        async for message in first:
            tokens += message.chunk.token_ids
        assert bytes(tokens) == b"x" * 300
        assert (await wire.answer("twin", max_tokens=2)).end.completion_tokens == 2


@both
@pytest.mark.parametrize("stream", [True, False])
@in_loop
async def test_a_client_that_vanishes_frees_its_place(name: str, stream: bool) -> None:
    """B3, gateway.md fact 7: the gateway cancels a call without an Abort where its client did not stream."""
    async with worker(forever, running=1, context=100_000) as w:
        call = w.wire(name).generate(stream=stream)
        reading = asyncio.ensure_future(read(call))
        await until(lambda: bool(w.runner.rows))
        call.cancel()
        with pytest.raises((asyncio.CancelledError, grpc.aio.AioRpcError)):
            await reading
        await until(w.idle)


@in_loop
async def test_a_client_whose_connection_breaks_frees_its_places() -> None:
    async with worker(forever, context=100_000) as w:
        other = grpc.aio.insecure_channel(w.address, options=[("grpc.use_local_subchannel_pool", 1)])
        stub = type(w.mlx.stub)(other)
        calls = [stub.Generate(w.mlx.request(f"r{i}")) for i in range(3)]
        await until(lambda: len(w.runner.rows) == 3)
        await other.close()
        await until(w.idle)
        del calls


@in_loop
async def test_a_reader_that_stalls_loses_its_place_and_nobody_waits_for_it() -> None:
    """B5"""
    async with worker(forever, running=2, context=200_000, stall_s=0.1) as w:
        stalled = w.mlx.generate("stalled", logprobs=20)
        await anext(aiter(stalled))
        await until(lambda: len(w.runner.rows) == 0)
        assert (await w.mlx.answer("other", max_tokens=2)).end.completion_tokens == 2
        stalled.cancel()
        await until(w.idle)


class Gone:
    """A call whose transport has gone, before it is cancelled."""

    def __init__(self, context: Any) -> None:
        self._context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def write(self, message: Any) -> None:
        raise grpc.aio.InternalError("execute_batch failed")


@both
@in_loop
async def test_a_client_that_leaves_while_it_is_written_to_is_no_fault_of_the_server(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    generate = ServiceContext.generate
    monkeypatch.setattr(ServiceContext, "generate", lambda self, context, *rest: generate(self, Gone(context), *rest))
    async with worker(forever, context=100_000) as w:
        error = await refused(w.wire(name).generate())
        assert error.code() is grpc.StatusCode.CANCELLED
        await until(w.idle)
        assert w.metrics.value("treadle_grpc_requests_total", {"wire": name, "code": "CANCELLED"}) == 1
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@both
@in_loop
async def test_a_step_that_fails_fails_its_requests_and_not_the_worker(name: str) -> None:
    """A5: upstream tried the same step for ever."""
    async with worker(forever) as w:
        wire = w.wire(name)
        call = wire.generate("r1")
        stream = aiter(call)
        await anext(stream)
        w.runner.fail = ValueError("boom")
        with pytest.raises(grpc.aio.AioRpcError) as error:
            async for _ in stream:
                pass
        assert error.value.code() in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE)


@in_loop
async def test_a_bug_in_the_front_is_internal_and_says_nothing_of_the_prompt(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with worker() as w:
        monkeypatch.setattr(w.texts, "model", lambda: 1 / 0)
        error = await refused(w.mlx.generate())
        assert error.code() is grpc.StatusCode.INTERNAL
        assert "its log says how" in error.details()
        assert "hello" not in caplog.text


@in_loop
async def test_many_at_once_all_come_to_their_end() -> None:
    """E3"""

    def script(request: Submit, position: int) -> int:
        return request.prompt[0] if position < 20 else ord("!")

    async with worker(script, running=64, waiting=0) as w:
        answers = await asyncio.gather(
            *(w.mlx.answer(f"r{i}", prompt=(i,), max_tokens=20, ignore_eos=True) for i in range(64))
        )
        for i, answer in enumerate(answers):
            assert [t for chunk in answer.chunks for t in chunk.token_ids] == [i] * 20
        await until(w.idle)


@in_loop
async def test_an_abort_storm_leaks_nothing() -> None:
    """R1"""
    async with worker(says("word " * 40), running=8, waiting=300, max_wait_s=60.0) as w:
        calls = [asyncio.ensure_future(w.wire(WIRES[i % 2]).answer(f"r{i}")) for i in range(200)]
        for i in range(200):
            await w.mlx.abort(f"r{i}")
        answers = await asyncio.gather(*calls)
        assert {answer.end.finish_reason for answer in answers} <= {"abort", "stop"}
        await until(w.idle)


@in_loop
async def test_every_call_has_its_line_and_its_count(caplog: pytest.LogCaptureFixture) -> None:
    """D4: and never its prompt."""
    caplog.set_level("INFO", logger="treadle.access")
    async with worker(forever) as w:
        await w.mlx.answer("good", prompt="secret", max_tokens=2)
        await refused(w.vllm.generate("bad", prompt=()))
        gone = w.vllm.generate("gone")
        await anext(aiter(gone))
        gone.cancel()
        await until(lambda: len(caplog.records) == 3)
        lines = [record.__dict__["fields"] for record in caplog.records]
        counted = w.metrics.render().decode()
    assert [(line["request"], line["status"], line.get("error")) for line in lines] == [
        ("good", 200, None),
        ("bad", 400, "invalid_request"),
        ("gone", 499, None),
    ]
    assert lines[0]["completion_tokens"] == 2
    assert "secret" not in str(lines)
    for wire, code in (("mlx", "OK"), ("vllm", "INVALID_ARGUMENT"), ("vllm", "CANCELLED")):
        assert f'treadle_grpc_requests_total{{code="{code}",wire="{wire}"}} 1.0' in counted


@in_loop
async def test_clients_are_named_where_it_is_asked_for_and_their_refusals_come_in_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="treadle.access")
    async with worker(forever, pump=False, running=1, waiting=0, log_client=True) as w:
        first = asyncio.ensure_future(anext(aiter(w.mlx.generate("first"))))
        await until(lambda: w.engine.busy == 1)
        for i in range(5):
            await refused(w.mlx.generate(f"r{i}"))
        assert [record.__dict__["fields"]["request"] for record in caplog.records] == ["r0"]
        assert caplog.records[0].__dict__["fields"]["client"].startswith("127.0.0.1:")
        first.cancel()


@pytest.mark.parametrize(
    ("peer", "client"),
    [("ipv4:127.0.0.1:5000", "127.0.0.1:5000"), ("ipv6:%5B::1%5D:5000", "[::1]:5000"), ("unix:", "")],
)
def test_a_peer_is_named_as_in_http(peer: str, client: str) -> None:
    assert client_of(SimpleNamespace(peer=lambda: peer)) == client
