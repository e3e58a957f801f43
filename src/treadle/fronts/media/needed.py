"""Images that a prompt needs: from a text worker, which reads them out of a body, to the server."""

from __future__ import annotations

import base64
import binascii

import msgspec

from ...errors import InvalidRequest
from ...text.images import ImageSource

MAX_IMAGE_BYTES = 20 << 20
MAX_BASE64_CHARS = MAX_IMAGE_BYTES * 4 // 3 + 4


class NeededImage(msgspec.Struct, frozen=True, array_like=True):
    """An image at `at` in the request: its bytes, or the URL that it is at. `key` is that of its source."""

    at: str
    key: bytes
    data: bytes
    media_type: str
    url: str
    low: bool


def needed_image(source: ImageSource) -> NeededImage:
    """Decode the base64 of an image. Raises InvalidRequest."""
    data = b"" if source.url else _decoded(source)
    return NeededImage(source.at, source.key, data, source.media_type, source.url, source.low)


def _decoded(source: ImageSource) -> bytes:
    written = source.data
    if len(written) > MAX_BASE64_CHARS and not source.any_size:
        written = "".join(written.split())
        if len(written) > MAX_BASE64_CHARS:
            raise too_large(source.at)
    try:
        data = base64.b64decode(written, validate=True)
    except (binascii.Error, ValueError):
        data = _loosely_decoded(source)
    if not data:
        raise InvalidRequest(f"{source.at} is an empty image: send its bytes in base64", param=source.at)
    return data


def _loosely_decoded(source: ImageSource) -> bytes:
    """Decode base64 with line breaks, as files have it, or without padding, as browsers do."""
    written = "".join(source.data.split())
    try:
        return base64.b64decode(written + "=" * (-len(written) % 4), validate=True)
    except (binascii.Error, ValueError):
        message = f"{source.at} is not base64: encode the image's bytes in its standard alphabet"
        raise InvalidRequest(message, param=source.at) from None


def too_large(at: str) -> InvalidRequest:
    """Return the refusal of an image of too many bytes."""
    return InvalidRequest(f"{at} is an image of over {MAX_IMAGE_BYTES >> 20} MiB: send a smaller one", param=at)
