"""Decoding of images: what the bytes are counts, limits hold before decoding, and each fault has its own words."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import ExifTags, Image, ImageOps

from tests.media.pictures import animated, claimed_png, encoded, picture, png
from treadle.errors import InvalidRequest
from treadle.media.decode import decode, open_image, upright_size
from treadle.media.jpeg_scans import MOST_SCANS, has_too_many_scans

MOST = 1 << 20


def decoded(data: bytes, media_type: str = "") -> Image.Image:
    return decode(open_image(data, media_type, MOST))


def same(image: Image.Image, other: Image.Image) -> bool:
    return image.mode == other.mode and np.array_equal(np.asarray(image), np.asarray(other))


@pytest.mark.parametrize(
    ("kind", "options", "media_type"),
    [
        ("PNG", {}, "image/png"),
        ("WEBP", {"lossless": True}, "image/webp"),
        ("BMP", {}, "image/bmp"),
        ("JPEG", {"quality": 95}, "image/jpg"),
        ("GIF", {}, "image/gif; charset=binary"),
        ("PNG", {}, ""),
        ("PNG", {}, "application/octet-stream"),
        ("MPO", {"save_all": True}, "image/jpeg"),
    ],
)
def test_formats_are_read_to_rgb(kind: str, options: dict[str, Any], media_type: str) -> None:
    drawn = picture(40, 30)
    found = decoded(encoded(drawn, kind, **options), media_type)
    assert (found.size, found.mode) == ((40, 30), "RGB")
    if kind in ("PNG", "WEBP", "BMP"):
        assert same(found, drawn)
    else:
        assert np.abs(np.asarray(found, int) - np.asarray(drawn, int)).mean() < 30


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "I;16"])
def test_other_modes_become_rgb(mode: str) -> None:
    image = Image.new(mode, (5, 4))
    kind = "JPEG" if mode == "CMYK" else "PNG"
    assert decoded(encoded(image, kind)).mode == "RGB"


def test_grey_of_16_bits_is_that_of_8_bits() -> None:
    grey = picture(40, 30).convert("L")
    deep = Image.fromarray(np.asarray(grey).astype(np.uint16) * 257)
    assert deep.mode == "I;16"
    assert same(decoded(encoded(deep)), grey.convert("RGB"))


def test_levels_of_32_bits_are_those_of_8_bits_but_in_a_png() -> None:
    """In the mode for these older releases of Pillow open a grey PNG of 16 bits."""
    grey = picture(40, 30).convert("L")
    wide = grey.convert("I")
    assert same(decode(wide), grey.convert("RGB"))
    opened = Image.fromarray(np.asarray(grey).astype(np.int32) * 257)
    opened.format = "PNG"
    assert same(decode(opened), grey.convert("RGB"))


def test_multiplied_transparency_is_dropped_as_any() -> None:
    grey = picture(40, 30).convert("LA")
    assert same(decode(grey.convert("La")), grey.convert("RGB"))


def with_chunk(name: bytes, data: bytes, at: int) -> bytes:
    """A PNG with another chunk, in front of its pixels or behind them."""
    whole = png()
    place = whole.index((b"IDAT", b"IEND")[at]) - 4
    chunk = struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
    return whole[:place] + chunk + whole[place:]


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("name", [b"zTXt", b"iCCP", b"iTXt"])
def test_metadata_over_the_limit_is_no_damage(name: bytes, at: int) -> None:
    head = b"a\0\1\0\0\0" if name == b"iTXt" else b"a\0\0"
    data = with_chunk(name, head + zlib.compress(bytes(2 << 20)), at)
    with pytest.raises(InvalidRequest, match="more metadata than is read here: save it without its metadata"):
        decoded(data)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_of_an_animation_the_first_frame_counts(kind: str) -> None:
    first, second = (decoded(animated(kind, seed)) for seed in (1, 2))
    found = decoded(animated(kind, 1, 2, 3))
    distances = [np.abs(np.asarray(found, int) - np.asarray(other, int)).mean() for other in (first, second)]
    assert distances[0] < distances[1]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_turned_upright_by_their_exif(orientation: int) -> None:
    drawn = picture(20, 10)
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    turns = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_270,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_90,
    }
    expected = drawn.transpose(turns[orientation]) if orientation in turns else drawn
    opened = open_image(encoded(drawn, exif=exif), "", MOST)
    assert upright_size(opened) == expected.size
    assert same(decode(opened), expected)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_an_entry_of_another_type_does_not_keep_an_image_from_being_turned(kind: str) -> None:
    """Orientation, and a maker whose name is a fraction."""
    entries = struct.pack("<HHIHH", ExifTags.Base.Make, 5, 1, 38, 0) + struct.pack("<HHIHH", 0x0112, 3, 1, 6, 0)
    exif = b"Exif\0\0II*\0" + struct.pack("<IH", 8, 2) + entries + bytes(4) + struct.pack("<II", 1, 3)
    data = encoded(picture(20, 10), kind, exif=exif)
    with pytest.raises((AttributeError, struct.error)):
        ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    assert decoded(data).size == (10, 20)


def test_exif_that_can_not_be_read_turns_nothing() -> None:
    data = encoded(picture(20, 10), exif=b"Exif\0\0II*\0\xff\xff\xff\x7fgarbage")
    assert decoded(data).size == (20, 10)


TORN = png(64, 64)
GIF = encoded(picture(30, 30), "GIF")


@pytest.mark.parametrize(
    ("data", "media_type", "words"),
    [
        (b"", "", "empty"),
        (b"hello", "", "not an image that can be read here: send PNG, JPEG"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "", "not an image"),
        (encoded(picture(8, 8), "TIFF"), "", "not an image"),
        (encoded(picture(8, 8), "ICO"), "", "not an image"),
        (png(), "image/jpeg", "said to be image/jpeg, and its bytes are PNG"),
        (encoded(picture(8, 8), "JPEG"), "image/png", "said to be image/png, and its bytes are JPEG"),
        (png(), "image/svg+xml", r"media type 'image/svg\+xml' is not read here"),
        (png(), "text/html", "media type 'text/html'"),
        (claimed_png(100_000, 100_000), "", "100000 x 100000 pixels and 1048576 are read here at most"),
        (claimed_png(0, 5), "", r"not an image|damaged|no pixels"),
        (claimed_png(2000, 500), "", "damaged"),
        (TORN[: len(TORN) // 2], "", "damaged"),
        (GIF[:-40], "", "damaged"),
        (TORN[:20], "", r"damaged|not an image"),
    ],
)
def test_what_can_not_be_used_is_refused_in_its_own_words(data: bytes, media_type: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        decoded(data, media_type)
    assert "\n" not in caught.value.message


def test_nothing_is_decoded_of_an_image_over_the_limit() -> None:
    """The header alone is read: a megabyte of zeros stays as it is."""
    data = claimed_png(2000, 2000) + zlib.compress(bytes(1 << 20))
    with pytest.raises(InvalidRequest, match="2000 x 2000"):
        open_image(data, "", MOST)


def test_damage_at_random_places_is_a_refusal_or_an_image() -> None:
    random = np.random.default_rng(5)
    files = [encoded(picture(24, 24), kind) for kind in ("PNG", "JPEG", "GIF", "WEBP", "BMP")]
    outcomes = set()
    for _ in range(200):
        data = bytearray(files[random.integers(len(files))])
        for place in random.integers(0, len(data), 3):
            data[place] = random.integers(256)
        try:
            outcomes.add(decoded(bytes(data)).mode)
        except InvalidRequest as error:
            outcomes.add(type(error).__name__)
    assert outcomes == {"RGB", "InvalidRequest"}


def test_damaged_pixels_of_png_are_refused_where_pillow_refuses_them() -> None:
    """Its EXIF data may stand behind the pixels, and reading these to get there must not hide what is wrong with
    them."""
    whole, refused = png(64, 64), 0
    for place in range(60, len(whole) - 20, 97):
        data = bytearray(whole)
        data[place] ^= 0x55
        with Image.open(io.BytesIO(bytes(data))) as alone:
            try:
                alone.load()
            except (OSError, SyntaxError):
                refused += 1
                with pytest.raises(InvalidRequest, match="is damaged"):
                    upright_size(open_image(bytes(data), "", MOST))
                with pytest.raises(InvalidRequest, match="is damaged"):
                    decoded(bytes(data))
    assert refused > 5


def test_memory_errors_are_not_taken_for_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: Any, **options: Any) -> Any:
        raise MemoryError

    opened = open_image(png(), "", MOST)
    monkeypatch.setattr(opened, "load", fails)
    with pytest.raises(MemoryError):
        decode(opened)
    monkeypatch.setattr(opened, "getexif", fails)
    with pytest.raises(MemoryError):
        upright_size(opened)
    monkeypatch.setattr(Image, "open", fails)
    with pytest.raises(MemoryError):
        open_image(png(), "", MOST)


START, SCAN, END = b"\xff\xd8", b"\xff\xda\0\x08data\0\0", b"\xff\xd9"
MANY = SCAN * (MOST_SCANS + 1)


def progressive(more: int) -> bytes:
    """A JPEG with its last scan `more` times again: each is a pass over all its pixels, for a few bytes."""
    data = encoded(Image.new("L", (64, 64), 90), "JPEG", progressive=True)
    last = data.rindex(b"\xff\xda")
    return data[:-2] + data[last:-2] * more + data[-2:]


def test_a_jpeg_of_very_many_scans_is_refused_before_it_is_decoded() -> None:
    own = progressive(0).count(b"\xff\xda")
    assert decoded(progressive(MOST_SCANS - own)).size == (64, 64)
    with pytest.raises(InvalidRequest, match="over 100 scans, as no encoder writes them: save it again"):
        open_image(progressive(MOST_SCANS - own + 1), "", MOST)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (START + MANY + END, True),
        (START + SCAN * MOST_SCANS + END, False),
        (START + SCAN + END + MANY, False),  # a video behind a photo
        (START + b"\xff\xe1" + (len(MANY) + 2).to_bytes(2) + MANY + SCAN + END, False),  # metadata
        (START + SCAN + b"\xff\x00\xff\xd3\xff\x02\xff\xff" + MANY, True),  # what looks like a segment within a scan
        (START + b"\xff\xff\xff\xfe\0\0" + MANY, True),
        (START + b"\xff\xe1\xff\xff" + MANY, False),
        (START + b"\xff\xda" * (MOST_SCANS + 1), False),
    ],
)
def test_scans_are_counted_as_a_decoder_comes_upon_them(data: bytes, expected: bool) -> None:
    assert has_too_many_scans(data) is expected
