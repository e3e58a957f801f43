"""The poison corpus: whatever comes, a 4xx in the envelope that names cause and field, within its own request."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fronts.web.server import Front, front, settle
from tests.support.aio import in_loop
from tests.support.asgi import Client
from tests.support.bytes_text import bytes_text
from treadle.fronts.web.openai.schema import ChatRequest, CompletionRequest

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HI = [{"role": "user", "content": "hi"}]


def refused(client: Client, status: int, param: str | None, words: str = "") -> None:
    assert client.status == status, client.body
    error = client.json["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param, error
    assert words in error["message"], error
    assert len(error["message"]) < 400


async def still_works(f: Front) -> None:
    assert (await f.chat()).status == 200
    assert f.idle()


FUNCTION: dict[str, Any] = {"name": "f", "arguments": "{}"}
FIRST_CALL = "messages[1].tool_calls[0]"


def calls(*given: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": list(given)}


FIELDS: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": None}, "messages"),
    (CHAT, {"messages": "hi"}, "messages"),
    (CHAT, {"messages": [1]}, "messages[0]"),
    (CHAT, {"messages": [{}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
    (CHAT, {"messages": [*HI, calls({})]}, "messages[1].tool_calls[0].function"),
    (CHAT, {"messages": [*HI, calls({"function": {}})]}, "messages[1].tool_calls[0].function.name"),
    (CHAT, {"messages": [*HI, calls({"id": 5, "function": FUNCTION})]}, "messages[1].tool_calls[0].id"),
    (CHAT, {"messages": [*HI, calls({"type": "custom"})]}, "messages[1].tool_calls[0].type"),
    (CHAT, {"messages": [*HI, calls({"function": FUNCTION | {"arguments": 5}})]}, f"{FIRST_CALL}.function.arguments"),
    (CHAT, {"messages": [*HI, {"role": "assistant", "tool_calls": {}}]}, "messages[1].tool_calls"),
    (CHAT, {"messages": [*HI, calls(*[{"function": FUNCTION}] * 1025)]}, "messages[1].tool_calls"),
    (CHAT, {"messages": [{**calls({"function": FUNCTION}), "role": "user", "content": "x"}]}, "messages[0]"),
    (CHAT, {"messages": [*HI, {"role": "tool", "content": "x", "tool_call_id": 5}]}, "messages[1].tool_call_id"),
    (CHAT, {"messages": [*HI, {"role": "tool", "content": 5}]}, "messages[1].content"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].image_url.url",
    ),
    (
        CHAT,
        {"messages": [{"role": "system", "content": [{"type": "image_url", "image_url": "x"}]}]},
        "messages[0].content[0].type",
    ),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    (CHAT, {"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
    (CHAT, {"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}, "messages[0].content[0].text"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].image_url",
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "refusal", "refusal": "x"}]}]},
        "messages[0].content[0].type",
    ),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 8193}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "system", "content": None}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": 5, "content": "x"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user", "content": "x", "name": 5}]}, "messages[0].name"),
    (CHAT, {"messages": [{"role": "user", "content": "x", "images": ["x"]}]}, "messages[0].images"),
    (CHAT, {"messages": [*HI, {"role": "assistant", "content": "x", "audio": {"id": "x"}}]}, "messages[1].audio"),
    (CHAT, {"messages": [*HI, {"role": "assistant", "reasoning_content": {}}]}, "messages[1].reasoning_content"),
    (CHAT, {"messages": [*HI, {"role": "assistant", "content": "x", "prefix": "yes"}]}, "messages[1].prefix"),
    (CHAT, {"messages": HI * 9000}, "messages"),
    (CHAT, {"messages": HI, "temprature": 1}, "temprature"),
    (CHAT, {"messages": HI, "temperature": "hot"}, "temperature"),
    (CHAT, {"messages": HI, "temperature": 3}, "temperature"),
    (CHAT, {"messages": HI, "temperature": True}, "temperature"),
    (CHAT, {"messages": HI, "top_p": 0}, "top_p"),
    (CHAT, {"messages": HI, "top_k": -5}, "top_k"),
    (CHAT, {"messages": HI, "min_p": 2}, "min_p"),
    (CHAT, {"messages": HI, "n": 0}, "n"),
    (CHAT, {"messages": HI, "n": 10**9}, "n"),
    (CHAT, {"messages": HI, "n": 128}, "n"),
    (CHAT, {"messages": HI, "n": "2"}, "n"),
    (CHAT, {"messages": HI, "max_tokens": 0}, "max_tokens"),
    (CHAT, {"messages": HI, "max_tokens": -1}, "max_tokens"),
    (CHAT, {"messages": HI, "max_tokens": 10**12}, "max_tokens"),
    (CHAT, {"messages": HI, "max_tokens": 2**70}, "max_tokens"),
    (CHAT, {"messages": HI, "max_completion_tokens": 0}, "max_completion_tokens"),
    (CHAT, {"messages": [{"role": "user", "content": "x" * 5000}]}, "messages"),
    (CHAT, {"messages": HI, "logprobs": 3}, "logprobs"),
    (CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"messages": HI, "logit_bias": {"999": 1}}, "logit_bias"),
    (CHAT, {"messages": HI, "logit_bias": {"1": 1000}}, "logit_bias"),
    (CHAT, {"messages": HI, "logit_bias": {"1": "x"}}, "logit_bias.1"),
    (CHAT, {"messages": HI, "logit_bias": []}, "logit_bias"),
    (CHAT, {"messages": HI, "stop": ["x"] * 10_000}, "stop"),
    (CHAT, {"messages": HI, "stop": ""}, "stop"),
    (CHAT, {"messages": HI, "stop": [1]}, "stop[0]"),
    (CHAT, {"messages": HI, "stop_token_ids": [999]}, "stop_token_ids"),
    (CHAT, {"messages": HI, "seed": 2**64}, "seed"),
    (CHAT, {"messages": HI, "seed": 1.5}, "seed"),
    (CHAT, {"messages": HI, "stream": "yes"}, "stream"),
    (CHAT, {"messages": HI, "stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    (CHAT, {"messages": HI, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    (CHAT, {"messages": HI, "usage": True}, "usage"),
    (CHAT, {"messages": HI, "usage": {"include": 1}}, "usage.include"),
    (CHAT, {"messages": HI, "usage": {"x": 1}}, "usage.x"),
    (CHAT, {"messages": HI, "max_tokens": 2.5}, "max_tokens"),
    (CHAT, {"messages": HI, "n": 1.5}, "n"),
    (CHAT, {"messages": HI, "max_length": 5}, "max_length"),
    (CHAT, {"messages": HI, "num_ctx": 4097}, "num_ctx"),
    (CHAT, {"messages": HI, "num_ctx": 0}, "num_ctx"),
    (CHAT, {"messages": HI, "num_predict": 0}, "num_predict"),
    (CHAT, {"messages": HI, "num_predict": -3}, "num_predict"),
    (CHAT, {"messages": HI, "max_new_tokens": 0}, "max_new_tokens"),
    (CHAT, {"messages": HI, "repeat_penalty": 0}, "repeat_penalty"),
    (CHAT, {"messages": HI, "options": 5}, "options"),
    (CHAT, {"messages": HI, "options": {"temprature": 1}}, "options.temprature"),
    (CHAT, {"messages": HI, "options": {"temperature": 3}}, "options.temperature"),
    (CHAT, {"messages": HI, "options": {"temperature": "hot"}}, "options.temperature"),
    (CHAT, {"messages": HI, "options": {"num_ctx": 8192}}, "options.num_ctx"),
    (CHAT, {"messages": HI, "options": {"num_predict": 0}}, "options.num_predict"),
    (CHAT, {"messages": HI, "options": {"mirostat": 1}}, "options.mirostat"),
    (CHAT, {"messages": HI, "options": {"stop": [""]}}, "options.stop"),
    (CHAT, {"messages": HI, "enable_thinking": "no"}, "enable_thinking"),
    (CHAT, {"messages": HI, "continue_final_message": "yes"}, "continue_final_message"),
    (CHAT, {"messages": HI, "continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    (CHAT, {"messages": HI, "logit_bias": {"007": 1}}, "logit_bias"),
    (CHAT, {"messages": HI, "chat_template_kwargs": {"x": "y" * 4097}}, "chat_template_kwargs.x"),
    (CHAT, {"messages": HI, "chat_template_kwargs": {f"x{i}": 1 for i in range(65)}}, "chat_template_kwargs"),
    (CHAT, {"messages": HI, "model": 7}, "model"),
    (CHAT, {"messages": HI, "chat_template_kwargs": {"messages": "x"}}, "chat_template_kwargs.messages"),
    (CHAT, {"messages": HI, "chat_template_kwargs": {"x": [1]}}, "chat_template_kwargs.x"),
    (TEXT, {}, "prompt"),
    (TEXT, {"prompt": None}, "prompt"),
    (TEXT, {"prompt": ""}, "prompt"),
    (TEXT, {"prompt": []}, "prompt"),
    (TEXT, {"prompt": ["a", ""]}, "prompt"),
    (TEXT, {"prompt": [[]]}, "prompt"),
    (TEXT, {"prompt": [1, 261]}, "prompt"),
    (TEXT, {"prompt": [-1]}, "prompt"),
    (TEXT, {"prompt": [2**63]}, "prompt"),
    (TEXT, {"prompt": [[1], [10**30]]}, "prompt"),
    (TEXT, {"prompt": {"a": 1}}, "prompt"),
    (TEXT, {"prompt": [1, "a"]}, "prompt[0]"),
    (TEXT, {"prompt": [[1, True]]}, "prompt[0][1]"),
    (TEXT, {"prompt": ["a"] * 3000}, "prompt"),
    (TEXT, {"prompt": [1] * 5000}, "prompt"),
    (TEXT, {"prompt": "a", "logprobs": True}, "logprobs"),
    (TEXT, {"prompt": "a", "logprobs": 21}, "logprobs"),
    (TEXT, {"prompt": "a", "logprobs": -1}, "logprobs"),
    (TEXT, {"prompt": "a", "messages": []}, "messages"),
    (TEXT, {"prompt": "a", "max_tokens": -1, "echo": True}, "max_tokens"),
    (TEXT, {"prompt": "a", "cache_salt": ""}, "cache_salt"),
    (TEXT, {"prompt": "a", "cache_salt": "x" * 257}, "cache_salt"),
    (TEXT, {"prompt": "a", "cache_salt": "a\nb"}, "cache_salt"),
    (TEXT, {"prompt": "a", "cache_salt": 5}, "cache_salt"),
]


@pytest.mark.parametrize(("path", "fields", "param"), FIELDS, ids=lambda v: str(v)[:50])
@in_loop
async def test_a_bad_field_is_a_400_that_names_it(path: str, fields: dict[str, Any], param: str) -> None:
    async with front() as f:
        refused(await f.post(path, fields), 400, param)
        await still_works(f)


HINTS: list[tuple[str, dict[str, Any], str, str]] = [
    (CHAT, {"prompt": "a"}, "messages", "'prompt' is a field of /v1/completions"),
    (CHAT, {"messages": HI, "prompt": "a"}, "prompt", "it is a field of /v1/completions; here use 'messages'"),
    (CHAT, {"messages": HI, "input": "a"}, "input", "it is a field of /v1/responses; here use 'messages'"),
    (TEXT, {"messages": HI}, "prompt", "'messages' is a field of /v1/chat/completions"),
    (TEXT, {"prompt": "a", "messages": HI}, "messages", "of /v1/chat/completions; here use 'prompt'"),
    (TEXT, {"prompt": "a", "timeout": 0}, "timeout", "is 0: it must be a number above 0 and at most 2147483647"),
    (TEXT, {"prompt": "a", "temperature": 2.5}, "temperature", "temperature is 2.5: it must be a number from 0 to 2"),
]


@pytest.mark.parametrize(("path", "fields", "param", "words"), HINTS, ids=lambda v: str(v)[:50])
@in_loop
async def test_a_refusal_names_the_cure(path: str, fields: dict[str, Any], param: str, words: str) -> None:
    async with front() as f:
        refused(await f.post(path, fields), 400, param, words)


BODIES: list[tuple[bytes, str]] = [
    (b"", "no body"),
    (b"  ", "no body"),
    (b"{", "not valid JSON"),
    (b"{'a': 1}", "not valid JSON"),
    (b"[]", "must be a JSON object"),
    (b'"x"', "must be a JSON object"),
    (b"null", "must be a JSON object"),
    (b"\xff\xfe{}", "UTF-8"),
    (b'{"prompt": "\xc3\x28"}', "UTF-8"),
    ('{"prompt": "a"}'.encode("utf-16"), "UTF-8"),
    (b'{"prompt": "\\ud800"}', "surrogate"),
    (b'{"prompt": ["a", "\\udc00x"]}', "surrogate"),
    (b'{"prompt": "a", "\\ud800": 1}', "surrogate"),
    (b'{"prompt": "a", "user": {"\\ud800": "\\udfff"}}', "surrogate"),
    (b'{"prompt": "a", "user": {"\\ud800": ["\\ud800"]}}', "surrogate"),
    (b'{"prompt": "a", "user": {"\\ud800": 1, "\\ud800": 2}}', "twice"),
    (b'{"prompt": "a", "temperature": NaN}', "NaN"),
    (b'{"prompt": "a", "temperature": -Infinity}', "Infinity"),
    (b'{"prompt": "a", "temperature": 1e400}', "temperature"),
    (b'{"prompt": "a", "seed": 1' + b"0" * 30 + b"}", "seed"),
    (b'{"prompt": "a", "seed": 1' + b"0" * 5000 + b"}", "digits"),
    (b'{"prompt": "a", "prompt": "b"}', "twice"),
    (b'{"prompt": ' + b"[" * 10_000 + b"]" * 10_000 + b"}", ""),
    (b'{"prompt": ' + b'{"a":' * 100_000, ""),
    (b'{"prompt": "a"} trailing', "not valid JSON"),
    (json.dumps({"prompt": "a", **{f"k{i}": 1 for i in range(5000)}}).encode(), "5001 keys"),
    (json.dumps({"prompt": [[1]] * 600_000}).encode(), "arrays"),
    (json.dumps({"prompt": [1] * 1_100_000}).encode(), "1048576"),
    (json.dumps({"prompt": ["a"] * 3000}).encode(), "2048"),
    (b'{"prompt": "a", "\x00": 1}', "not valid JSON"),
]


@pytest.mark.parametrize(("body", "words"), BODIES, ids=lambda v: repr(v)[:40])
@in_loop
async def test_a_bad_body_is_a_400_that_says_what_is_wrong(body: bytes, words: str) -> None:
    async with front() as f:
        client = await f.post("/v1/completions", body)
        assert client.status == 400
        assert words in client.json["error"]["message"]
        await still_works(f)


NEUTRAL_CHAT: dict[str, Any] = {
    "tools": [],
    "tool_choice": "none",
    "functions": [],
    "function_call": "auto",
    "parallel_tool_calls": True,
    "response_format": {"type": "text"},
    "modalities": ["text"],
    "audio": None,
    "prediction": None,
    "service_tier": "auto",
    "user": "u",
    "metadata": {"a": "b"},
    "store": True,
    "safety_identifier": "s",
    "prompt_cache_key": "k",
    "temperature": None,
    "stop": None,
    "stream": None,
    "n": None,
    "logit_bias": None,
    "max_tokens": None,
    "stream_options": None,
    "reasoning_effort": None,
    "best_of": 1,
}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"messages": HI}),
        (TEXT, {"prompt": "a"}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"model": "m", "messages": HI, "max_tokens": 5}),
        ("/api/chat", {"model": "m", "messages": HI}),
        ("/api/show", {"model": "m"}),
        ("/v1/embeddings", {"input": "a"}),
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [1]}),
    ],
)
@in_loop
async def test_a_byte_order_mark_before_the_body_is_ignored(path: str, fields: dict[str, Any]) -> None:
    async with front() as f:
        paddings = (b"", b" " * 70_000)[: 1 if path == "/api/show" else 2]
        for padding in paddings:  # parsed on the event loop, and in a text worker
            client = await f.post(path, codecs.BOM_UTF8 + json.dumps(fields).encode() + padding)
            assert client.status == 200, client.body
        empty = await f.post(path, codecs.BOM_UTF8)
        assert (empty.status, b"has no body" in empty.body) == (400, True)


@in_loop
async def test_numbers_beyond_all_are_told_as_such() -> None:
    async with front() as f:
        for number, told in (("1e999", "inf"), ("-1e999", "-inf"), ("2.5", "a fraction")):
            client = await f.post(TEXT, f'{{"prompt": "a", "max_tokens": {number}}}'.encode())
            refused(client, 400, "max_tokens", f"max_tokens is {told}: it must be a whole number")


@in_loop
async def test_neutral_and_harmless_fields_and_nulls_are_taken() -> None:
    async with front() as f:
        client = await f.chat(**NEUTRAL_CHAT)
        assert client.status == 200, client.body
        assert client.json["choices"][0]["message"]["content"] == "The answer."
        client = await f.complete(suffix=None, best_of=1, n=2, echo=False, user="u", logprobs=None)
        assert client.status == 200, client.body


@pytest.mark.parametrize(
    ("path", "cure"),
    [
        ("/chat/completions", "the base URL ends in /v1, call /v1/chat/completions"),
        ("/completions", "the base URL ends in /v1, call /v1/completions"),
        ("/v1/v1/chat/completions", "the base URL ends in /v1, call /v1/chat/completions"),
        ("/models", "the base URL ends in /v1, call /v1/models"),
        ("/v1/v1/models/demo", "the base URL ends in /v1, call /v1/models/demo"),
        ("/v1/nowhere", "/docs lists what there is"),
        ("/v1/chat/completions/", "/docs lists what there is"),
    ],
)
@in_loop
async def test_an_endpoint_beside_v1_is_told_where_the_base_url_ends(path: str, cure: str) -> None:
    async with front() as f:
        client = await f.post(path, {})
        assert (client.status, client.json["error"]["code"]) == (404, "not_found")
        assert client.json["error"]["message"] == f"there is no {path} here: {cure}"


def _called(arguments: Any) -> dict[str, Any]:
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call]}


def _used(arguments: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": [{"type": "tool_use", "id": "x", "name": "f", "input": arguments}]}


def _shell(arguments: Any) -> dict[str, Any]:
    return {"type": "local_shell_call", "call_id": "x", "action": arguments}


@pytest.mark.parametrize("content", ["hi", "x" * 70_000], ids=len)
@pytest.mark.parametrize(
    ("path", "messages", "call"),
    [
        (CHAT, "messages", _called),
        ("/api/chat", "messages", _called),
        ("/v1/messages", "messages", _used),
        ("/v1/responses", "input", _shell),
    ],
)
@in_loop
async def test_what_is_nested_deeply_is_served_or_refused(
    path: str, messages: str, call: Callable[[Any], dict[str, Any]], content: str
) -> None:
    async with front(text=bytes_text(context=200_000)) as f:
        for depth, status in ((450, 200), (900, 400), (950, 400), (960, 400), (970, 400)):
            user = {"role": "user", "content": content}
            more = {"max_tokens": 9} if path == "/v1/messages" else {}
            body = json.dumps({"model": "m", messages: [user, call({"deep": 1}), user], **more})
            deep = '{"a":' * depth + "{}" + "}" * depth
            client = await f.post(path, body.replace('{"deep": 1}', deep).encode())
            assert client.status == status, client.body
            assert status == 200 or b"nested too deeply" in client.body


REFUSED_BY_NAME: list[tuple[str, Any]] = [
    ("modalities", ["audio"]),
    ("audio", {"voice": "x"}),
    ("service_tier", "scale"),
    ("mirostat", 2),
    ("verbosity", "loud"),
    ("web_search_options", {}),
    ("chat_template", "{{ x }}"),
    ("best_of", 2),
    ("prompt_logprobs", 0),
]


@pytest.mark.parametrize(("name", "value"), REFUSED_BY_NAME)
@in_loop
async def test_a_known_field_that_is_not_honoured_is_refused_by_name(name: str, value: Any) -> None:
    async with front() as f:
        client = await f.chat(**{name: value})
        refused(client, 400, name, name)
        assert client.json["error"]["code"] == "unsupported_parameter"


@pytest.mark.parametrize(
    "fields",
    [
        {"suffix": "x"},
        {"best_of": 3},
        {"best_of": 2, "n": 2},
        {"prompt_logprobs": 1},
    ],
)
@in_loop
async def test_completions_refuse_what_they_do_not_honour(fields: dict[str, Any]) -> None:
    async with front() as f:
        refused(await f.complete(**fields), 400, next(iter(fields)))


@in_loop
async def test_an_unknown_model_is_a_404_that_names_the_right_one() -> None:
    async with front() as f:
        client = await f.chat(model="gpt-9")
        refused(client, 404, "model", "'m'")
        assert client.json["error"]["code"] == "model_not_found"


@in_loop
async def test_a_request_may_leave_the_model_out_unless_the_server_requires_it() -> None:
    async with front() as lenient, front(require_model=True) as strict:
        for unnamed in ({}, {"model": None}):
            for client in (await lenient.chat(**unnamed), await lenient.complete(**unnamed)):
                assert (client.status, client.json["model"]) == (200, "m")
            for client in (await strict.chat(**unnamed), await strict.complete(**unnamed)):
                refused(client, 400, "model", "is missing: this server requires it; use 'm'")
                assert client.json["error"]["code"] == "invalid_request"
        assert (await strict.chat(model="m")).status == 200
        assert strict.idle()


@in_loop
async def test_a_prompt_over_the_context_has_its_own_code() -> None:
    async with front() as f:
        client = await f.complete(prompt="x" * 5000)
        refused(client, 400, "prompt", "4096")
        assert client.json["error"]["code"] == "context_length_exceeded"
        assert f.idle()


@pytest.mark.parametrize("fields", [{"prompt": ["hi", "x" * 90]}, {"prompt": "x" * 90, "n": 2}])
@pytest.mark.parametrize("stream", [True, False])
@in_loop
async def test_any_prompt_over_the_cache_is_refused_before_anything_is_computed(
    fields: dict[str, Any], stream: bool
) -> None:
    async with front(cache_tokens=100, waiting=12) as f:
        client = await f.complete(**fields, max_tokens=11, stream=stream)
        refused(client, 400, None, "maximum context length is 100 tokens. However, you requested 101 tokens")
        assert client.json["error"]["code"] == "context_length_exceeded"
        assert f.runner.seen == []
        assert f.idle()
        client = await f.complete(**fields, max_tokens=10, stream=stream)
        assert client.status == 200


@in_loop
async def test_a_prompt_that_is_hopelessly_long_is_refused_without_tokenizing_it() -> None:
    async with front() as f:
        client = await f.complete(prompt="x" * 200_000)
        refused(client, 400, "prompt", "4096")
        assert client.json["error"]["code"] == "context_length_exceeded"
        assert f.texts.pool.runs == 1, "to parse it, and no more"


@in_loop
async def test_a_body_over_the_cap_is_a_413_while_it_is_read() -> None:
    async with front(max_body_bytes=1000) as f:
        refused(await f.post(TEXT, [b"x" * 600, b"x" * 600, b"never read"]), 413, None, "1000")
        declared = await f.post(TEXT, b"", headers={"content-length": "99999999999"})
        refused(declared, 413, None, "1000")


@in_loop
async def test_a_large_body_is_parsed_in_the_pool() -> None:
    async with front(context=2_000_000) as f:
        body = json.dumps({"prompt": "x" * 300_000, "max_tokens": 1}).encode()
        assert (await f.post(TEXT, body)).status == 200
        assert f.texts.pool.runs == 2, "once to parse and once to tokenize"


@in_loop
async def test_content_type_does_not_matter() -> None:
    async with front() as f:
        client = await f.post(CHAT, {"messages": HI}, headers={"content-type": "text/plain"})
        assert client.status == 200


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
CHAT_FIELDS = sorted(ChatRequest.model_fields)
TEXT_FIELDS = sorted(CompletionRequest.model_fields)
SMALL: dict[str, Any] = {"max_tokens": 3, "n": None}
ROUTES: list[tuple[str, list[str], dict[str, Any]]] = [
    (CHAT, CHAT_FIELDS, {"messages": HI}),
    (TEXT, TEXT_FIELDS, {"prompt": "hi"}),
]


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_json_is_answered_or_refused_and_nothing_is_left(data: st.DataObject) -> None:
    path, names, base = data.draw(st.sampled_from(ROUTES))
    fields = data.draw(st.dictionaries(st.sampled_from(names), JSON_VALUES, max_size=3))

    @in_loop
    async def ask() -> None:
        async with front() as f:
            client = await f.post(path, SMALL | base | fields)
            assert client.status in (200, 400, 404), client.body
            if client.status != 200:
                assert client.json["error"]["type"] == "invalid_request_error"
            await settle()
            assert f.idle()

    ask()
