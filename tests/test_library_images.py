"""Images in `treadle.Engine`, over a real tower and real image processes: tokens and vectors are mlx-vlm's."""

from __future__ import annotations

import base64
import io
import os
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
from treadle.fronts.media.needed import MAX_IMAGE_BYTES, needed_image
from treadle.library.images import _png, source_of, with_sources
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


def closed() -> Image.Image:
    image = Image.open(io.BytesIO(DATA))
    image.close()
    return image


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
    (Image.new("RGB", (0, 5)), r"prompt\[0\].content\[0\].image: the image has no pixels"),
    (closed(), r"prompt\[0\].content\[0\].image: the image is damaged"),
    (bytes((20 << 20) + 1), "over 20 MiB"),
    (Path("nowhere.png"), "can't be read"),
    ("picture.png", "no URL of an image"),
    ("https://example.com/a.png", "the server fetches none"),
]


def test_detail_of_a_part_is_read_and_other_keys_are_refused() -> None:
    def read(**more: Any) -> Any:
        (message,) = with_sources([{"role": "user", "content": [part(DATA) | more]}], "prompt")
        return message["content"][0]["image"]

    assert [read(**more).low for more in ({}, {"detail": None}, {"detail": "high"})] == [False] * 3
    assert read(detail="low").low
    for more, words, at in (
        ({"detail": "nonsense"}, "is 'nonsense': it must be one of auto, low", ".detail"),
        ({"detail": 5}, "it must be one of", ".detail"),
        ({"details": "low"}, "has the key 'details': known are type, image, detail", ""),
    ):
        with pytest.raises(InvalidRequest, match=words) as caught:
            read(**more)
        assert caught.value.param == "prompt[0].content[0]" + at


def test_a_path_is_read_up_to_the_limit_whatever_its_size_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe, which has no end before its writer's, and a file that grows while it is read."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InvalidRequest, match=r"at can't be read: .*not a regular file"):
        source_of(tmp_path / "pipe", "at")
    (tmp_path / "grown").write_bytes(DATA)
    monkeypatch.setattr("treadle.library.images.MAX_IMAGE_BYTES", len(DATA) - 1)
    monkeypatch.setattr(Path, "stat", lambda self: SimpleNamespace(st_size=0))
    with pytest.raises(InvalidRequest, match="at is an image of over 20 MiB"):
        source_of(tmp_path / "grown", "at")


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


def sent(image: Any) -> bytes:
    return base64.b64decode(source_of(image, "at").data)


def of(data: bytes, form: str, **options: Any) -> bytes:
    out = io.BytesIO()
    Image.open(io.BytesIO(data)).save(out, form, **options)
    return out.getvalue()


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_an_image_that_was_only_opened_is_sent_as_its_file(form: str, tmp_path: Path) -> None:
    data = of(DATA, form)
    (tmp_path / "picture").write_bytes(data)
    in_memory = Image.open(io.BytesIO(data))
    assert [sent(in_memory), sent(in_memory)] == [data, data]
    with Image.open(tmp_path / "picture") as opened:
        assert sent(opened) == data
        pixels = np.asarray(opened.convert("RGB"))
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(data)).convert("RGB")), pixels)


def turned(image: Image.Image) -> None:
    image.getexif()[0x0112] = 3


def smaller(image: Image.Image) -> None:
    image.draft("L", (12, 8))


def painted(image: Image.Image) -> None:
    image.paste((255, 0, 0), (0, 0, 8, 8))


@pytest.mark.parametrize("change", [turned, smaller, painted])
def test_a_change_of_an_opened_image_is_sent(change: Any) -> None:
    data, exif = of(DATA, "JPEG"), Image.Exif()
    exif[0x0112] = 6
    for one in (data, of(data, "JPEG", exif=exif)):
        changed, seen = Image.open(io.BytesIO(one)), Image.open(io.BytesIO(one))
        change(changed)
        change(seen)
        expected = decode(seen)
        found = Image.open(io.BytesIO(sent(changed)))
        assert found.format == "PNG"
        assert np.array_equal(np.asarray(found), np.asarray(expected))


def test_images_of_other_files_are_sent_as_they_are_seen(tmp_path: Path) -> None:
    """Another format, a later frame, and a file that is over the limit, as its image is not in PNG."""
    frames = [picture(40, 30, seed) for seed in (1, 2)]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    with Image.open(tmp_path / "a.gif") as later, Image.open(io.BytesIO(of(DATA, "TIFF"))) as other:
        later.seek(1)
        for given in (later, other):
            found = Image.open(io.BytesIO(sent(given)))
            assert found.format == "PNG"
            assert np.array_equal(np.asarray(found), np.asarray(given.convert("RGB")))
    Image.new("RGB", (3000, 2500)).save(tmp_path / "a.bmp")
    with pytest.raises(InvalidRequest, match="over 20 MiB"):
        source_of(tmp_path / "a.bmp", "at")
    with Image.open(tmp_path / "a.bmp") as large:
        assert sent(large)[:4] == b"\x89PNG"


def test_the_limit_of_files_is_not_for_the_png_that_is_made_of_an_image() -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (2700, 2700, 3), dtype=np.uint8))
    made = needed_image(source_of(noise, "at"))
    assert len(made.data) > MAX_IMAGE_BYTES
    assert Image.open(io.BytesIO(made.data)).size == noise.size
