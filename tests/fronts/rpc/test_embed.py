"""Embed of the vLLM wire: vectors of token ids, their refusals, aborts and access lines."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from msgspec.structs import replace

from tests.fronts.rpc.worker import refused, until, worker
from tests.fronts.web.server import forever
from tests.fronts.web.test_embeddings import unit
from tests.support.aio import in_loop
from treadle.core.messages import Pooling


def message(pb: Any, *tokens: int, id_: str = "e1") -> Any:
    return pb.EmbedRequest(request_id=id_, tokenized=pb.TokenizedInput(input_ids=tokens))


async def failure(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    return error.value


def able(w: Any, **fields: Any) -> None:
    can = w.engine.capabilities
    w.engine.admission.capabilities = replace(can, embedding=replace(can.embedding, **fields))


@in_loop
async def test_a_vector_of_token_ids() -> None:
    async with worker() as w:
        found = await w.vllm.stub.Embed(message(w.vllm.pb, 1, 2, 3))
        assert list(found.embedding) == unit([1, 2, 3])
        assert (found.prompt_tokens, found.embedding_dim) == (3, 4)
        able(w, poolings=(Pooling.MEAN,))
        assert list((await w.vllm.stub.Embed(message(w.vllm.pb, 7))).embedding) == unit([7], Pooling.MEAN)
        assert w.idle()


@in_loop
async def test_a_prompt_of_long_ids_that_fills_the_context_is_looked_at() -> None:
    """R7: its message has three bytes a token, more than those of other methods."""
    async with worker(context=30_000) as w:
        error = await failure(w.vllm.stub.Embed(message(w.vllm.pb, *[5] * 28_999, 150_000, *[150_000] * 20_000)))
        assert "49000 tokens" in (error.details() or "")


@pytest.mark.parametrize(
    ("tokens", "id_", "words"),
    [
        ((), "e1", "empty"),
        ((1, 100000), "e1", "100000"),
        ((1,) * 5000, "e1", "5000 tokens"),
        ((1,), "", "request_id is empty"),
        ((1,), "x" * 600, "600 characters"),
    ],
)
@in_loop
async def test_bad_input_is_refused(tokens: tuple[int, ...], id_: str, words: str) -> None:
    async with worker() as w:
        error = await failure(w.vllm.stub.Embed(message(w.vllm.pb, *tokens, id_=id_)))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert words in (error.details() or "")
        assert w.idle()


@in_loop
async def test_a_model_for_embeddings_alone_says_so_and_generates_nothing() -> None:
    async with worker() as w:
        info = await w.vllm.stub.GetModelInfo(w.vllm.pb.GetModelInfoRequest())
        assert info.is_generation
        able(w, only=True)
        info = await w.vllm.stub.GetModelInfo(w.vllm.pb.GetModelInfoRequest())
        assert not info.is_generation
        error = await refused(w.vllm.generate("g"))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "for embeddings" in (error.details() or "")


@in_loop
async def test_no_room_is_refused_at_once_and_an_abort_ends_it() -> None:
    async with worker(forever, running=1, waiting=1) as w:
        first = w.vllm.generate("first")
        await anext(aiter(first))
        waits = w.vllm.stub.Embed(message(w.vllm.pb, 1, id_="waits"))
        await until(lambda: w.engine.gate.rows == 2)
        error = await failure(w.vllm.stub.Embed(message(w.vllm.pb, 1, id_="late")))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await w.vllm.stub.Abort(w.vllm.pb.AbortRequest(request_ids=["waits"]))
        error = await failure(waits)
        assert error.code() is grpc.StatusCode.CANCELLED
        first.cancel()
        await until(w.idle)
