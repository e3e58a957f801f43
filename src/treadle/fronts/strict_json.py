"""Strict JSON parser of request bodies: on the event loop for small ones, in text workers for large ones."""

from __future__ import annotations

import codecs
import json
from typing import Any

from ..errors import InvalidRequest

MAX_KEYS = 4096
MAX_BRACKETS = 500_000
MAX_VALUES = 4_000_000
MAX_DEPTH = 500
"""Arrays and objects in one another: half of what Python's encoders can write again."""
INLINE_BYTES = 64 * 1024
INLINE_VALUES = 2048
"""Parsing and checking this number of values takes the event loop about a millisecond."""
TOO_DEEP = "the body's JSON is nested too deeply: flatten it"


def is_small(body: bytes) -> bool:
    """Whether the event loop may parse the body. Values are counted before parsing, as a short body may hold many."""
    if len(body) > INLINE_BYTES:
        return False
    return sum(map(body.count, (b",", b"[", b"{"))) <= INLINE_VALUES


def parse_json(body: bytes) -> dict[str, Any]:
    """Parse the body's JSON object strictly: UTF-8, no NaN, no duplicate keys, no lone surrogates. A byte order mark
    before it is ignored, as RFC 8259 allows. Raises InvalidRequest."""
    body = body.removeprefix(codecs.BOM_UTF8)
    if not body.strip():
        raise InvalidRequest("the request has no body: send a JSON object")
    if len(body) > MAX_BRACKETS and body.count(b"[") + body.count(b"{") > MAX_BRACKETS:
        raise InvalidRequest(f"the body has over {MAX_BRACKETS} arrays and objects: send less at a time")
    if len(body) > MAX_VALUES and body.count(b",") > MAX_VALUES:
        raise InvalidRequest(f"the body has over {MAX_VALUES} values: send less at a time")
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_no_constant, object_pairs_hook=_unique)
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not valid UTF-8 (byte {error.start}): encode it as UTF-8") from error
    except json.JSONDecodeError as error:
        raise InvalidRequest(
            f"the body is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        ) from error
    except RecursionError as error:
        raise InvalidRequest(TOO_DEEP) from error
    except ValueError as error:
        raise InvalidRequest("the body's JSON has a number with too many digits: use at most 64 bits") from error
    if not isinstance(value, dict):
        raise InvalidRequest(f"the body must be a JSON object, not {_kind(value)}")
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH and _is_deep(value):
        raise InvalidRequest(TOO_DEEP)
    if b"\\u" in body or b"\\U" in body:
        _check_surrogates(value)
    return value


def _no_constant(name: str) -> Any:
    raise InvalidRequest(f"the body has {name}, which is not JSON: numbers must be finite")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a dict of an object; too many or duplicate keys are refused here, before they cost more."""
    if len(pairs) > MAX_KEYS:
        raise InvalidRequest(f"the body's JSON has an object of {len(pairs)} keys: give at most {MAX_KEYS}")
    found = dict(pairs)
    if len(found) != len(pairs):
        keys: set[str] = set()
        twice = next(key for key, _ in pairs if key in keys or keys.add(key))  # type: ignore[func-returns-value]
        raise InvalidRequest(f"the body's JSON has the key '{twice[:80]}' twice: give it once", param=twice[:80])
    return found


def _is_deep(value: Any) -> bool:
    """Whether arrays and objects are nested more than MAX_DEPTH deep."""
    level = [value]
    for _ in range(MAX_DEPTH):
        values = (outer.values() if type(outer) is dict else outer for outer in level)
        level = [inner for held in values for inner in held if type(inner) in (dict, list)]
        if not level:
            return False
    return True


def _check_surrogates(value: Any) -> None:
    stack: list[tuple[str, Any]] = [("", value)]
    while stack:
        path, item = stack.pop()
        if isinstance(item, str) and not _encodes(item):
            raise InvalidRequest(
                f"{path or 'a key'} has half a surrogate pair, which is not text: send whole code points",
                param=path or None,
            )
        if isinstance(item, dict):
            stack += [("", key) for key in item]
            stack += [(f"{path}.{key}" if path else key, inner) for key, inner in item.items()]
        elif isinstance(item, list):
            stack += [(f"{path}[{index}]", inner) for index, inner in enumerate(item)]


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _kind(value: Any) -> str:
    names = {list: "an array", str: "a string", bool: "true or false", int: "a number", float: "a number"}
    return names.get(type(value), "null")
