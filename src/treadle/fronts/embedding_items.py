"""Inputs of embeddings that are objects: a text, an image, or both, as one message of the user."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..errors import InvalidRequest
from ..text.images import ImageSource
from ..text.images.prompt import image_part
from .chat_messages import read_turn
from .field_checks import checked, require_type
from .media.parts import source_of_url

SCHEMES = ("data:", "http:", "https:")
USER = "user"


def source_of_text(image: Any, at: str) -> ImageSource:
    """Return the image that a URL names, or that a string in base64 is."""
    require_type(image, str, "a string", at)
    return source_of_url(image, at) if image[:6].lower().startswith(SCHEMES) else ImageSource(at, data=image)


def read_item(
    item: Mapping[str, Any], at: str, source_of: Callable[[Any, str], ImageSource] = source_of_text
) -> dict[str, Any]:
    """Return the turn of the input at `at`: its `image`, which `source_of` reads, with its `text` behind it, or its
    `content`, as a message of a chat has it. Raises as `chat_messages.read_turns` does."""
    text, image = checked(item, "text", str, "a string", at), item.get("image")
    content = item.get("content")
    if content is not None and (text or image is not None):
        raise InvalidRequest(f"{at} has content besides text or image: give either", param=at)
    if content is not None:
        return read_turn({"role": USER, "content": content}, at)
    if not text and image is None:
        raise InvalidRequest(f"{at} is empty: give text, image or both", param=at)
    parts = [] if image is None else [image_part(source_of(image, f"{at}.image"))]
    return {"role": USER, "content": parts + ([{"type": "text", "text": text}] if text else [])}
