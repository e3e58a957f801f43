"""Images in `treadle.Engine`, over a real tower and real image processes: tokens and vectors are mlx-vlm's."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from PIL import Image

from tests.media.pictures import picture, png
from tests.support.aio import in_loop
from tests.support.images import data_url
from tests.support.tiny import make_tiny
from tests.support.tiny_vision import make_reference
from tests.support.vision_folder import FAMILY, make_vision_chat
from tests.support.vision_reference import generate
from treadle import Engine
from treadle.errors import InvalidRequest, UnsupportedParameter
from treadle.library.images import _png
from treadle.media.decode import decode, open_image
from treadle.media.pixels.families import plan_of, values_of, write_pixels
from treadle.runner.mlxvlm.levels import values_of as looked_up
from treadle.runner.mlxvlm.qwen import with_frames
from treadle.text.images import Layout

DATA = png(48, 32)
URL = data_url(DATA)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_chat(tmp_path_factory.mktemp("vision") / "m")


def part(image: Any) -> dict[str, Any]:
    return {"type": "image", "image": image}


def ask(*content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*content, {"type": "text", "text": "What?"}]}]


def forms(folder: Path) -> list[Any]:
    (folder / "picture.png").write_bytes(DATA)
    opened = Image.open(io.BytesIO(DATA))
    return [URL, DATA, bytearray(DATA), folder / "picture.png", opened]


@in_loop
async def test_an_image_of_any_form_is_answered_and_embedded_as_mlx_vlm_does(folder: Path) -> None:
    async with Engine(folder, threads=1, max_running=4) as engine:
        reference = make_reference(FAMILY)
        done = [await engine.generate(ask(part(one)), temperature=0, max_tokens=8) for one in forms(folder)]
        done.append(
            await engine.generate(
                ask({"type": "image_url", "image_url": {"url": URL}}), temperature=0, max_tokens=8, stop_token_ids=[]
            )
        )
        ids, images, pixels = reference_inputs(engine, ask(part(URL)))
        expected = generate(FAMILY, reference, ids, images, [pixels], 8)
        assert {one.tokens for one in done} == {tuple(expected)}
        assert done[0].prompt_tokens == len(ids)

        items = [{"image": one} for one in forms(folder)] + [{"content": [part(DATA)]}]
        *found, text = await engine.embed([*items, "text"])
        ids, images, pixels = reference_inputs(engine, [{"role": "user", "content": [part(URL)]}])
        vector = embedding(reference, ids, images, pixels)
        for one in found:
            assert np.abs(np.array(one) - vector).max() < 1e-5
        assert text == (await engine.embed("text"))[0]
        assert (await engine.embed({"text": "a"}))[0] != (await engine.embed("a"))[0]
        for given, words in BAD:
            with pytest.raises(InvalidRequest, match=words):
                await engine.embed(given)
        for image, words in BAD_IMAGES:
            with pytest.raises(InvalidRequest, match=words) as caught:
                await engine.generate(ask(part(image)))
            assert caught.value.param == "prompt[0].content[0].image"
        assert engine.status()["engine"]["state"] == "ready"


BAD: list[tuple[Any, str]] = [
    ({}, "inputs is empty"),
    (["a", {}], r"inputs\[1\] is empty"),
    ({"picture": DATA}, "known are text, image, content"),
    ([{"image": b"junk"}, "a"], r"inputs\[0\].image: the bytes are not an image"),
]
BAD_IMAGES: list[tuple[Any, str]] = [
    (5, "a int: it must be an image of Pillow"),
    (None, "a NoneType"),
    (b"junk", "the bytes are not an image"),
    (b"", "empty image"),
    (bytes((20 << 20) + 1), "over 20 MiB"),
    (Path("nowhere.png"), "can't be read"),
    ("picture.png", "no URL of an image"),
    ("https://example.com/a.png", "the server fetches none"),
]


@in_loop
async def test_a_model_without_a_tower_refuses_images_by_name(tmp_path: Path) -> None:
    async with Engine(make_tiny(tmp_path / "m"), threads=1) as engine:
        for call in (engine.generate(ask(part(DATA))), engine.embed({"image": DATA})):
            with pytest.raises(UnsupportedParameter, match="is an image, and the model reads text only"):
                await call


def reference_inputs(engine: Engine, messages: Sequence[Any]) -> tuple[list[int], list[Any], np.ndarray]:
    """Token ids of a chat with the image `DATA`, the image's grid as `generate` wants it, and its pixels."""
    from treadle.fronts.chat_messages import read_turns
    from treadle.library.images import with_sources
    from treadle.text.images.prompt import images_of

    model: Any = engine._texts.model()
    turns = read_turns(with_sources(messages, "prompt"))
    pixels, layout = pixels_of(model.images)
    ids = model.chat_ids(turns, images={source.key: layout for source in images_of(turns)})
    return ids, [SimpleNamespace(grid=layout.grid)], pixels


def pixels_of(settings: Any) -> tuple[np.ndarray, Layout]:
    image = decode(open_image(DATA, "", 1 << 26))
    plan = plan_of(settings, *image.size)
    levels = np.zeros(plan.shape, np.uint8)
    write_pixels(settings, plan, image, levels)
    pixels = looked_up(mx.array(levels), mx.array(values_of(settings)), plan.layout.grid)
    return np.array(with_frames(pixels, 2, settings.patch)), plan.layout


def embedding(reference: Any, ids: Sequence[int], images: Sequence[Any], pixels: np.ndarray) -> np.ndarray:
    grids = mx.array([list(size) for image in images for size in image.grid])
    given = reference.get_input_embeddings(mx.array([ids]), mx.array(pixels), image_grid_thw=grids)
    fields = ("inputs_embeds", "position_ids", "visual_pos_masks", "deepstack_visual_embeds")
    states = reference.language_model.model(mx.array([ids]), **{name: getattr(given, name) for name in fields})
    last = np.array(states[0, -1])
    return last / np.linalg.norm(last)


def test_grey_of_16_bits_is_sent_as_it_is_seen() -> None:
    grey = picture(40, 30).convert("L")
    deep = Image.fromarray(np.asarray(grey).astype(np.uint16) * 257)
    assert deep.mode == "I;16"
    sent = Image.open(io.BytesIO(_png(deep)))
    assert np.array_equal(np.asarray(sent), np.asarray(grey.convert("RGB")))
