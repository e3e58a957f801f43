"""Checks of values in a request's objects, and their words in refusals."""

from __future__ import annotations

from collections.abc import Collection, Mapping
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


def require_type(value: Any, kind: type | tuple[type, ...], expected: str, at: str) -> None:
    """Raise InvalidRequest where the value at `at` has another type than `kind`."""
    if not isinstance(value, kind):
        raise InvalidRequest(f"{at} is {kind_of(value)}: it must be {expected}", param=at)


def require_array(
    value: Any, at: str, unit: str, most: int, *, expected: str | None = None, may_be_empty: bool = False
) -> None:
    """Raise InvalidRequest where the value at `at` is no array, or has no `unit`, or more than `most`."""
    require_type(value, (list, tuple), expected or f"an array of {unit}s", at)
    if not value and not may_be_empty:
        raise InvalidRequest(f"{at} is empty: give at least one {unit}", param=at)
    if len(value) > most:
        raise InvalidRequest(f"{at} has {len(value)} {unit}s: give at most {most}", param=at)


def one_of(given: Mapping[str, Any], key: str, known: Collection[str], at: str) -> str | None:
    """Return a member of the object at `at` ("": the request itself), None where it is missing or null. Raises
    InvalidRequest for a value that is not `known`."""
    value, place = given.get(key), f"{at}.{key}" if at else key
    if value is not None and value not in known:
        raise InvalidRequest(f"{place} is {quoted(value)}: it must be one of {', '.join(known)}", param=place)
    return value


def quoted(value: Any, most: int = 40) -> str:
    """Return a string in quotes, cut after `most` characters; of another value the name of its type."""
    return f"'{value[:most]}'" if isinstance(value, str) else kind_of(value)


def kind_of(value: Any) -> str:
    """Return the name of a value's JSON type, with an article."""
    names: dict[type, str] = {str: "a string", bool: "true or false", int: "a number", float: "a number"}
    return names.get(type(value)) or ("null" if value is None else _kind_of_many(value))


def _kind_of_many(value: Any) -> str:
    if isinstance(value, Mapping):
        return "an object"
    return "an array" if isinstance(value, (list, tuple)) else f"a {type(value).__name__}"
