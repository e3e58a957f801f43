"""Parser of a JSON object into a request's shape, with a refusal that names the first field at fault."""

from __future__ import annotations

import difflib
import math
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from ...errors import InvalidRequest

Body = TypeVar("Body", bound=BaseModel)

EXPECTED = {
    "string_type": "a string",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "an array",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}
REPLACEMENTS = {
    "max_length": "max_tokens, for the answer alone",
    "num_return_sequences": "n",
    "stop_sequences": "stop",
    "do_sample": "temperature, 0 for greedy",
    "system": "messages, with a first one of role 'system'",
}
"""Other servers' fields without a direct equivalent, with their replacements."""
EQUIVALENTS = {"max_tokens": "max_output_tokens"}
"""Fields whose equivalent, on routes that have it, is not the field with the nearest name."""
ROUTES = {"messages": "/v1/chat/completions", "prompt": "/v1/completions", "input": "/v1/responses"}
"""The field that holds the text of a request, with the route that takes it: each route takes one of them."""


def read(shape: type[Body], value: dict[str, Any]) -> Body:
    """Validate the body as `shape`. Raises InvalidRequest that names the first field at fault."""
    try:
        return shape.model_validate(value)
    except ValidationError as error:
        raise _refusal(shape, value, error.errors(include_url=False)) from None


def _refusal(shape: type[BaseModel], value: dict[str, Any], details: list[ErrorDetails]) -> InvalidRequest:
    """Build the refusal from the deepest complaint, which is about the intended alternative; `loc` also holds the names
    of alternatives."""
    first = [d for d in details if d["loc"][:1] == details[0]["loc"][:1]]
    worst = max(first, key=lambda d: len(_path(d, value)))
    path = _path(worst, value)
    if worst["type"] == "extra_forbidden":
        return InvalidRequest(f"unknown field '{path}'{_instead(shape, path)}", param=path)
    if worst["type"] == "missing":
        other = next((name for name in ROUTES if path in ROUTES and name in value), None)
        cure = f"'{other}' is a field of {ROUTES[other]}" if other else "it must be given"
        return InvalidRequest(f"{path} is missing: {cure}", param=path)
    expected = " or ".join(dict.fromkeys(_expected(d) for d in first if _path(d, value) == path))
    return InvalidRequest(f"{path} is {_describe(worst['input'])}: it must be {expected}", param=path)


def _path(detail: ErrorDetails, value: Any) -> str:
    """Return the field at fault, found by following `loc` into `value`: other parts of `loc` name alternatives."""
    path = ""
    for part in detail["loc"]:
        if isinstance(part, int) and isinstance(value, list):
            path, value = f"{path}[{part}]", value[part]
        elif isinstance(part, str) and isinstance(value, dict) and (part in value or detail["type"] == "missing"):
            path, value = f"{path}.{part[:80]}" if path else part[:80], value.get(part)
    return path


def _instead(shape: type[BaseModel], path: str) -> str:
    parent, _, name = path.rpartition(".")
    if not parent and name in REPLACEMENTS:
        return f": use {REPLACEMENTS[name]}"
    if not parent and name in ROUTES:
        own = " or ".join(f"'{field}'" for field in ROUTES if field in shape.model_fields)
        return f": it is a field of {ROUTES[name]}; here use {own}"
    fields = list(_object_shape(shape, parent).model_fields)
    equivalent = EQUIVALENTS.get(name)
    near = [equivalent] if equivalent in fields else difflib.get_close_matches(name, fields, n=1)
    return f"; did you mean '{near[0]}'?" if near else ": leave it out"


def _object_shape(shape: type[BaseModel], name: str) -> type[BaseModel]:
    """Return the shape of an object field (`options`, `stream_options`); the request's own if `name` is empty."""
    if name not in shape.model_fields:
        return shape
    kinds = getattr(shape.model_fields[name].annotation, "__args__", ())
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), shape)


def _expected(detail: ErrorDetails) -> str:
    if detail["type"] == "literal_error":
        return str(detail["ctx"]["expected"])
    return EXPECTED.get(detail["type"], detail["msg"].lower())


def _describe(value: Any) -> str:
    if isinstance(value, str):
        return f"the string '{value[:40]}'" + ("" if len(value) <= 40 else " (cut)")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return f"{value}" if value.bit_length() <= 128 else "a number of more than 128 bits"
    if isinstance(value, float) and math.isinf(value):
        return f"{value}"
    names = {float: "a fraction", list: "an array", dict: "an object", type(None): "null"}
    return names.get(type(value), type(value).__name__)
