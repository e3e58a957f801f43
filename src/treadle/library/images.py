"""Images of the library's calls: of Pillow, bytes, files and URLs, as parts that the fronts read."""

from __future__ import annotations

import base64
import io
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import InvalidRequest
from ..fronts.media.needed import MAX_IMAGE_BYTES, too_large
from ..fronts.media.parts import source_of_url
from ..text.images import ImageSource
from ..text.images.prompt import IMAGE, image_part


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
        return _of_bytes(_png(image), at)
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
    return image_part(source_of(part.get(IMAGE), f"{at}.{IMAGE}")) if _is_image(part) else part


def _of_bytes(data: bytes, at: str) -> ImageSource:
    if len(data) > MAX_IMAGE_BYTES:
        raise too_large(at)
    return ImageSource(at, data=base64.b64encode(data).decode())


def _content(path: Path, at: str) -> bytes:
    try:
        if path.stat().st_size > MAX_IMAGE_BYTES:
            raise too_large(at)
        return path.read_bytes()
    except OSError as error:
        raise InvalidRequest(f"{at} can't be read: {error}", param=at) from None


def _is_pillows(image: Any) -> bool:
    pillow: Any = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(image, pillow.Image)


def _png(image: Any) -> bytes:
    """Return an image of Pillow as it is seen, in PNG, which loses nothing of RGB."""
    from ..media.decode import decode

    out = io.BytesIO()
    decode(image).save(out, "PNG", compress_level=1)
    return out.getvalue()
