"""OpenAI's `prediction`: text that the client expects in the answer, a source of drafts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import InvalidRequest
from .chat_messages import MAX_PARTS
from .field_checks import checked, one_of, require_array, require_type

PARAM = "prediction"
TYPE = "content"
TEXT = "text"
_SHAPE = 'an object, {"type": "content", "content": "..."}'


def read_prediction(value: Any) -> str | None:
    """Return the expected text; None where the field is null. Raises InvalidRequest with the place."""
    if value is None:
        return None
    require_type(value, Mapping, _SHAPE, PARAM)
    for name in value:
        if name not in ("type", "content"):
            raise InvalidRequest(f"{PARAM}.{name[:80]} is unknown: give {_SHAPE}", param=PARAM)
    if one_of(value, "type", (TYPE,), PARAM) is None:
        raise InvalidRequest(f"{PARAM}.type is missing: give '{TYPE}'", param=f"{PARAM}.type")
    content, place = value.get("content"), f"{PARAM}.content"
    if isinstance(content, str):
        return content
    require_array(content, place, "part", MAX_PARTS, expected="a string or an array of text parts", may_be_empty=True)
    return "".join(_text_of(part, f"{place}[{i}]") for i, part in enumerate(content))


def _text_of(part: Any, at: str) -> str:
    require_type(part, Mapping, "an object with a type and a text", at)
    one_of(part, "type", (TEXT,), at)
    text = checked(part, TEXT, str, "a string", at)
    if text is None or part.get("type") is None:
        missing = "type" if part.get("type") is None else TEXT
        raise InvalidRequest(f"{at}.{missing} is missing: give a part of type '{TEXT}'", param=f"{at}.{missing}")
    return str(text)
