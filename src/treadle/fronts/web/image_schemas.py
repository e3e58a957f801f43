"""JSON schemas of images in the requests of every dialect: shown for a model that reads them, else left out."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from ..chat_messages import WITH_IMAGES
from ..media.parts import DETAILS, MAX_URL_CHARS, URL_PARTS
from .json_schemas import NULL, STRING, Schema, either, object_of, ref, shape

_PART, _BLOCK = "ImagePart", "AnthropicImageBlock"
_OF_CHATS = {"user": "UserMessage", "tool": "ToolMessage", "function": "FunctionMessage"}
_URL: Schema = {
    "anyOf": [
        {**STRING, "pattern": "^data:[^,]*;base64,"},
        {**STRING, "pattern": "^https?://", "maxLength": MAX_URL_CHARS},
    ],
    "description": "A data URL with the image in base64, or an http(s) URL of a host that the server allows.",
}
_DETAIL: Schema = {"enum": [None, *DETAILS], "description": "`low` shows the image with few tokens."}
_IMAGES: dict[str, Schema] = {
    _PART: shape(
        "An image. Unknown keys are ignored.",
        {"type": {"enum": list(URL_PARTS)}, "image_url": either(_URL, object_of({"url": _URL}, detail=_DETAIL))},
        detail=_DETAIL,
        file_id=NULL,
    ),
    _BLOCK: shape(
        "An image.",
        {
            "type": {"const": "image"},
            "source": either(
                object_of({"type": {"const": "base64"}, "media_type": STRING, "data": STRING}),
                object_of({"type": {"const": "url"}, "url": _URL}),
            ),
        },
    ),
}


def with_images(schemas: dict[str, Any]) -> dict[str, Any]:
    """Return the document's `schemas` with images wherever requests may have them."""
    made = deepcopy(schemas) | _IMAGES
    for role in WITH_IMAGES:
        _allow(made[_OF_CHATS[role]]["properties"]["content"], _PART)
    _allow(made["EmbeddingItem"]["properties"]["content"], _PART)
    _allow(made["AnthropicMessage"]["anyOf"][0]["properties"]["content"], _BLOCK)
    _allow(made["AnthropicToolResultBlock"]["properties"]["content"]["anyOf"][0], _BLOCK)
    for name in ("ResponseRequest", "CompactRequest"):
        _allow_in_items(_array(made[name]["properties"]["input"])["items"]["anyOf"])
    return made


def without_images(schemas: dict[str, Any]) -> dict[str, Any]:
    """Return the document's `schemas` without images in inputs of embeddings."""
    item = deepcopy(schemas["EmbeddingItem"])
    item["properties"]["image"] = {**NULL, "description": "The model reads text only."}
    item["anyOf"] = [form for form in item["anyOf"] if form["required"] != ["image"]]
    return schemas | {"EmbeddingItem": item}


def _allow_in_items(kinds: list[Schema]) -> None:
    """Allow images in messages of the user and in results of calls, among the `kinds` of a response's items."""
    turn = next(kind for kind in kinds if "user" in kind["properties"].get("role", {}).get("enum", ()))
    asked = deepcopy(turn)
    asked["properties"]["role"] = {"const": "user"}
    _allow(asked["properties"]["content"], _PART)
    kinds.append(asked)
    for kind in kinds:
        if "output" in kind["properties"]:
            _allow(kind["properties"]["output"], _PART)


def _allow(content: Schema, part: str) -> None:
    parts = _array(content)
    known = parts["items"].get("anyOf", [parts["items"]])
    parts["items"] = either(*known, ref(part))


def _array(field: Schema) -> Schema:
    """Return the array among the alternatives of a field."""
    found: Schema = next(one for one in field["anyOf"] if one.get("type") == "array")
    return found
