"""Images of every dialect through a front: where they stand in the prompt, what the engine gets, and each refusal."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import ollama
import openai
import pytest

from tests.fronts.web.server import Front, front, on_port, says
from tests.fronts.web.test_order import ended
from tests.media.pictures import animated, claimed_png, png
from tests.support.aio import in_loop
from tests.support.asgi import post
from tests.support.images import InlineWorkers, data_url, exists, inline_service, vision_text
from treadle.core.messages import Submit
from treadle.errors import InvalidRequest
from treadle.fronts import strict_json
from treadle.fronts.media.service import ImageService
from treadle.fronts.media.store import PixelStore
from treadle.text.images.families import NO_TOWER

CHAT, MESSAGES, COUNT, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses"
EMBEDDINGS = "/v1/embeddings"
PAD = "<|image_pad|>"
WIDE = png(32, 16)


class Seen:
    """The script of a runner that remembers its requests, and whether their pixels were there."""

    def __init__(self) -> None:
        self.requests: list[Submit] = []
        self.there: list[bool] = []
        self._answer = says("A loom.")

    def __call__(self, request: Submit, position: int) -> int:
        if position == 0:
            self.requests.append(request)
            self.there += map(exists, request.images)
        return self._answer(request, position)


@asynccontextmanager
async def seeing(**options: Any) -> AsyncIterator[tuple[Front, Seen]]:
    seen = Seen()
    given: dict[str, Any] = {"images": inline_service(), "text": vision_text()} | options
    async with front(seen, **given) as f:
        yield f, seen
        assert f.idle()


def prompt_of(f: Front, request: Submit) -> str:
    return f.texts.model().decode(request.prompt, skip_special_tokens=False)


def wrapped(count: int) -> str:
    return f"<|vision_start|>{PAD * count}<|vision_end|>"


def url_part(data: bytes | None = None, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(data), **more}}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def b64(data: bytes | None = None) -> str:
    return base64.b64encode(png(16, 16) if data is None else data).decode()


def source(data: bytes | None = None, media_type: str = "image/png") -> dict[str, Any]:
    return {"type": "image", "source": {"type": "base64", "media_type": media_type, "data": b64(data)}}


def turn(*content: Any, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": [*content]}


INPUT = {"type": "input_image", "image_url": data_url()}
CALL = {"id": "toolu_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
ONE = f"<|im_start|>user\na{wrapped(4)}b<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("path", "body", "prompt"),
    [
        (CHAT, {"messages": [turn(text("a"), url_part(), text("b"))]}, ONE),
        (CHAT, {"messages": [turn(text("a"), {"type": "image_url", "image_url": data_url()}, text("b"))]}, ONE),
        (CHAT, {"messages": [turn(text("a"), INPUT, text("b"))]}, ONE),
        (MESSAGES, {"max_tokens": 9, "messages": [turn(text("a"), source(), text("b"))]}, ONE),
        (
            RESPONSES,
            {"input": [turn({"type": "input_text", "text": "a"}, INPUT, {"type": "input_text", "text": "b"})]},
            ONE,
        ),
        (
            "/api/chat",
            {"messages": [{"role": "user", "content": "ab", "images": [b64()]}]},
            ONE.replace(f"a{wrapped(4)}b", f"{wrapped(4)}ab"),
        ),
        (
            "/api/generate",
            {"prompt": "ab", "images": [b64(), b64(WIDE)]},
            ONE.replace(f"a{wrapped(4)}b", f"{wrapped(4)}{wrapped(8)}ab"),
        ),
        ("/api/generate", {"prompt": "", "images": [b64()]}, ONE.replace(f"a{wrapped(4)}b", wrapped(4))),
        (
            MESSAGES,
            {
                "max_tokens": 9,
                "messages": [
                    turn(text("a")),
                    turn({"type": "tool_use", "id": "t", "name": "f", "input": {}}, role="assistant"),
                    turn(
                        {"type": "tool_result", "tool_use_id": "t", "is_error": True, "content": [source(), text("b")]}
                    ),
                ],
            },
            f"Error: {wrapped(4)}b",
        ),
        (
            RESPONSES,
            {
                "input": [
                    turn({"type": "input_text", "text": "a"}),
                    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                    {"type": "function_call_output", "call_id": "c", "output": [INPUT]},
                ]
            },
            wrapped(4),
        ),
    ],
)
@pytest.mark.parametrize("inline_bytes", [strict_json.INLINE_BYTES, 0])
@in_loop
async def test_an_image_of_any_dialect_stands_at_its_place(
    path: str, body: dict[str, Any], prompt: str, inline_bytes: int
) -> None:
    """In a body that the event loop parses, and in one that a text worker does."""
    async with seeing() as (f, seen):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(strict_json, "INLINE_BYTES", inline_bytes)
            given = await f.post(path, {"model": "m", "stream": False, **body})
        assert given.status == 200, given.body
        (request,) = seen.requests
        assert prompt in prompt_of(f, request)
        assert seen.there
        assert all(seen.there)
        pad = f.texts.model().named_ids[PAD]
        for image in request.images:
            tokens = request.prompt[image.start : image.end]
            assert (set(tokens), len(tokens)) == ({pad}, image.count)
            assert (image.shape, image.dtype) == ((image.count * 4, 48), "uint8")


@in_loop
async def test_images_of_any_turn_and_several_are_read_once_each() -> None:
    async with seeing() as (f, seen):
        body = {
            "messages": [
                turn(url_part(), text("and"), url_part(WIDE)),
                {"role": "assistant", "content": "ok"},
                turn(url_part()),
            ],
            "n": 2,
        }
        answer = await f.post(CHAT, body)
        assert answer.status == 200, answer.body
        first, second = seen.requests
        assert first.images == second.images
        assert [image.count for image in first.images] == [4, 8, 4]
        assert [image.grid for image in first.images] == [((1, 4, 4),), ((1, 4, 8),), ((1, 4, 4),)]
        one, other, again = first.images
        assert (one.hash, one.shm) == (again.hash, again.shm)
        assert one.hash != other.hash
        assert answer.json["usage"]["prompt_tokens"] == len(first.prompt)


@in_loop
async def test_usage_and_count_tokens_agree() -> None:
    messages = [turn(text("What is it?"), source(), source(WIDE))]
    async with seeing() as (f, _):
        counted = (await f.post(COUNT, {"model": "m", "messages": messages})).json["input_tokens"]
        answer = await f.post(MESSAGES, {"model": "m", "max_tokens": 9, "messages": messages})
        assert answer.json["usage"]["input_tokens"] == counted
        without = (await f.post(COUNT, {"model": "m", "messages": [turn(text("What is it?"))]})).json
        assert counted == without["input_tokens"] + len(MARKS_TOKENS)


@in_loop
async def test_tokenize_puts_the_tokens_of_images_where_the_chat_does() -> None:
    store = PixelStore()
    async with seeing(images=inline_service(store=store)) as (f, seen):
        body = chat(text("What is it?"), url_part(), url_part(WIDE))
        tokens = (await f.post("/tokenize", {**body, "return_token_strs": True})).json
        assert (await f.post(CHAT, body)).status == 200
        assert tokens["tokens"] == list(seen.requests[0].prompt)
        assert (tokens["count"], tokens["token_strs"].count(PAD)) == (len(tokens["tokens"]), 12)
        assert store.free_bytes == store.budget
        bad = await f.post("/tokenize", chat(url_part(b"hello")))
        assert (bad.status, bad.json["error"]["param"]) == (400, "messages[0].content[0].image_url.url")
        other = await f.post("/tokenize", {**chat(url_part(b"hello")), "model": "other"})
        assert (other.status, other.json["error"]["param"]) == (404, "model")


@in_loop
async def test_images_beyond_the_context_are_counted() -> None:
    async with seeing(text=vision_text(300)) as (f, _):
        many = [url_part(png(64, 64, seed)) for seed in range(6)]
        found = await f.post("/tokenize", chat(*many))
        assert found.status == 200, found.body
        assert found.json["max_model_len"] == 300
        blocks = [source(png(64, 64, seed)) for seed in range(6)]
        counted = (await f.post(COUNT, {"model": "m", "messages": [turn(*blocks)]})).json["input_tokens"]
        assert found.json["count"] == counted > 6 * 64
        least = await f.post("/tokenize", chat(*[url_part(png(8, 8))] * 301))
        assert least.json["count"] > 301
        small = {"model": "m", "messages": [turn(*[source(png(8, 8))] * 301)]}
        assert (await f.post(COUNT, small)).json["input_tokens"] == least.json["count"]


MARKS_TOKENS = range(4 + 8 + 2 * 2)
"""Tokens of both images and of the marks around them."""


@in_loop
async def test_a_conversation_with_images_goes_on_from_a_stored_response() -> None:
    async with seeing() as (f, seen):
        first = await f.post(RESPONSES, {"model": "m", "input": [turn(INPUT)]})
        second = await f.post(
            RESPONSES, {"model": "m", "previous_response_id": first.json["id"], "input": "And its colour?"}
        )
        assert second.status == 200, second.body
        assert wrapped(4) in prompt_of(f, seen.requests[1])
        assert seen.requests[0].images == seen.requests[1].images
        items = (await f.get(f"{RESPONSES}/{first.json['id']}/input_items")).json["data"]
        assert items[0]["content"] == [{**INPUT, "detail": "auto"}]


@pytest.mark.parametrize("detail", ["low", "high", "original", "auto"])
@in_loop
async def test_a_stored_image_has_the_detail_that_was_given(detail: str) -> None:
    async with seeing() as (f, _):
        for part in ({**INPUT, "detail": detail}, url_part(detail=detail)):
            found = await f.post(RESPONSES, {"model": "m", "input": [turn(part)]})
            items = (await f.get(f"{RESPONSES}/{found.json['id']}/input_items")).json["data"]
            assert items[0]["content"] == [{**INPUT, "detail": detail}]


@in_loop
async def test_low_detail_is_an_image_of_its_own() -> None:
    async with seeing() as (f, seen):
        for detail in ("low", "high"):
            assert (await f.post(CHAT, {"messages": [turn(url_part(detail=detail))]})).status == 200
        low, high = (request.images[0] for request in seen.requests)
        assert low.hash != high.hash


@in_loop
async def test_pixels_outlive_the_request_only_in_the_store() -> None:
    store = PixelStore()
    async with seeing(images=inline_service(store=store)) as (f, seen):
        assert (await f.post(CHAT, {"messages": [turn(url_part())]})).status == 200
        assert (await f.post(CHAT, {"messages": [turn(url_part())]})).status == 200
        assert exists(seen.requests[0].images[0])
        assert store.statistics() | {"held_bytes": 0} == {
            "kept": 1,
            "held_bytes": 0,
            "used_bytes": 0,
            "limit_bytes": store.budget,
            "hits": 1,
        }
        assert store.free_bytes == store.budget
    assert not exists(seen.requests[0].images[0])


@pytest.mark.parametrize(
    ("path", "body"), [(CHAT, {"messages": [turn(url_part())]}), (EMBEDDINGS, {"input": {"image": data_url()}})]
)
@in_loop
async def test_pixels_are_those_of_a_cache_salt(path: str, body: dict[str, Any]) -> None:
    store = PixelStore()
    async with seeing(images=inline_service(store=store)) as (f, _):
        for salt in ("a", "b", "a"):
            assert (await f.post(path, {**body, "cache_salt": salt})).status == 200
        told = store.statistics()
        assert (told["kept"], told["hits"]) == (2, 1)


@in_loop
async def test_nothing_of_images_runs_for_text() -> None:
    made = InlineWorkers.made
    async with seeing() as (f, seen):
        assert (await f.chat()).status == 200
        assert seen.requests[0].images == ()
        assert (await f.get("/v1/status")).json["images"]["processes"] == 0
    assert InlineWorkers.made == made


def refused(body: dict[str, Any], words: str, param: str = "messages[0].content[0].image_url.url") -> Any:
    return pytest.param(body, words, param)


def chat(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [turn(*parts)]}


def url(text: str) -> dict[str, Any]:
    return chat({"type": "image_url", "image_url": {"url": text}})


@pytest.mark.parametrize(
    ("body", "words", "param"),
    [
        refused(chat(url_part(b"hello")), "not an image that can be read here"),
        refused(url("data:image/png;base64,"), "empty image"),
        refused(url("data:image/png;base64,@@@@"), "not base64"),
        refused(url("data:image/png,abc"), "no data URL in base64"),
        refused(url("data:;base64"), "no data URL in base64"),
        refused(url(data_url(png(), "image/jpeg")), "said to be image/jpeg, and its bytes are PNG"),
        refused(url(data_url(png(), "text/html")), "media type 'text/html' is not read"),
        refused(chat(url_part(claimed_png(30_000, 30_000))), "30000 x 30000 pixels"),
        refused(chat(url_part(png()[:60])), "damaged"),
        refused(chat(url_part(png(201, 1))), "a shape that this model can't read"),
        refused(url("file:///etc/passwd"), "no URL of an image"),
        refused(url("/etc/passwd"), "no URL of an image"),
        refused(url("http://example.com/a.png"), "not allowed (the server fetches none, see --image-hosts)"),
        refused(url("https://" + "a" * 9000), "9008 characters"),
        refused(chat({"type": "image_url"}), "missing", "messages[0].content[0].image_url"),
        refused(chat(url_part(detail="best")), "'best'", "messages[0].content[0].image_url.detail"),
        refused(chat({"type": "image_url", "image_url": 5}), "a number", "messages[0].content[0].image_url"),
        refused(chat(text("x"), {"type": "video_url", "video_url": {}}), "'video_url'", "messages[0].content[1].type"),
        refused(chat({"type": "input_audio", "input_audio": {}}), "'input_audio'", "messages[0].content[0].type"),
        refused(chat(*[url_part()] * 5000), "your 5000 images have at least 5000 tokens"),
        refused(chat(url_part(), *[url_part(png(64, 64, seed)) for seed in range(70)]), "4096", ""),
    ],
)
@in_loop
async def test_each_bad_image_is_a_400_of_its_own_request(body: dict[str, Any], words: str, param: str) -> None:
    async with seeing(max_body_bytes=64 << 20) as (f, seen):
        bad = await f.post(CHAT, body)
        assert bad.status == 400, bad.body
        assert words in bad.json["error"]["message"]
        assert not param or bad.json["error"]["param"] == param
        assert (await f.post(CHAT, chat(url_part()))).status == 200
        assert len(seen.requests) == 1


@in_loop
async def test_an_animation_is_read_by_its_first_frame() -> None:
    async with seeing() as (f, seen):
        body = chat(url_part(animated("GIF", 1, 2, width=16, height=16)))
        body["messages"][0]["content"][0]["image_url"]["url"] = data_url(animated("GIF", 1, 2, width=16, height=16), "")
        assert (await f.post(CHAT, body)).status == 200
        assert seen.requests[0].images[0].count == 4


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, chat(url_part()), "messages[0].content[0].image_url.url"),
        ("/api/chat", {"messages": [{"role": "user", "content": "a", "images": [b64()]}]}, "messages[0].images[0]"),
        ("/api/generate", {"prompt": "a", "images": [b64()]}, "images[0]"),
        (RESPONSES, {"input": [turn(INPUT)]}, "input[0].content[0].image_url"),
        (MESSAGES, {"max_tokens": 9, "messages": [turn(source())]}, "messages[0].content[0].source.data"),
        (COUNT, {"messages": [turn(source())]}, "messages[0].content[0].source.data"),
        ("/tokenize", chat(url_part()), "messages[0].content[0].image_url.url"),
        (EMBEDDINGS, {"input": ["a", {"image": data_url()}]}, "input[1].image"),
    ],
)
@pytest.mark.parametrize("inline_bytes", [strict_json.INLINE_BYTES, 0])
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"text": None}, "the model reads text only"),
        ({"modalities": ("text",)}, "the model reads text only"),
        ({"images": None}, "images are not read here"),
    ],
)
@in_loop
async def test_a_server_that_reads_no_images_says_why(
    path: str,
    body: dict[str, Any],
    param: str,
    options: Any,
    reason: str,
    inline_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(strict_json, "INLINE_BYTES", inline_bytes)
    async with seeing(**options) as (f, _):
        stream = {} if path == EMBEDDINGS else {"stream": False}
        bad = await f.post(path, {"model": "m", **stream, **body})
        assert bad.status == 400, bad.body
        assert f"{param} is an image, and {reason}: leave it out" in bad.body.decode()
        assert f.runner.looked_up == 0


@in_loop
async def test_images_of_earlier_responses_are_refused_by_a_model_that_reads_none() -> None:
    async with seeing() as (f, _):
        first = await f.post(RESPONSES, {"model": "m", "input": [turn(INPUT)]})
        f.texts.loaded = dataclasses.replace(vision_text(), images=None, no_images=NO_TOWER)
        bad = await f.post(RESPONSES, {"model": "m", "previous_response_id": first.json["id"], "input": "b"})
        assert bad.status == 400
        assert "is an image" in bad.json["error"]["message"]


@in_loop
async def test_raw_prompts_take_no_images() -> None:
    async with seeing() as (f, _):
        raw = await f.post("/api/generate", {"prompt": "a", "images": [b64()], "raw": True})
        assert (raw.status, "images are not supported with raw" in raw.body.decode()) == (400, True)
        for wrong in ("x", [5]):
            bad = await f.post("/api/chat", {"messages": [{"role": "user", "content": "a", "images": wrong}]})
            assert (bad.status, "messages[0].images" in bad.body.decode()) == (400, True)


@in_loop
async def test_turns_are_left_out_with_their_images_where_a_response_may_cut() -> None:
    """Those of all turns are too many for the context: the prompt has the images of the turns that are left."""
    pictures = [png(64, 64, seed) for seed in range(20)]
    given = [
        turn({"type": "input_image", "image_url": data_url(data)}, {"type": "input_text", "text": f"No {i}."})
        for i, data in enumerate(pictures)
    ]
    async with seeing(text=vision_text(1000)) as (f, seen):
        body = {"model": "demo", "input": given, "max_output_tokens": 9}
        refused = await f.post(RESPONSES, body)
        assert (refused.status, refused.json["error"]["code"]) == (400, "context_length_exceeded")
        found = await f.post(RESPONSES, {**body, "truncation": "auto"})
        assert found.status == 200
        (request,) = seen.requests
        assert 0 < len(request.images) < 20
        prompt = prompt_of(f, request)
        assert "No 19." in prompt
        assert "No 0." not in prompt
        assert prompt.count(f"No {20 - len(request.images)}.") == 1


@pytest.mark.parametrize("inline_bytes", [strict_json.INLINE_BYTES, 0])
@in_loop
async def test_many_small_images_are_answered(inline_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were they of usual size, they would be more than sixteen times the context."""
    monkeypatch.setattr(strict_json, "INLINE_BYTES", inline_bytes)
    async with seeing(text=vision_text(300)) as (f, seen):
        small = chat(*[url_part(png(8, 8))] * 80)
        answer = await f.post(CHAT, {**small, "max_tokens": 9})
        assert answer.status == 200, answer.body
        assert len(seen.requests[0].images) == 80


@in_loop
async def test_small_images_find_room_beside_an_answer() -> None:
    """Room for two contexts, one of which another request has, is room for any prompt."""
    async with seeing(text=vision_text(512), cache_tokens=512, running=1, waiting=1, pump=False) as (f, seen):
        first = post(CHAT, {"messages": [turn(text("a"))], "stream": True}).start(f.app)
        await f.step(2)
        second = post(CHAT, {**chat(*[url_part(png(8, 8))] * 30), "max_tokens": 9}).start(f.app)
        for _ in range(60):
            await f.step()
        assert (first.status, second.status) == (200, 200), second.body
        assert len(seen.requests[1].images) == 30


@pytest.mark.parametrize(("side", "count", "status"), [(8, 30, 200), (64, 6, 503)])
@in_loop
async def test_images_take_the_tokens_that_they_have(side: int, count: int, status: int) -> None:
    """No more before these are known: beside an answer that may have two thirds of all that is reserved, small images
    are admitted. Large ones are refused when they are known, and leave nothing behind."""
    store = PixelStore()
    options: dict[str, Any] = {"text": vision_text(512), "images": inline_service(store=store), "cache_tokens": 512}
    async with seeing(**options, running=2, waiting=1, pump=False) as (f, _):
        first = post(CHAT, {"messages": [turn(text("a"))], "stream": True}).start(f.app)
        await f.step(2)
        assert f.engine.gate.tokens == 512
        second = post(CHAT, {**chat(*[url_part(png(side, side))] * count), "max_tokens": 2}).start(f.app)
        for _ in range(60):
            await f.step()
        assert (first.status, second.status) == (200, status), second.body
        if status == 503:
            assert "the tokens of the requests at work leave no room" in second.json["error"]["message"]
            assert int(second.headers["retry-after"]) >= 1
        assert store.free_bytes == store.budget


@in_loop
async def test_no_images_are_held_by_a_request_that_is_refused_later() -> None:
    store = PixelStore()
    async with seeing(images=inline_service(store=store), text=vision_text(200)) as (f, _):
        late = await f.post(CHAT, chat(url_part(png(64, 64)), text("x" * 300)))
        assert (late.status, late.json["error"]["code"]) == (400, "context_length_exceeded")
        picture = source(png(64, 64))
        base = (await f.post(COUNT, {"messages": [turn(picture, text("x"))]})).json["input_tokens"]
        full = {"max_tokens": 9, "messages": [turn(picture, text("x" * (200 - base + 1)))]}
        assert (await f.post(COUNT, {"messages": full["messages"]})).json["input_tokens"] == 200
        assert (await f.post(MESSAGES, full)).status == 400
        assert store.free_bytes == store.budget


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat(url_part()) | {"stream": True}),
        (EMBEDDINGS, {"input": [{"image": data_url(png(16, 16, seed))} for seed in range(5)]}),
    ],
)
@in_loop
async def test_a_client_that_leaves_holds_no_pixels(path: str, body: dict[str, Any]) -> None:
    store = PixelStore()
    async with seeing(images=inline_service(store=store), running=1, pump=False) as (f, _):
        client = post(path, body).start(f.app)
        await f.step(2)
        assert store.free_bytes < store.budget
        client.leave()
        await f.step(3)
        assert store.free_bytes == store.budget


@in_loop
async def test_images_are_named_among_what_the_model_reads() -> None:
    async with seeing() as (f, _):
        assert (await f.get("/v1/models")).json["data"][0]["modalities"] == ["text", "image"]
        assert "vision" in (await f.post("/api/show", {"model": "m"})).json["capabilities"]
        status = (await f.get("/v1/status")).json["images"]
        assert (status["read"], status["reason"]) == (True, "")
    async with front() as f:
        assert (await f.get("/v1/models")).json["data"][0]["modalities"] == ["text"]
        assert "vision" not in (await f.post("/api/show", {"model": "m"})).json["capabilities"]
        status = (await f.get("/v1/status")).json["images"]
        assert status == {"read": False, "reason": "the model reads text only"}


@in_loop
async def test_the_official_sdks_send_images() -> None:
    async with seeing() as (f, seen), on_port(f.app) as base:
        async with openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="k", max_retries=0) as client:
            content: Any = [text("What is it?"), url_part()]
            done = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": content}])
            assert done.choices[0].message.content == "A loom."
            items: Any = [turn(INPUT)]
            assert (await client.responses.create(model="m", input=items)).output_text == "A loom."
        async with anthropic.AsyncAnthropic(base_url=base, api_key="k", max_retries=0) as client:
            blocks: Any = [source(), text("What is it?")]
            message = await client.messages.create(
                model="m", max_tokens=9, messages=[{"role": "user", "content": blocks}]
            )
            assert message.content[0].type == "text"
            assert message.content[0].text == "A loom."
            counted = await client.messages.count_tokens(model="m", messages=[{"role": "user", "content": blocks}])
            assert counted.input_tokens == message.usage.input_tokens
        asked = ollama.AsyncClient(host=base)
        try:
            reply = await asked.chat(model="m", messages=[{"role": "user", "content": "a", "images": [png(16, 16)]}])
            assert reply.message.content == "A loom."
        finally:
            await asked._client.aclose()
        assert [request.images[0].count for request in seen.requests] == [4] * 4


def test_an_images_part_can_not_come_in_json() -> None:
    """A part that a dialect has read is no JSON: a client's object in its place is refused."""
    from treadle.fronts.chat_messages import read_turns

    with pytest.raises(InvalidRequest, match="'image' is not supported"):
        read_turns([turn({"type": "image", "image": {"at": "x", "data": "eA=="}})])


@in_loop
async def test_requests_with_images_wait_for_their_own_images_alone() -> None:
    """A request of text passes one whose image takes long."""
    began, goes = asyncio.Event(), asyncio.Event()

    class Slow(InlineWorkers):
        async def prepare(self, data: bytes, media_type: str = "", **options: Any) -> Any:
            began.set()
            await goes.wait()
            return await super().prepare(data, media_type, **options)

    from treadle.fronts.media.service import ImageService

    async with seeing(images=ImageService(Slow)) as (f, seen):
        with_image = asyncio.create_task(f.post(CHAT, chat(url_part())))
        await began.wait()
        assert (await f.chat()).status == 200
        assert not with_image.done()
        goes.set()
        assert (await with_image).status == 200
        assert [len(request.images) for request in seen.requests] == [0, 1]


@pytest.mark.parametrize(
    ("path", "body"), [(CHAT, {"messages": [turn(url_part())]}), (EMBEDDINGS, {"input": {"image": data_url()}})]
)
@in_loop
async def test_a_cancel_ends_a_request_whose_images_are_still_prepared(path: str, body: dict[str, Any]) -> None:
    """At once, though its images would take for ever, and what it held is free."""
    began = asyncio.Event()

    class Endless(InlineWorkers):
        async def prepare(self, data: bytes, media_type: str = "", **options: Any) -> Any:
            began.set()
            await asyncio.Event().wait()

    store = PixelStore()
    async with seeing(images=ImageService(Endless, store=store)) as (f, seen):
        client = post(path, body, headers={"x-request-id": "mine"}).start(f.app)
        await began.wait()
        for _ in range(2):
            done = await f.post("/v1/requests/mine/cancel", {})
            assert (done.status, done.json["status"]) == (200, "cancelled")
        await ended(client)
        assert (client.status, client.json["error"]["message"]) == (499, "the request was aborted")
        assert (await f.post("/v1/requests/mine/cancel", {})).status == 404
        assert not seen.requests
        assert store.free_bytes == store.budget
