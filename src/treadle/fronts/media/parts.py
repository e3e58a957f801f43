"""Readers of image parts, for every dialect: from a part of a message to an `ImageSource`. Nothing is decoded here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import ContextLengthExceeded, InvalidRequest, UnsupportedParameter, beyond_context
from ...text.images import AnySettings, ImageSource
from ..field_checks import checked, one_of, require_type
from ..validate import Limits, check_size

URL_PARTS = ("image_url", "input_image")
"""Types of OpenAI's image parts, of chats and of responses. Each is read in both."""
DETAILS = ("auto", "low", "high", "original")
MAX_URL_CHARS = 8192
_REFERENCES = ("a data: URL with the image in base64", "an http(s) URL of a host that the server allows")


def read_url_part(part: Mapping[str, Any], at: str) -> ImageSource:
    """Read an `image_url` or `input_image` part at `at`."""
    if part.get("file_id") is not None:
        place = f"{at}.file_id"
        raise UnsupportedParameter(f"{place} is not supported here: send the image in image_url", param=place)
    given, place = part.get("image_url"), f"{at}.image_url"
    detail = one_of(part, "detail", DETAILS, at)
    if isinstance(given, Mapping):
        detail = one_of(given, "detail", DETAILS, place) or detail
        given, place = checked(given, "url", str, "a string", place), f"{place}.url"
    if given is None:
        raise InvalidRequest(f"{place} is missing: give {_REFERENCES[0]}, or {_REFERENCES[1]}", param=place)
    require_type(given, str, "a URL as a string", place)
    return source_of_url(given, place, low=detail == "low")


def source_of_url(url: str, at: str, *, low: bool = False) -> ImageSource:
    """Return the image that a URL names. Raises InvalidRequest for one that is neither data nor http(s)."""
    scheme = url[:8].lower()
    if scheme.startswith("data:"):
        return _source_of_data(url, at, low)
    if not scheme.startswith(("http://", "https://")):
        raise InvalidRequest(f"{at} is no URL of an image: give {_REFERENCES[0]}, or {_REFERENCES[1]}", param=at)
    if len(url) > MAX_URL_CHARS:
        raise InvalidRequest(f"{at} has {len(url)} characters: give a URL of at most {MAX_URL_CHARS}", param=at)
    return ImageSource(at, url=url, low=low)


def _source_of_data(url: str, at: str, low: bool) -> ImageSource:
    header, comma, data = url.partition(",")
    if not comma or not header.lower().endswith(";base64"):
        raise InvalidRequest(f"{at} is no data URL in base64: write it as data:image/png;base64,...", param=at)
    return ImageSource(at, data=data, media_type=header[len("data:") : -len(";base64")][:128], low=low)


def check_images(places: Sequence[str], settings: AnySettings | None, reason: str, context: int) -> None:
    """Refuse the images at `places` before anything is done with them: by a model that reads none, for `reason`, and
    more than the context can hold. Raises UnsupportedParameter and ContextLengthExceeded."""
    if not places:
        return
    if settings is None or reason:
        raise UnsupportedParameter(f"{places[0]} is an image, and {reason}: leave it out", param=places[0])
    least = settings.least_tokens * len(places)
    if least > context:
        raise ContextLengthExceeded(
            beyond_context(context, f"your {len(places)} images have at least {least} tokens. Please send fewer."),
            param=places[0],
        )


def size_with_images(
    size: int, images: int, settings: AnySettings | None, limits: Limits, param: str, prompts: int = 1
) -> int:
    """Return about how many tokens prompts have: `size` of text, and what `images` of them have at least, as they may
    all be small; no more than the contexts hold beside a token of each answer. Raises ContextLengthExceeded as
    `check_size` does, for prompts that are too long even so."""
    if settings is None or not images:
        check_size(size, prompts, limits, param)
        return size
    size += settings.least_tokens * images
    check_size(size, prompts, limits, param)
    return min(size, (limits.context - 1) * prompts)
