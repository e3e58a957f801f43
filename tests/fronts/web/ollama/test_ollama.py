"""Ollama's API: lines of JSON, its names of fields, and its routes about models."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.fronts.web.server import Front, forever, front
from tests.fronts.web.test_tools import CALL, CLOCK, ODD_ARGUMENTS, TOOLS, answering, text
from tests.support.aio import in_loop
from tests.support.answers import Answers
from tests.support.asgi import Client, post
from tests.support.bytes_text import bytes_text

HI = [{"role": "user", "content": "hi"}]
OPTIONS = {"num_predict": 500}


def lines(client: Client) -> list[dict[str, Any]]:
    assert client.status == 200, client.body
    assert client.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in client.body.decode().splitlines()]


async def chat(f: Front, **fields: Any) -> Client:
    return await f.post("/api/chat", {"model": "m", "messages": HI, "options": OPTIONS, **fields})


async def generate(f: Front, **fields: Any) -> Client:
    return await f.post("/api/generate", {"model": "m", "prompt": "hi", "options": OPTIONS, **fields})


@in_loop
async def test_a_chat_streams_lines_unless_it_asks_for_one() -> None:
    async with front() as f:
        found = lines(await chat(f))
        whole = (await chat(f, stream=False)).json
    assert "".join(line["message"]["content"] for line in found) == "The answer."
    assert [line["done"] for line in found] == [False] * (len(found) - 1) + [True]
    last = found[-1]
    assert (last["done_reason"], last["eval_count"]) == ("stop", 12)
    assert last["prompt_eval_count"] == whole["prompt_eval_count"] > 0
    assert last["total_duration"] >= last["prompt_eval_duration"] + last["eval_duration"] > 0
    assert whole["message"] == {"role": "assistant", "content": "The answer."}
    assert whole["done"] is True


@pytest.mark.parametrize("stream", [True, False])
@in_loop
async def test_calls_are_whole_with_arguments_as_objects(stream: bool) -> None:
    async with answering(f"Let me see. {CALL}\n{CLOCK}") as f:
        client = await chat(f, tools=TOOLS, stream=stream)
    found = lines(client) if stream else [client.json]
    calls = [call["function"] for line in found for call in line["message"].get("tool_calls", ())]
    assert calls == [
        {"index": 0, "name": "weather", "arguments": {"city": "Rome"}},
        {"index": 1, "name": "clock", "arguments": {}},
    ]
    assert found[-1]["done_reason"] == "stop"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("arguments", "sent"), ODD_ARGUMENTS, ids=lambda given: str(given)[:20])
@in_loop
async def test_arguments_are_sent_as_the_model_wrote_them(arguments: str, sent: str | None, stream: bool) -> None:
    call = f'<tool_call>{{"name": "weather", "arguments": {arguments}}}</tool_call>'
    async with answering(call, steps=(100,)) as f:
        client = await chat(f, tools=TOOLS, stream=stream, options={"num_predict": 9000})
    assert client.status == 200
    assert client.body.count(b"\n") == (2 if stream else 1)
    assert f'"name":"weather","arguments":{sent or arguments}'.encode() in client.body.split(b"\n")[0]


@in_loop
async def test_a_call_that_the_limit_cuts_is_not_sent() -> None:
    async with answering(CALL) as f:
        found = lines(await chat(f, tools=TOOLS, options={"num_predict": 30}))
    assert not any("tool_calls" in line["message"] for line in found)
    assert found[-1]["done_reason"] == "length"


@pytest.mark.parametrize("stream", [True, False])
@in_loop
async def test_thinking_has_a_member_of_its_own(stream: bool) -> None:
    async with answering("hm</think>yes") as f:
        client = await chat(f, think=True, stream=stream)
    messages = [line["message"] for line in (lines(client) if stream else [client.json])]
    assert "".join(message.get("thinking", "") for message in messages) == "hm"
    assert "".join(message["content"] for message in messages) == "yes"


@in_loop
async def test_past_calls_thinking_and_results_reach_the_template() -> None:
    call = {"function": {"name": "weather", "arguments": {"a": 1}}}
    turns = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "thinking": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_name": "weather", "content": "sun"},
    ]
    answers = Answers(text(), "ok")
    async with front(answers, text=text()) as f:
        await chat(f, messages=turns, stream=False)
    prompt = bytes(token for token in answers.requests[0].prompt if token < 256).decode()
    assert '{"name": "weather", "arguments": {"a": 1}}' in prompt
    assert "tool\nsun" in prompt


@in_loop
async def test_a_format_holds_the_answer() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    async with front() as f:
        await chat(f, format=schema, stream=False)
        await chat(f, format="json", stream=False)
        kinds = [request.constraint.kind for request in f.runner.seen if request.constraint]
    assert kinds == ["json_schema", "json_object"]


@in_loop
async def test_a_model_without_a_template_names_raw_as_the_way_out() -> None:
    async with front(text=bytes_text(chat_template=None)) as f:
        for path, given in (("/api/generate", {"prompt": "hi"}), ("/api/chat", {"messages": HI})):
            client = await f.post(path, {"model": "m", **given})
            assert client.status == 400
            assert 'use /api/generate with "raw": true' in client.json["error"]
            assert "/v1/completions" not in client.json["error"]
        assert (await generate(f, raw=True, stream=False)).status == 200


@in_loop
async def test_generate_puts_the_prompt_into_the_template_unless_it_is_raw() -> None:
    answers = Answers(text(), "one", "two")
    async with front(answers, text=text()) as f:
        first = (await generate(f, system="be brief", stream=False)).json
        second = lines(await generate(f, raw=True, logprobs=True, top_logprobs=1))
    prompts = [bytes(token for token in request.prompt if token < 256).decode() for request in answers.requests]
    assert prompts[0].startswith("system\nbe brief\nuser\nhi")
    assert prompts[1] == "hi"
    assert first["response"] == "one"
    assert "".join(line["response"] for line in second) == "two"
    assert [len(entry["top_logprobs"]) for line in second for entry in line.get("logprobs", ())] == [1, 1, 1]


@pytest.mark.parametrize(
    ("path", "fields", "reason"),
    [
        ("/api/chat", {"messages": []}, "load"),
        ("/api/chat", {"keep_alive": 0}, "unload"),
        ("/api/generate", {}, "load"),
        ("/api/generate", {"prompt": "", "keep_alive": 0}, "unload"),
    ],
)
@in_loop
async def test_a_request_without_a_prompt_is_answered_at_once(path: str, fields: dict[str, Any], reason: str) -> None:
    async with front(forever) as f:
        answer = (await f.post(path, {"model": "m", **fields})).json
        assert not f.runner.seen
    assert (answer["done"], answer["done_reason"]) == (True, reason)


@in_loop
async def test_models_have_the_tag_latest_or_none() -> None:
    async with front() as f:
        assert (await chat(f, model="m:latest", stream=False)).status == 200
        wrong = await chat(f, model="other")
        assert (wrong.status, list(wrong.json)) == (404, ["error"])
        assert (await f.post("/api/show", {"model": "m:latest"})).status == 200


@pytest.mark.parametrize(
    ("path", "fields", "place"),
    [
        ("/api/chat", {"messages": [{"role": "user"}]}, "messages[0].content"),
        ("/api/chat", {"messages": "hi"}, "messages"),
        ("/api/chat", {"messages": ["hi"]}, "messages[0]"),
        ("/api/chat", {"messages": [{"role": "user", "content": "a", "images": ["x"]}]}, "messages[0].images"),
        ("/api/chat", {"messages": [{"role": "assistant", "tool_calls": 5}]}, "messages[0].tool_calls"),
        ("/api/chat", {"options": {"temperature": 9}}, "options.temperature"),
        ("/api/chat", {"stream": "yes"}, "stream"),
        ("/api/chat", {"options": {"mirostat": 1}}, "options.mirostat"),
        ("/api/chat", {"options": "hot"}, "options"),
        ("/api/chat", {"temperature": 9}, "temperature"),
        ("/api/chat", {"top_p": "x"}, "top_p"),
        ("/api/chat", {"max_output_tokens": 0}, "max_output_tokens"),
        ("/api/generate", {"max_tokens": "x", "raw": True}, "max_tokens"),
        ("/api/generate", {"suffix": "x"}, "suffix"),
        ("/api/generate", {"context": [1]}, "context"),
        ("/api/generate", {"prompt": 5}, "prompt"),
        ("/api/generate", {"format": 5}, "format"),
        ("/api/show", {}, "model"),
        ("/api/embed", {}, "input"),
        ("/api/embed", {"input": []}, "input"),
        ("/api/embed", {"input": [[1]]}, "input"),
        ("/api/embeddings", {"prompt": ["a"]}, "prompt"),
        ("/api/embeddings", {"prompt": ""}, "prompt"),
    ],
)
@in_loop
async def test_bad_input_is_refused_in_its_shape(path: str, fields: dict[str, Any], place: str) -> None:
    body = {"messages": HI} if path == "/api/chat" else {"prompt": "hi"} if path == "/api/generate" else {}
    async with front() as f:
        client = await f.post(path, {**body, **fields})
        assert client.status == 400
        assert place in client.json["error"]
        assert f.idle()


UNKNOWN = [
    ("/api/chat", {"messages": HI}, "prompt_eval"),
    ("/api/generate", {"prompt": "hi"}, "raw_prompt"),
    ("/api/generate", {"prompt": "hi", "raw": True}, "raw_text"),
    ("/api/embed", {"input": "hi"}, "pooling"),
    ("/api/embeddings", {"prompt": "hi"}, "pooled"),
]


@pytest.mark.parametrize("padding", ["", "x" * 20_000], ids=["small", "in a text worker"])
@pytest.mark.parametrize(("path", "fields", "name"), UNKNOWN)
@in_loop
async def test_unknown_fields_and_options_are_ignored_and_logged_once(
    path: str, fields: dict[str, Any], name: str, padding: str, caplog: pytest.LogCaptureFixture
) -> None:
    own = name + ("_large" if padding else "")
    body = {"model": "m", "stream": False, **fields, own: padding, "options": {f"no_{own}": 1, "num_gpu": 1}}
    async with front() as f:
        for _ in range(2):
            client = await f.post(path, body)
            assert client.status == 200, client.body
    messages = [record.getMessage() for record in caplog.records if record.name.endswith("ollama.reports")]
    names = [own] if "embed" in path else [own, f"options.no_{own}"]
    assert [message.split("'")[1] for message in messages] == names


@pytest.mark.parametrize("padding", ["", "x" * 20_000], ids=["small", "in a text worker"])
@pytest.mark.parametrize("limit", ["max_output_tokens", "max_tokens"])
@in_loop
async def test_sampling_beside_the_options_counts_where_they_lack_it(limit: str, padding: str) -> None:
    async with front(context=100_000) as f:
        beside = {"temperature": 0.5, "top_p": 0.25, limit: 7, "stream": False}
        for path, prompt in (
            ("/api/chat", {"messages": [{"role": "user", "content": f"hi{padding}"}]}),
            ("/api/generate", {"prompt": f"hi{padding}"}),
            ("/api/generate", {"prompt": f"hi{padding}", "raw": True}),
        ):
            for options in ({}, {"options": {"seed": 1}}, {"options": {"temperature": None, "num_predict": None}}):
                client = await f.post(path, {**prompt, **beside, **options})
                assert client.status == 200, client.body
                seen = f.runner.seen[-1]
                assert (seen.sampling.temperature, seen.sampling.top_p, seen.max_tokens) == (0.5, 0.25, 7)
            given = {"temperature": 0.75, "top_p": 1.0, "num_predict": 9}
            assert (await f.post(path, {**prompt, **beside, "options": given})).status == 200
            seen = f.runner.seen[-1]
            assert (seen.sampling.temperature, seen.sampling.top_p, seen.max_tokens) == (0.75, 1.0, 9)


@in_loop
async def test_a_limit_beside_the_options_is_refused_by_its_name() -> None:
    async with front(max_tokens=5) as f:
        for path, prompt in (("/api/chat", {"messages": HI}), ("/api/generate", {"prompt": "hi", "raw": True})):
            client = await f.post(path, {**prompt, "max_output_tokens": 9})
            assert client.status == 400
            assert client.json["error"].startswith("max_output_tokens is 9 and this server allows 5")


@in_loop
async def test_a_large_body_is_read_in_a_text_worker() -> None:
    long = [{"role": "user", "content": "x" * 20_000}]
    answers = Answers(text(), "ok", "ok")
    async with front(answers, text=text()) as f:
        assert (await chat(f, messages=long, stream=False)).json["message"]["content"] == "ok"
        assert (await generate(f, prompt="x" * 20_000, raw=True, stream=False)).json["response"] == "ok"
        emptied = await generate(f, prompt="", system="x" * 20_000, stream=False)
    assert emptied.json["done_reason"] == "load"
    assert [len(request.prompt) > 20_000 for request in answers.requests] == [True, False]
    assert len(answers.requests[1].prompt) == 20_000


@in_loop
async def test_overload_is_refused_in_its_shape() -> None:
    async with front(forever, running=1, waiting=0, pump=False) as f:
        held = post("/api/chat", {"model": "m", "messages": HI}).start(f.app)
        await f.step(2)
        client = await chat(f)
        held.leave()
        await f.step(3)
    assert (client.status, list(client.json)) == (503, ["error"])
    assert int(client.headers["retry-after"]) >= 1


@in_loop
async def test_routes_about_models() -> None:
    async with front() as f:
        version = (await f.get("/api/version")).json
        tags = (await f.get("/api/tags")).json["models"]
        loaded = (await f.get("/api/ps")).json["models"]
        shown = (await f.post("/api/show", {"name": "m"})).json
        missing = await f.get("/api/nothing")
    assert version["version"] >= "0.12"
    assert [model["name"] for model in tags] == [model["model"] for model in loaded] == ["m"]
    assert loaded[0]["expires_at"] > loaded[0]["modified_at"]
    assert {"completion", "tools"} <= set(shown["capabilities"])
    family = shown["model_info"]["general.architecture"]
    assert shown["model_info"][f"{family}.context_length"] == 4096
    assert (missing.status, list(missing.json)) == (404, ["error"])


@pytest.mark.parametrize("size", [5, 20_000], ids=["small", "in a text worker"])
@in_loop
async def test_embeddings_are_those_of_openais_route(size: int) -> None:
    texts = ["a" * size, "b"]
    async with front(context=100_000, cache_tokens=100_000) as f:
        expected = [one["embedding"] for one in (await f.post("/v1/embeddings", {"input": texts})).json["data"]]
        several = await f.post("/api/embed", {"model": "m:latest", "input": texts, "truncate": True})
        one = await f.post("/api/embeddings", {"model": "m", "prompt": texts[0]})
        short = await f.post("/api/embed", {"model": "m", "input": "b", "dimensions": 2})
    assert several.json["embeddings"] == expected
    assert (several.json["model"], several.json["prompt_eval_count"]) == ("m", size + 1)
    assert one.json["embedding"] == expected[0]
    assert [len(vector) for vector in short.json["embeddings"]] == [2]
