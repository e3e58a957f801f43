"""POST /v1/embeddings with chats and images: prompts, images of each input, refusals by place, nothing left behind."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from tests.fronts.web.server import Front, front, on_port
from tests.media.pictures import png
from tests.support.aio import in_loop
from tests.support.asgi import post
from tests.support.images import data_url, exists, inline_service, vision_text
from treadle.core.messages import Submit
from treadle.core.plan import StepPlan, StepResult
from treadle.fronts import strict_json
from treadle.fronts.media.store import PixelStore

PATH = "/v1/embeddings"
PAD = "<|image_pad|>"
WIDE = png(32, 16)
URL = data_url()
OPENED = "<|im_start|>assistant\n"


@asynccontextmanager
async def seeing(**options: Any) -> AsyncIterator[tuple[Front, list[Submit]]]:
    """A front over a model that reads images, and the sequences that it has run, each with its pixels."""
    given: dict[str, Any] = {"images": inline_service(), "text": vision_text()} | options
    seen: list[Submit] = []
    async with front(**given) as f:
        run = f.runner.execute

        def execute(plan: StepPlan) -> StepResult:
            for admit in plan.admit:
                assert all(map(exists, admit.request.images))
                seen.append(admit.request)
            return run(plan)

        f.runner.execute = execute  # type: ignore[method-assign]
        yield f, seen
        assert f.idle()


def user(*content: str) -> str:
    return f"<|im_start|>user\n{''.join(content)}<|im_end|>\n"


def image(count: int = 4) -> str:
    return f"<|vision_start|>{PAD * count}<|vision_end|>"


def turn(*content: Any, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": [*content]}


def url_part(url: str = URL) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


ASKED = [turn(text("Represent it."), role="system"), turn(url_part(), text("a cat"))]
SYSTEM = "<|im_start|>system\nRepresent it.<|im_end|>\n"
CAT = SYSTEM + user(image(), "a cat")


@pytest.mark.parametrize(
    ("body", "prompts"),
    [
        ({"messages": ASKED}, [CAT]),
        ({"messages": ASKED, "add_generation_prompt": True, "add_special_tokens": True}, [CAT + OPENED]),
        (
            {"messages": [*ASKED, turn(text(""), role="assistant")], "continue_final_message": True},
            [CAT + OPENED],
        ),
        ({"messages": [{"role": "user", "content": "words"}]}, [user("words")]),
        ({"input": {"image": URL}}, [user(image()) + OPENED]),
        ({"input": {"image": URL.partition(",")[2]}}, [user(image()) + OPENED]),
        ({"input": {"text": "a", "image": URL}, "add_generation_prompt": False}, [user(image(), "a")]),
        (
            {"input": ["raw", {"text": "a"}, {"image": data_url(WIDE)}, {"content": [text("b"), url_part()]}]},
            ["raw", user("a") + OPENED, user(image(8)) + OPENED, user("b", image()) + OPENED],
        ),
    ],
)
@pytest.mark.parametrize("inline_bytes", [strict_json.INLINE_BYTES, 0])
@in_loop
async def test_chats_and_objects_are_rendered_with_their_images(
    body: dict[str, Any], prompts: list[str], inline_bytes: int
) -> None:
    """In a body that the event loop parses, and in one that a text worker does."""
    async with seeing() as (f, seen):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(strict_json, "INLINE_BYTES", inline_bytes)
            answer = await f.post(PATH, {"model": "m", **body})
        assert answer.status == 200, answer.body
        decode = f.texts.model().decode
        assert [decode(request.prompt, skip_special_tokens=False) for request in seen] == prompts
        pad = f.texts.model().named_ids[PAD]
        for request, prompt in zip(seen, prompts, strict=True):
            assert sum(one.count for one in request.images) == prompt.count(PAD)
            assert all(set(request.prompt[one.start : one.end]) == {pad} for one in request.images)
        tokens = sum(len(request.prompt) for request in seen)
        assert answer.json["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
        assert len(answer.json["data"]) == len(prompts)


@in_loop
async def test_more_images_than_places_take_turns_and_are_prepared_once_each() -> None:
    store = PixelStore()
    async with seeing(images=inline_service(store=store), running=2) as (f, seen):
        pictures = [data_url(png(16, 16, seed)) for seed in range(5)]
        answer = await f.post(PATH, {"input": [{"image": one} for one in (*pictures, *pictures)]})
        assert len(answer.json["data"]) == 10
        assert len({request.images[0].hash for request in seen}) == 5
        assert store.statistics()["kept"] == 5
        assert store.free_bytes == store.budget


@in_loop
async def test_the_pixels_of_an_input_go_when_it_has_its_vector() -> None:
    store = PixelStore()
    async with seeing(images=inline_service(store=store), running=1, pump=False) as (f, seen):
        pictures = [data_url(png(16, 16, seed)) for seed in range(5)]
        client = post(PATH, {"input": [{"image": one} for one in pictures]}).start(f.app)
        used = []
        while len(seen) < 5:
            await f.step()
            used.append(store.used_bytes)
        assert sorted(set(used), reverse=True)[:3] == [max(used) // 5 * left for left in (5, 4, 3)]
        client.leave()
        await f.step(3)


@pytest.mark.parametrize(
    ("body", "words", "param"),
    [
        ({"input": ["a", {"image": data_url(b"hello")}]}, "not an image", "input[1].image"),
        ({"input": {"image": "@@@"}}, "not base64", "input.image"),
        ({"input": {"image": "http://example.com/a.png"}}, "the server fetches none", "input.image"),
        ({"input": {"image": "file:///etc/passwd"}}, "not base64", "input.image"),
        ({"input": {"image": 5}}, "must be a string", "input.image"),
        ({"input": [{"text": ""}]}, "is empty", "input"),
        ({"input": [{"text": "a"}, {}]}, "is empty", "input[1]"),
        ({"input": [{"text": "a", "images": URL}]}, "unknown field", "input[0].images"),
        ({"input": [{"text": "a", "content": "b"}]}, "give either", "input"),
        (
            {"input": [{"content": [{"type": "video_url"}]}, "b"]},
            "'video_url' is not supported",
            "input[0].content[0].type",
        ),
        ({"messages": ASKED, "input": "a"}, "either messages", "messages"),
        ({"messages": []}, "empty", "messages"),
        ({"messages": ASKED, "mm_processor_kwargs": {"a": 1}}, "not supported", "mm_processor_kwargs"),
        ({"messages": [turn(*[url_part()] * 5000)]}, "5000 images have", "messages[0].content[0].image_url.url"),
        ({"input": ["a", {"content": [url_part()] * 700 + [text("x" * 1500)]}]}, "5719 tokens", "input[1]"),
        (
            {"messages": ASKED, "continue_final_message": True, "add_generation_prompt": True},
            "both true",
            "continue_final_message",
        ),
    ],
)
@in_loop
async def test_what_is_wrong_is_a_400_by_its_place(body: dict[str, Any], words: str, param: str) -> None:
    store = PixelStore()
    async with seeing(images=inline_service(store=store), max_body_bytes=64 << 20) as (f, seen):
        bad = await f.post(PATH, body)
        assert (bad.status, bad.json["error"]["param"]) == (400, param), bad.body
        assert words in bad.json["error"]["message"]
        assert not seen
        assert store.free_bytes == store.budget


@in_loop
async def test_images_of_several_inputs_have_several_contexts() -> None:
    """Together they may have more tokens than one context, but not more than all."""
    async with seeing(text=vision_text(300)) as (f, _):
        pictures = [{"image": data_url(png(64, 64, seed))} for seed in range(6)]
        assert (await f.post(PATH, {"input": pictures})).status == 200
        one = {"content": [url_part(data_url(png(64, 64, seed))) for seed in range(12)]}
        bad = await f.post(PATH, {"input": [one, "x"]})
        assert bad.json["error"]["code"] == "context_length_exceeded"
        assert "640 tokens in 2 inputs" in bad.json["error"]["message"]


@pytest.mark.parametrize("inline_bytes", [strict_json.INLINE_BYTES, 0])
@in_loop
async def test_many_small_images_of_an_input_are_embedded(inline_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were they of usual size, they would be more than sixteen times the context."""
    monkeypatch.setattr(strict_json, "INLINE_BYTES", inline_bytes)
    async with seeing(text=vision_text(300)) as (f, seen):
        many = {"content": [url_part(data_url(png(8, 8)))] * 80}
        answer = await f.post(PATH, {"input": many})
        assert answer.status == 200, answer.body
        assert len(seen[0].images) == 80


@in_loop
async def test_more_pixels_than_the_server_holds_are_refused_rather_than_busy() -> None:
    """Unless others hold some: then it may go later."""
    store = PixelStore(budget=300 << 10)
    async with seeing(images=inline_service(store=store)) as (f, _):
        many = {"input": [{"image": data_url(png(64, 64, seed))} for seed in range(48)]}
        bad = await f.post(PATH, many)
        assert (bad.status, bad.json["error"]["param"]) == (400, "input[20].image"), bad.body
        assert "more pixels than the server holds at once, 300" in bad.json["error"]["message"]
        assert store.free_bytes == store.budget
        service = f.model.images
        assert service is not None
        store.used_bytes += 1000
        assert (await f.post(PATH, many)).status == 503
        store.used_bytes -= 1000


@in_loop
async def test_openai_s_sdk_sends_chats_as_vllm_takes_them() -> None:
    async with seeing() as (f, seen), on_port(f.app) as base:
        async with openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="k", max_retries=0) as client:
            body = {"model": "m", "messages": ASKED, "encoding_format": "float"}
            made = await client.post("/embeddings", cast_to=openai.types.CreateEmbeddingResponse, body=body)
            assert len(made.data[0].embedding) == 4
        assert [one.count for one in seen[0].images] == [4]
