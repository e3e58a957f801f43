"""Checks of values in nested objects of a request, and names of their types for refusals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import InvalidRequest


def checked(given: Mapping[str, Any], key: str, kind: type, expected: str, at: str) -> Any:
    """Return a member of the object at `at` ("": the request itself), None where it is missing or null. Raises
    InvalidRequest for another type than `kind`."""
    value = given.get(key)
    if value is not None and not isinstance(value, kind):
        place = f"{at}.{key}" if at else key
        raise InvalidRequest(f"{place} is {kind_of(value)}: it must be {expected}", param=place)
    return value


def kind_of(value: Any) -> str:
    """Return the name of a value's JSON type, with an article."""
    names: dict[type, str] = {str: "a string", bool: "true or false", int: "a number", float: "a number"}
    return names.get(type(value)) or ("null" if value is None else _kind_of_many(value))


def _kind_of_many(value: Any) -> str:
    if isinstance(value, Mapping):
        return "an object"
    return "an array" if isinstance(value, (list, tuple)) else f"a {type(value).__name__}"
