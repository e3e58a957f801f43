"""Images over the gateway's vLLM wire: URLs beside token ids with one placeholder each, which the worker expands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc
import pytest

from tests.fronts.rpc.worker import Scene, read, refused, worker
from tests.media.pictures import png
from tests.support.aio import in_loop
from tests.support.images import MARKS, data_url, exists, inline_service, vision_text
from treadle.core.messages import Submit
from treadle.fronts.media.store import PixelStore

TEXT = vision_text()
START, PAD, END = (TEXT.named_ids[mark] for mark in MARKS)
IDS = (*b"a", START, PAD, END, *b"b", START, PAD, END)


def media(w: Scene, urls: Sequence[str], ids: Sequence[int] = IDS, modality: str = "IMAGE", **params: Any) -> Any:
    pb = w.vllm.pb
    request = w.vllm.request(prompt=ids, **params)
    enum = pb.MediaRef.DESCRIPTOR.fields_by_name["modality"].enum_type.values_by_name
    items = [pb.MediaRef(modality=enum[modality].number, url=url) for url in urls]
    request.media_refs.CopyFrom(pb.MediaRefs(items=items))
    return request


async def refusal(w: Scene, request: Any) -> tuple[Any, str]:
    error = await refused(w.vllm.stub.Generate(request))
    return error.code(), error.details()


@in_loop
async def test_placeholders_become_the_tokens_of_their_images() -> None:
    seen: list[Submit] = []
    there: list[bool] = []

    def script(request: Submit, position: int) -> int:
        if not position:
            seen.append(request)
            there.extend(map(exists, request.images))
        return 65

    store = PixelStore()
    async with worker(script, text=TEXT, images=inline_service(store=store)) as w:
        request = media(w, [data_url(png(16, 16)), data_url(png(32, 16))], max_tokens=2)
        answer = await read(w.vllm.stub.Generate(request))
        (submit,) = seen
        assert submit.prompt == (*b"a", START, *[PAD] * 4, END, *b"b", START, *[PAD] * 8, END)
        assert [(image.start, image.count) for image in submit.images] == [(2, 4), (9, 8)]
        assert there == [True, True]
        assert answer.end.prompt_tokens == len(submit.prompt)
        assert store.free_bytes == store.budget
        assert w.idle()


@in_loop
async def test_a_worker_tells_the_gateway_what_it_reads() -> None:
    given: dict[str, dict[str, Any]] = {"data": {}, "data,http,https": {"image_hosts": ("pics.example",)}}
    for schemes, options in given.items():
        async with worker(text=TEXT, images=inline_service(), **options) as w:
            info = await w.vllm.stub.GetModelInfo(w.vllm.pb.GetModelInfoRequest())
            server = await w.vllm.stub.GetServerInfo(w.vllm.pb.GetServerInfoRequest())
            assert info.supports_vision
            assert (server.mm_processor, server.mm_media_ref_schemes) == ("inprocess", schemes)
            assert not hasattr(await w.mlx.stub.GetModelInfo(w.mlx.pb.GetModelInfoRequest()), "supports_vision")
    async with worker() as w:
        info = await w.vllm.stub.GetModelInfo(w.vllm.pb.GetModelInfoRequest())
        server = await w.vllm.stub.GetServerInfo(w.vllm.pb.GetServerInfoRequest())
        assert (info.supports_vision, server.mm_processor) == (False, "")


@pytest.mark.parametrize(
    ("urls", "given", "words"),
    [
        ([data_url()], {}, "input has 2 placeholders of images"),
        ([data_url()] * 2, {"ids": (1, 2)}, "has 0 placeholders"),
        ([data_url(), "file:///etc/passwd"], {}, "media_refs.items[1].url is no URL of an image"),
        ([data_url(), "http://a.example/x"], {}, "its host is not allowed"),
        ([data_url(), data_url(b"junk")], {}, "media_refs.items[1].url: the bytes are not an image"),
        ([data_url(), "data:image/png;base64,@@"], {}, "not base64"),
        ([data_url()] * 2, {"ids": (1, 2, PAD, PAD, 10**6)}, "token id"),
        ([data_url()] * 2, {"max_tokens": 0}, "max_tokens is 0"),
    ],
)
@in_loop
async def test_bad_images_are_refused_by_their_place(urls: list[str], given: dict[str, Any], words: str) -> None:
    store = PixelStore()
    async with worker(text=TEXT, images=inline_service(store=store)) as w:
        code, details = await refusal(w, media(w, urls, **given))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert words in details
        assert store.free_bytes == store.budget
        assert w.idle()


@in_loop
async def test_other_media_and_other_ways_to_send_images_are_refused_by_name() -> None:
    async with worker(text=TEXT, images=inline_service()) as w:
        code, details = await refusal(w, media(w, [data_url()] * 2, modality="VIDEO"))
        assert (code, "media_refs.items[0] is no image" in details) == (grpc.StatusCode.UNIMPLEMENTED, True)
        text = media(w, [data_url()])
        text.text = "hello"
        code, details = await refusal(w, text)
        assert (code, "needs tokenized input" in details) == (grpc.StatusCode.INVALID_ARGUMENT, True)
        pixels = w.vllm.request()
        pixels.mm_inputs.CopyFrom(w.vllm.pb.MultimodalInputs())
        code, details = await refusal(w, pixels)
        assert (code, "--mm-processing worker" in details) == (grpc.StatusCode.UNIMPLEMENTED, True)


@in_loop
async def test_a_worker_that_reads_text_says_so() -> None:
    given: tuple[dict[str, Any], ...] = ({}, {"text": TEXT})
    for options in given:
        async with worker(**options) as w:
            code, details = await refusal(w, media(w, [data_url()] * 2))
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert "media_refs.items[0].url is an image, and" in details


@in_loop
async def test_pixels_go_where_the_scores_do_not_fit_a_message() -> None:
    store = PixelStore()
    async with worker(text=vision_text(200_000), images=inline_service(store=store)) as w:
        request = media(w, [data_url()] * 2, (*IDS, *[65] * 30_000), max_tokens=2, prompt_logprobs=20)
        code, details = await refusal(w, request)
        assert (code, "4 MiB" in details) == (grpc.StatusCode.INVALID_ARGUMENT, True)
        assert store.free_bytes == store.budget
