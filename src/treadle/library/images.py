"""Images of the library's calls: of Pillow, bytes, files and URLs, as parts that the fronts read."""

from __future__ import annotations

import base64
import errno
import io
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from ..errors import InvalidRequest
from ..fronts.field_checks import one_of
from ..fronts.media.needed import MAX_IMAGE_BYTES, too_large
from ..fronts.media.parts import DETAILS, source_of_url
from ..regular_files import read_regular
from ..text.images import ImageSource
from ..text.images.prompt import IMAGE, image_part

PART = ("type", IMAGE, "detail")
_READING = threading.Lock()
"""Held while a file of Pillow is read: two calls may have the same image, and so the same place in its file."""


def needs_reading(messages: Sequence[Any]) -> bool:
    """Whether messages hold images that `with_sources` reads."""
    return any(_is_image(part) for message in messages for part in _parts(message))


def with_sources(messages: Sequence[Any], at: str) -> list[Any]:
    """Return messages with the images in their parts of type "image" read. It may take tens of milliseconds an image.
    Raises InvalidRequest with the place."""
    return [read_message(message, f"{at}[{i}]") for i, message in enumerate(messages)]


def source_of(image: Any, at: str) -> ImageSource:
    """Return the image at `at`: of Pillow, bytes of a file, the path of one, or a URL. Raises InvalidRequest."""
    if isinstance(image, str):
        return source_of_url(image, at)
    if isinstance(image, Path):
        return _of_bytes(_content(image, at), at)
    if isinstance(image, bytes | bytearray | memoryview):
        return _of_bytes(bytes(image), at)
    if _is_pillows(image):
        return _of_pillow(image, at)
    kinds = "an image of Pillow, bytes, a Path, or a URL as a string"
    raise InvalidRequest(f"{at} is a {type(image).__name__}: it must be {kinds}", param=at)


def read_message(message: Any, at: str) -> Any:
    """Return the message at `at` as `with_sources` does."""
    parts = _parts(message)
    if not any(map(_is_image, parts)):
        return message
    return {**message, "content": [_part(part, f"{at}.content[{i}]") for i, part in enumerate(parts)]}


def _parts(message: Any) -> Sequence[Any]:
    content = message.get("content") if isinstance(message, Mapping) else None
    return content if isinstance(content, list | tuple) else ()


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == IMAGE


def _part(part: Any, at: str) -> Any:
    if not _is_image(part):
        return part
    if unknown := part.keys() - set(PART):
        name = min(map(str, unknown))
        raise InvalidRequest(f"{at} has the key {name!r:.80}: known are {', '.join(PART)}", param=at)
    low = one_of(part, "detail", DETAILS, at) == "low"
    return image_part(replace(source_of(part.get(IMAGE), f"{at}.{IMAGE}"), low=low))


def _of_bytes(data: bytes, at: str) -> ImageSource:
    if len(data) > MAX_IMAGE_BYTES:
        raise too_large(at)
    return ImageSource(at, data=base64.b64encode(data).decode())


def _of_pillow(image: Any, at: str) -> ImageSource:
    """Return an image of Pillow: the file that it is in, or else what it shows in PNG, which may be several times as
    large as a file of the same image."""
    data = _file(image)
    if data:
        return _of_bytes(data, at)
    try:
        data = _png(image)
    except InvalidRequest as error:
        raise InvalidRequest(f"{at}: {error.message}", param=at) from None
    return ImageSource(at, data=base64.b64encode(data).decode(), any_size=True)


def _content(path: Path, at: str) -> bytes:
    try:
        return read_regular(path, MAX_IMAGE_BYTES)
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise too_large(at) from None
        raise InvalidRequest(f"{at} can't be read: {error}", param=at) from None


def _is_pillows(image: Any) -> bool:
    pillow = _pillow()
    return pillow is not None and isinstance(image, pillow.Image)


def _pillow() -> Any:
    """Return Pillow's module of images; None where nobody has imported it, and so nobody has an image of it."""
    return sys.modules.get("PIL.Image")


def _file(image: Any) -> bytes:
    """Return the bytes of the file that an image of Pillow is in; none where it has been decoded, and its pixels may
    differ from the file's since, where something else of it was changed, or where files like it are not read."""
    from ..media.decode import FORMATS

    if image.format not in (*FORMATS, "MPO") or getattr(image, "_im", image) is not None or image.tell():
        return b""
    try:
        with _READING:
            data = _whole(image.fp)
        return data if data and _form(image) == _form(_pillow().open(io.BytesIO(data), formats=FORMATS)) else b""
    except Exception:  # a closed or damaged file, of which decoding tells more
        return b""


def _whole(file: Any) -> bytes:
    """Return the bytes of an open file, which stays where it is; none where they are more than a file may have."""
    place = file.tell()
    try:
        file.seek(0)
        data: bytes = file.read(MAX_IMAGE_BYTES + 1)
    finally:
        file.seek(place)
    return data if len(data) <= MAX_IMAGE_BYTES else b""


def _form(image: Any) -> tuple[Any, ...]:
    """Return what can be changed of an image before it is decoded: its size, its mode and its EXIF data."""
    # Pillow decodes a PNG to find EXIF data behind the pixels: such data was not seen, and so not changed
    exif = {} if image.format == "PNG" and "exif" not in image.info else dict(image.getexif())
    return image.size, image.mode, exif


def _png(image: Any) -> bytes:
    """Return an image of Pillow as it is seen, in PNG, which loses nothing of RGB. Raises InvalidRequest."""
    from ..media.decode import decode

    out = io.BytesIO()
    decode(image).save(out, "PNG", compress_level=1)
    return out.getvalue()
