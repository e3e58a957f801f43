"""What a gRPC message may cost before it is refused."""

from __future__ import annotations

import grpc
import pytest

from tests.fronts.rpc.worker import WIRES, read, refused, until, worker
from tests.support.aio import in_loop
from treadle.engine.status import status_of
from treadle.fronts.live_requests import ABORT_BYTES, MOST_ABORTED
from treadle.fronts.rpc.interceptor import OTHER_BYTES
from treadle.fronts.size_limits import OTHER_FIELDS_BYTES, message_bytes


@pytest.mark.parametrize("wire", WIRES)
@in_loop
async def test_ids_beyond_the_context_are_refused_by_their_number_alone(wire: str) -> None:
    """D9. The ids are out of range, too: nobody looked at them."""
    async with worker(context=100) as w:
        error = await refused(w.wire(wire).generate(prompt=[2**31 - 1] * 5000))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "5000 tokens" in error.details()
        assert "100" in error.details()
        assert w.idle()


@pytest.mark.parametrize("wire", WIRES)
@in_loop
async def test_prompts_over_the_cache_are_refused_before_anything_is_computed(wire: str) -> None:
    choices = {"n": 2} if wire == "vllm" else {}
    async with worker(cache_tokens=100, waiting=12) as w:
        error = await refused(w.wire(wire).generate(prompt=[5] * 90, max_tokens=11, **choices))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "maximum context length is 100 tokens. However, you requested 101 tokens" in error.details()
        assert w.runner.seen == []
        assert w.idle()
        assert await read(w.wire(wire).generate(prompt=[5] * 90, max_tokens=10, **choices))


@pytest.mark.parametrize("wire", WIRES)
@in_loop
async def test_a_message_larger_than_any_prompt_is_not_parsed(wire: str) -> None:
    async with worker(context=100) as w:
        error = await refused(w.wire(wire).generate(prompt=[5] * (OTHER_FIELDS_BYTES + 2000)))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "the message has" in error.details()
        assert (await w.wire(wire).answer()).tokens == b"The answer."


@in_loop
async def test_a_full_server_refuses_before_it_looks_at_the_message() -> None:
    async with worker(context=100, pump=False, running=1, waiting=0) as w:
        first = w.mlx.generate("first")
        await until(lambda: w.engine.gate.rows == 1)
        error = await refused(w.mlx.generate("", prompt=[2**31 - 1] * 50))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        first.cancel()


@in_loop
async def test_an_abort_names_a_bounded_number_of_requests() -> None:
    async with worker() as w:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await w.mlx.abort(*(str(i) for i in range(MOST_ABORTED + 1)))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert str(MOST_ABORTED) in str(caught.value.details())
        await w.mlx.abort(*(str(i) for i in range(MOST_ABORTED)))


@pytest.mark.parametrize("field", ["stop_token_ids", "logit_bias"])
@in_loop
async def test_lists_are_counted_before_they_are_copied(field: str) -> None:
    async with worker() as w:
        many = dict.fromkeys(range(5000), 1.0) if field == "logit_bias" else [1] * 5000
        error = await refused(w.vllm.generate(**{field: many}))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert f"{field} has 5000" in error.details()


@in_loop
async def test_a_long_prompt_without_scores_is_not_refused_for_their_size() -> None:
    """D22: 900,000 ids "whose log-probabilities do not fit", though none were asked for."""
    async with worker(context=1_000_000, pump=False) as w:
        call = w.mlx.generate(prompt=[65] * 900_000)
        await until(lambda: bool(status_of(w.engine)["requests"]))
        assert status_of(w.engine)["requests"][0]["prompt_tokens"] == 900_000
        call.cancel()


def test_the_longest_message_follows_from_the_context() -> None:
    assert message_bytes(4096) == 4096 * 5 + OTHER_FIELDS_BYTES
    assert message_bytes(4096, 48) == 4096 * 12 + OTHER_FIELDS_BYTES
    assert message_bytes(None) == message_bytes(4096, 48, images=True) == 16 << 20


@in_loop
async def test_a_message_that_no_prompt_needs_is_not_parsed_whatever_the_transport_takes() -> None:
    """R7: parsing 8 MB of ids takes the event loop tens of milliseconds."""
    async with worker(context=100, max_body_bytes=16 << 20) as w:
        error = await refused(w.mlx.generate(prompt=[5] * (OTHER_FIELDS_BYTES + 2000)))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "the message has" in error.details()


@pytest.mark.parametrize(("method", "size"), [("Abort", ABORT_BYTES), ("GetModelInfo", OTHER_BYTES)])
@in_loop
async def test_each_method_has_a_longest_message_of_its_own(method: str, size: int) -> None:
    async with worker() as w:
        call = w.channel.unary_unary(f"/mlx.grpc.engine.MlxEngine/{method}")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(b"\xff" * (size + 1))
        assert f"the message has {size + 1} bytes" in str(caught.value.details())
