"""POST /tokenize and /detokenize."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.fronts.runner import FrontRunner
from tests.fronts.web.server import Front, front
from tests.fronts.web.test_bad_input import refused
from tests.fronts.web.test_keys import key, keys
from tests.support.aio import in_loop
from tests.support.asgi import Client
from tests.support.bytes_text import bytes_text
from tests.support.tiny import CHATML
from treadle.core.messages import Submit
from treadle.errors import Busy
from treadle.keys import Key, KeyLimits, digest
from treadle.keys.file import add

__all__ = ["keys"]  # a fixture
HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


async def tokenize(f: Front, **fields: Any) -> Client:
    return await f.post("/tokenize", fields)


@pytest.mark.parametrize("prefix", ["", "/v1"])
@in_loop
async def test_a_text_becomes_tokens_and_tokens_become_the_text(prefix: str) -> None:
    async with front() as f:
        found = (await f.post(prefix + "/tokenize", {"prompt": "hé<|im_end|>"})).json
        assert (found["count"], found["max_model_len"]) == (len(found["tokens"]), 4096)
        assert found["token_strs"] is None
        back = await f.post(prefix + "/detokenize", {"tokens": found["tokens"]})
        assert back.json == {"prompt": "hé<|im_end|>"}


@in_loop
async def test_the_strings_of_tokens_are_those_of_the_vocabulary() -> None:
    async with front() as f:
        found = (await tokenize(f, prompt="a <|im_end|>", return_token_strs=True)).json
        assert found["token_strs"] == f.texts.model().token_strings(found["tokens"])
        assert found["token_strs"][-1] == "<|im_end|>"


CHATS: list[dict[str, Any]] = [
    {"messages": HI},
    {"messages": HI, "add_generation_prompt": False},
    {"messages": [*HI, {"role": "assistant", "content": "He"}], "continue_final_message": True},
    {"messages": HI, "tools": [TOOL], "tool_choice": "auto"},
    {"messages": HI, "chat_template_kwargs": {"enable_thinking": False}, "temperature": 0.5, "max_tokens": 3},
    {"messages": [{"role": "user", "content": "<|im_start|>system"}], "response_format": {"type": "json_object"}},
    {"messages": [{"role": "user", "content": "x" * 3000}]},
]


@pytest.mark.parametrize("chat", CHATS)
@in_loop
async def test_the_tokens_of_a_chat_are_those_that_its_answer_is_computed_from(chat: dict[str, Any]) -> None:
    seen: list[Submit] = []

    def script(request: Submit, position: int) -> int:
        seen.append(request)
        return ord("x")

    async with front(script) as f:
        found = (await tokenize(f, **chat)).json
        answer = await f.chat(**{"max_tokens": 1} | chat)
        assert tuple(found["tokens"]) == seen[0].prompt
        assert found["count"] == answer.json["usage"]["prompt_tokens"]


@in_loop
async def test_special_tokens_around_a_text_can_be_left_out() -> None:
    async with front() as f:
        with_bos, without = [
            (await tokenize(f, prompt="hi", add_special_tokens=a)).json["tokens"] for a in (True, False)
        ]
        assert with_bos == [*f.texts.model().prefix, *without]
        assert (await tokenize(f, prompt="", add_special_tokens=False)).json["tokens"] == []
        assert (await f.post("/detokenize", {"tokens": []})).json == {"prompt": ""}


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("/tokenize", {}, "messages"),
    ("/tokenize", {"prompt": "x", "messages": HI}, "messages"),
    ("/tokenize", {"prompt": 5}, "prompt"),
    ("/tokenize", {"prompt": ["x"]}, "prompt"),
    ("/tokenize", {"prompt": "x", "temperature": 0}, "temperature"),
    ("/tokenize", {"messages": HI, "add_special_tokens": True}, "add_special_tokens"),
    ("/tokenize", {"messages": HI, "mm_processor_kwargs": {}}, "mm_processor_kwargs"),
    ("/tokenize", {"messages": HI, "return_token_strs": "yes"}, "return_token_strs"),
    ("/tokenize", {"messages": HI, "temperature": 9}, "temperature"),
    ("/tokenize", {"messages": []}, "messages"),
    ("/tokenize", {"messages": HI, "guided_regex": "("}, "guided_regex"),
    ("/tokenize", {"messages": HI, "chat_template": "{{ x }}"}, "chat_template"),
    ("/detokenize", {}, "tokens"),
    ("/detokenize", {"tokens": "x"}, "tokens"),
    ("/detokenize", {"tokens": [1.5]}, "tokens[0]"),
    ("/detokenize", {"tokens": [-1]}, "tokens"),
    ("/detokenize", {"tokens": [9999]}, "tokens"),
    ("/detokenize", {"tokens": [1], "prompt": "x"}, "prompt"),
]


@pytest.mark.parametrize(("path", "body", "param"), WRONG)
@in_loop
async def test_a_wrong_field_is_refused_by_name(path: str, body: dict[str, Any], param: str) -> None:
    async with front() as f:
        refused(await f.post(path, body), 400, param)


@pytest.mark.parametrize(("path", "body"), [("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})])
@in_loop
async def test_another_model_is_a_404(path: str, body: dict[str, Any]) -> None:
    async with front() as f:
        refused(await f.post(path, body | {"model": "other"}), 404, "model", "'m'")
        assert (await f.post(path, body | {"model": "demo"})).status == 200


@in_loop
async def test_a_text_beyond_the_context_is_counted_or_refused() -> None:
    async with front(context=100) as f:
        assert (await tokenize(f, prompt="x" * 150)).json["count"] > 100
        refused(await tokenize(f, prompt="x" * 5000), 400, "prompt", "context")
        refused(await tokenize(f, messages=[{"role": "user", "content": "x" * 5000}]), 400, "messages", "context")
        refused(await f.post("/tokenize", b"x" * (5 << 20)), 413, None)


@in_loop
async def test_a_busy_engine_and_its_queue_are_not_asked() -> None:
    async with front(pump=False, running=1, waiting=1) as f:
        rows = [(await f.post("/tokenize", {"prompt": "x"})).status for _ in range(5)]
        assert rows == [200] * 5
        assert isinstance(f.runner, FrontRunner)
        assert f.idle()


@in_loop
async def test_they_count_as_requests_of_their_key_and_as_no_tokens(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    add(path, Key("three", digest(b"three-key"), limits=KeyLimits(requests_per_minute=3, tokens_per_minute=5)))
    async with front(api_keys=path) as f:
        sent = [("/tokenize", {"prompt": "x" * 50}), ("/v1/detokenize", {"tokens": [1]}), ("/tokenize", {"prompt": 1})]
        answers = [await f.post(path, body, headers=key("three")) for path, body in [*sent, *sent]]
        assert [answer.status for answer in answers] == [200, 200, 400, 429, 429, 429]
        assert answers[3].json["error"]["code"] == "rate_limit_exceeded"
        assert "retry-after" in answers[3].headers
        status = (await f.get("/v1/status", headers=key("three"))).json
        assert [(usage["requests"], usage["tokens"], usage["running"]) for usage in status["keys"]] == [(3, 0, 0)]


@in_loop
async def test_text_workers_that_are_busy_refuse_it_uncharged(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    add(path, Key("one", digest(b"one-key"), limits=KeyLimits(requests_per_minute=1)))

    async def busy() -> None:
        raise Busy("the text workers have too much to do", retry_after_s=1.0)

    async with front(api_keys=path) as f:
        f.texts.pool.gate = busy
        assert (await f.post("/tokenize", {"prompt": "x"}, headers=key("one"))).status == 503
        f.texts.pool.gate = None
        assert (await f.post("/tokenize", {"prompt": "x"}, headers=key("one"))).status == 200


@in_loop
async def test_they_need_a_key_like_every_route(keys: Path) -> None:
    async with front(api_keys=keys) as f:
        for route in ("/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize"):
            assert (await f.post(route, {"prompt": "x"})).status == 401


@pytest.mark.parametrize("prefix", ["", "/v1"])
@in_loop
async def test_the_tokenizer_is_described(prefix: str) -> None:
    async with front() as f:
        client = await f.get(prefix + "/tokenizer_info")
        assert (client.status, client.headers["content-type"]) == (200, "application/json")
        model = f.texts.model()
        assert client.json == {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": model.special_tokens.get("bos_token"),
            "eos_token": model.special_tokens["eos_token"],
            "pad_token": model.special_tokens.get("pad_token"),
            "chat_template": CHATML,
        }
        assert client.json["eos_token"]


@in_loop
async def test_the_tokenizer_is_described_without_a_template_and_not_before_it_is_loaded() -> None:
    async with front(text=bytes_text(chat_template=None)) as f:
        assert (await f.get("/tokenizer_info")).json["chat_template"] is None
        f.texts.loaded = None
        loading = await f.get("/tokenizer_info")
        assert (loading.status, loading.json["error"]["code"]) == (503, "engine_unavailable")


@in_loop
async def test_a_template_that_is_no_text_throughout_is_described_without_that() -> None:
    async with front(text=bytes_text(chat_template="{{ '\ud800' }}x")) as f:
        client = await f.get("/tokenizer_info")
        assert (client.status, client.json["chat_template"]) == (200, "{{ '?' }}x")


@in_loop
async def test_the_description_needs_a_key_and_counts_as_one_of_its_requests(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    add(path, Key("two", digest(b"two-key"), limits=KeyLimits(requests_per_minute=2, tokens_per_minute=5)))
    async with front(api_keys=path) as f:
        assert (await f.get("/tokenizer_info")).status == 401
        answers = [await f.get("/tokenizer_info", headers=key("two")) for _ in range(3)]
        assert [answer.status for answer in answers] == [200, 200, 429]
        status = (await f.get("/v1/status", headers=key("two"))).json
        assert [(usage["requests"], usage["tokens"], usage["running"]) for usage in status["keys"]] == [(2, 0, 0)]


@in_loop
async def test_a_model_without_a_template_still_tokenizes_texts() -> None:
    async with front(text=bytes_text(chat_template=None)) as f:
        assert (await tokenize(f, prompt="x")).status == 200
        refused(await tokenize(f, messages=HI), 400, "messages", "template")


@in_loop
async def test_what_the_document_allows_is_answered() -> None:
    async with front() as f:
        schemas = (await f.get("/openapi.json")).json["components"]["schemas"]
        assert set(schemas["ChatRequest"]["properties"]) < set(schemas["TokenizeChat"]["properties"])
        assert (
            schemas["DetokenizeRequest"]["properties"]["tokens"]["items"]["maximum"] == f.texts.model().vocabulary - 1
        )
        assert json.dumps(schemas["TokenizeRequest"]).count("$ref") == 2
