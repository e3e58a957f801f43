"""Values of a request for the model's template (`chat_template_kwargs`): their type, and their checks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import WithJsonSchema

from ...errors import InvalidRequest
from .fields import size

MAX_TEMPLATE_KWARGS = 64
MAX_KWARG_CHARS = 4096
KWARG_NAME = "[A-Za-z][A-Za-z0-9_]{0,63}"
RESERVED_KWARGS = ("messages", "tools", "documents", "add_generation_prompt", "chat_template", "conversation")

KwargValue = Annotated[
    Any,
    WithJsonSchema(
        {"anyOf": [{"type": "string", "maxLength": MAX_KWARG_CHARS}, {"type": ["number", "boolean", "null"]}]}
    ),
]
TemplateKwargs = Annotated[
    dict[str, KwargValue],
    size(
        maxProperties=MAX_TEMPLATE_KWARGS,
        propertyNames={"pattern": f"^{KWARG_NAME}$", "not": {"enum": list(RESERVED_KWARGS)}},
    ),
]
KWARG = re.compile(KWARG_NAME)


def checked_kwargs(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the template's variables in `chat_template_kwargs`. Raises InvalidRequest."""
    if len(given) > MAX_TEMPLATE_KWARGS:
        raise InvalidRequest(
            f"chat_template_kwargs has {len(given)} keys: give at most {MAX_TEMPLATE_KWARGS}",
            param="chat_template_kwargs",
        )
    for key, value in given.items():
        where = f"chat_template_kwargs.{key[:64]}"
        if not KWARG.fullmatch(key) or key in RESERVED_KWARGS:
            raise InvalidRequest(f"chat_template_kwargs may not set '{key[:64]}'", param=where)
        if not isinstance(value, (str, int, float, bool, type(None))):
            raise InvalidRequest(f"{where} must be a string, a number, true, false or null", param=where)
        if isinstance(value, str) and len(value) > MAX_KWARG_CHARS:
            raise InvalidRequest(f"{where} has {len(value)} characters: give at most {MAX_KWARG_CHARS}", param=where)
    return dict(given)
