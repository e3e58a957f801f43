"""POST /v1/embeddings: inputs in all forms, refusals with the place, and lists longer than the server has places."""

from __future__ import annotations

import asyncio
import base64
import math
from array import array
from typing import Any

import pytest
from msgspec.structs import replace

from tests.fronts.web.server import Front, forever, front, settle
from tests.support.aio import in_loop
from tests.support.asgi import Client, post
from tests.support.scripted import vector_of
from treadle.core.messages import Pooling, Submit
from treadle.fronts.generation.embedding import normalized
from treadle.fronts.generation.embedding_inputs import MAX_INPUTS
from treadle.runner.base import RunnerBroken

PATH = "/v1/embeddings"


def able(f: Front, **fields: Any) -> None:
    """Change what the model's embeddings are."""
    assert f.engine.capabilities is not None
    embedding = replace(f.engine.capabilities.embedding, **fields)
    f.engine.admission.capabilities = replace(f.engine.capabilities, embedding=embedding)


def unit(prompt: list[int], pooling: Pooling = Pooling.LAST, dimensions: int | None = None) -> list[float]:
    whole = vector_of(Submit(id="", prompt=tuple(prompt), max_tokens=0, pooling=pooling))
    return array("f", normalized(array("f", whole).tobytes(), dimensions)).tolist()


def vectors(client: Client) -> list[list[float]]:
    assert client.status == 200, client.body
    data = client.json["data"]
    assert [one["index"] for one in data] == list(range(len(data)))
    return [one["embedding"] for one in data]


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("hello", [b"hello"]),
        (["hello", "you"], [b"hello", b"you"]),
        ([1, 2.0, 3], [bytes([1, 2, 3])]),
        ([[1], [4, 5]], [bytes([1]), bytes([4, 5])]),
    ],
)
@in_loop
async def test_all_forms_of_inputs(given: Any, prompts: list[bytes]) -> None:
    async with front() as f:
        client = await f.post(PATH, {"input": given, "model": "m", "user": "me"})
        assert vectors(client) == [unit(list(prompt)) for prompt in prompts]
        assert {"model", "object", "data", "usage"} == client.json.keys()
        tokens = sum(map(len, prompts))
        assert client.json["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
        assert f.idle()


@in_loop
async def test_base64_is_of_float32_numbers() -> None:
    async with front() as f:
        client = await f.post(PATH, {"input": "hello", "encoding_format": "base64"})
        (data,) = vectors(client)
        assert array("f", base64.b64decode(data)).tolist() == unit(list(b"hello"))  # type: ignore[arg-type]


@in_loop
async def test_dimensions_are_cut_and_scaled_again() -> None:
    async with front() as f:
        (vector,) = vectors(await f.post(PATH, {"input": "hello", "dimensions": 2, "encoding_format": "float"}))
        assert vector == unit(list(b"hello"), dimensions=2)
        assert math.isclose(math.hypot(*vector), 1.0, rel_tol=1e-6)


@in_loop
async def test_another_pooling_and_the_model_s_own() -> None:
    async with front() as f:
        (vector,) = vectors(await f.post(PATH, {"input": "hello", "pooling": "cls"}))
        assert vector == unit(list(b"hello"), Pooling.CLS)
        able(f, poolings=(Pooling.MEAN,))
        (vector,) = vectors(await f.post(PATH, {"input": "hello"}))
        assert vector == unit(list(b"hello"), Pooling.MEAN)
        refused = await f.post(PATH, {"input": "hello", "pooling": "last"})
        assert (refused.status, refused.json["error"]["param"]) == (400, "pooling")
        assert "trained for mean" in refused.json["error"]["message"]


def test_a_vector_of_zeros_is_left() -> None:
    assert array("f", normalized(array("f", [0.0, 0.0]).tobytes())).tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({}, "input", "missing"),
        ({"input": ""}, "input", "empty"),
        ({"input": []}, "input", "empty"),
        ({"input": ["a", ""]}, "input[1]", "input[1] is empty"),
        ({"input": [[1], []]}, "input[1]", "empty"),
        ({"input": ["a", 3]}, "input[1]", "must be"),
        ({"input": None}, "input", "must be"),
        ({"input": [7, 100000]}, "input", "100000"),
        ({"input": [[7], [-1]]}, "input[1]", "-1"),
        ({"input": ["x"] * (MAX_INPUTS + 1)}, "input", "at most 2048"),
        ({"input": "x", "dimensions": 5}, "dimensions", "have 4"),
        ({"input": "x", "dimensions": 0}, "dimensions", "from 1 to"),
        ({"input": "x", "dimensions": "2"}, "dimensions", "must be"),
        ({"input": "x", "priority": 9999}, "priority", "from -1000 to 1000"),
        ({"input": "x", "cache_salt": ""}, "cache_salt", "cache_salt"),
        ({"input": "x", "model": "other"}, "model", "not served"),
        ({"input": "x", "inputs": "y"}, "inputs", "did you mean 'input'"),
        ({"input": "x", "pooling": "max"}, "pooling", "it must be 'last', 'mean' or 'cls'"),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format", "it must be 'float' or 'base64'"),
        ({"prompt": "x"}, "input", "'prompt' is a field of /v1/completions"),
        ({"input": ["ab", "y" * 5000]}, "input[1]", "5000 tokens"),
        ({"input": "z" * 80000}, "input", "context length is 4096"),
    ],
)
@in_loop
async def test_bad_input_is_refused_by_its_place(fields: dict[str, Any], param: str, words: str) -> None:
    async with front() as f:
        client = await f.post(PATH, fields)
        error = client.json["error"]
        assert (client.status, error["param"]) == (404 if "other" in fields.values() else 400, param), error
        assert words in error["message"]
        assert not f.runner.seen
        assert f.idle()


@in_loop
async def test_a_text_as_long_as_the_context_is_embedded() -> None:
    """No token of an answer has to fit."""
    async with front(context=64) as f:
        assert (await f.post(PATH, {"input": "x" * 64})).status == 200
        assert (await f.post(PATH, {"input": "x" * 65})).json["error"]["code"] == "context_length_exceeded"


@in_loop
async def test_a_model_without_embeddings_refuses_them_and_one_for_them_alone_generates_nothing() -> None:
    async with front() as f:
        able(f, unavailable="its last norm is not known")
        for given in ("x", ["y" * 100] * 1000):
            client = await f.post(PATH, {"input": given})
            assert (client.status, client.json["error"]["param"]) == (400, "model")
            assert "its last norm is not known" in client.json["error"]["message"]
        able(f, unavailable="", only=True)
        assert (await f.post(PATH, {"input": "x"})).status == 200
        for client in (await f.chat(), await f.complete()):
            assert (client.status, client.json["error"]["param"]) == (400, "model")
            assert "it is for embeddings" in client.json["error"]["message"]


@pytest.mark.parametrize("pump", [True, False])
@in_loop
async def test_more_inputs_than_places_take_turns(pump: bool) -> None:
    """They hold no more places than can run at once, and come back in their order."""
    texts = [f"text {i} {'x' * (i % 7)}" for i in range(100)]
    async with front(running=3, waiting=2, pump=pump) as f:
        client = post(PATH, {"input": texts}).start(f.app)
        most = 0
        while not pump and client.status is None:
            await f.step()
            most = max(most, f.engine.gate.rows)
        assert client.task is not None
        await client.task
        assert vectors(client) == [unit(list(text.encode())) for text in texts]
        assert most == (0 if pump else 3)
        await f.step()
        counts = f.engine.gate.statistics()
        assert (counts["accepted"], counts["ended"]["stop"]) == (100, 100)
        assert f.idle()


@in_loop
async def test_a_large_body_is_parsed_in_a_text_worker() -> None:
    texts = [f"text {i}" for i in range(2048)]
    async with front(running=8) as f:
        found = vectors(await f.post(PATH, {"input": [text + "y" * 60 for text in texts], "encoding_format": "float"}))
        assert found[-1] == unit(list((texts[-1] + "y" * 60).encode()))
        client = await f.post(PATH, {"input": [*texts[:-1], "y" * 5000]})
        assert client.json["error"]["param"] == "input[2047]"
        client = await f.post(PATH, {"input": [*[[1]] * 2000, [700]]})
        assert client.json["error"]["param"] == "input[2000]"
        assert f.idle()


@in_loop
async def test_others_get_their_turn_beside_a_long_list() -> None:
    async with front(running=2, waiting=4, pump=False) as f:
        many = post(PATH, {"input": ["x"] * 40}).start(f.app)
        await f.step(2)
        chat = post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}).start(f.app)
        steps = 0
        while chat.status is None:
            await f.step()
            steps += 1
        assert many.status is None
        assert steps < 25
        while many.status is None:
            await f.step()
        assert len(vectors(many)) == 40
        await f.step()
        assert f.idle()


@in_loop
async def test_no_room_is_refused_at_once() -> None:
    """D1"""
    async with front(forever, pump=False, running=1, waiting=0) as f:
        first = post("/v1/completions", {"prompt": "x", "stream": True}).start(f.app)
        await f.step(2)
        runs = f.texts.pool.runs
        client = await f.post(PATH, {"input": ["x", "y"]})
        assert (client.status, client.json["error"]["code"]) == (503, "text_generation_busy")
        assert int(client.headers["retry-after"]) >= 1
        assert f.texts.pool.runs == runs
        first.leave()
        await f.step(2)
        assert first.task is not None
        await first.task


@in_loop
async def test_a_client_that_leaves_takes_its_inputs_with_it() -> None:
    async with front(running=2, pump=False) as f:
        client = post(PATH, {"input": ["x" * 200] * 9}).start(f.app)
        await f.step(2)
        assert f.engine.gate.rows == 2
        client.leave()
        await f.step(3)
        assert client.task is not None
        await asyncio.gather(client.task, return_exceptions=True)
        assert f.idle()


@in_loop
async def test_one_input_that_fails_fails_the_request() -> None:
    async with front(running=2, pump=False) as f:
        client = post(PATH, {"input": ["x" * 200] * 9}).start(f.app)
        await f.step(2)
        f.runner.fail = ValueError("no such token")
        for _ in range(6):
            await f.step()
        f.runner.fail = None
        while client.status is None:
            await f.step()
        assert (client.status, client.json["error"]["code"]) == (500, "engine_step_failed")
        await f.step(3)
        await settle()
        assert f.idle()


@in_loop
async def test_they_are_recomputed_after_the_engine_was_lost() -> None:
    async with front(running=2, pump=False) as f:
        client = post(PATH, {"input": ["x" * 200] * 5}).start(f.app)
        await f.step(2)
        f.runner.fail = RunnerBroken("lost")
        await f.step()
        f.runner.fail = None
        for _ in range(200):
            await f.step()
            if client.status is not None:
                break
        assert len(vectors(client)) == 5


@in_loop
async def test_a_list_is_cancelled_by_its_id() -> None:
    async with front(running=2, pump=False) as f:
        client = post(PATH, {"input": ["x" * 200] * 9}, headers={"x-request-id": "mine"}).start(f.app)
        await f.step(2)
        assert (await f.post("/v1/requests/mine/cancel", {})).status == 200
        while client.status is None:
            await f.step()
        assert client.json["error"]["code"] == "request_cancelled"
        await f.step(2)
        assert f.idle()
