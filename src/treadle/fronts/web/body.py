"""Reading a request's body: bounded in bytes and time while it is read, then strict JSON."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable
from typing import Any

from starlette.types import Receive

from ...core.refusals import Refusal
from ...errors import Busy, InvalidRequest, RequestTooLarge
from .errors import BodyTimeout, ClientLeft

IDLE_S = 30.0
TOTAL_S = 300.0
MAX_KEYS = 4096
MAX_BRACKETS = 500_000


class BodyBudget:
    """Bytes that all half-read bodies may hold together."""

    def __init__(self, limit: int, on_refused: Callable[[Refusal], None] = lambda reason: None) -> None:
        self._limit = limit
        self._on_refused = on_refused
        self.held = 0

    def take(self, size: int) -> None:
        """Raises Busy when that is too much."""
        if self.held + size > self._limit:
            self._on_refused(Refusal.BODY_BYTES)
            raise Busy("the server is busy: it is reading too many large requests at once", retry_after_s=1.0)
        self.held += size

    def give_back(self, size: int) -> None:
        self.held -= size


async def read_body(
    receive: Receive,
    headers: Iterable[tuple[bytes, bytes]],
    *,
    limit: int,
    budget: BodyBudget,
    idle_s: float = IDLE_S,
    total_s: float = TOTAL_S,
    clock: Callable[[], float] = time.monotonic,
) -> bytes:
    """The whole body.

    Raises RequestTooLarge as soon as it is known to be over `limit` bytes, BodyTimeout when `idle_s` pass without a
    byte or `total_s` in all, InvalidRequest when it is compressed, Busy when `budget` is used up, and ClientLeft when
    the client leaves.
    """
    _check_headers(headers, limit)
    body = bytearray()
    deadline, more = clock() + total_s, True
    try:
        while more:
            part, more = await _part(receive, min(idle_s, deadline - clock()), len(body))
            if len(body) + len(part) > limit:
                raise _too_large(limit)
            budget.take(len(part))
            body += part
        return bytes(body)
    finally:
        budget.give_back(len(body))


async def _part(receive: Receive, timeout_s: float, so_far: int) -> tuple[bytes, bool]:
    """The next piece of the body, and whether more follows."""
    try:
        async with asyncio.timeout(max(0.0, timeout_s)):
            message = await receive()
    except TimeoutError:
        raise BodyTimeout(f"the body did not arrive in time ({so_far} bytes came): send it faster") from None
    if message["type"] == "http.disconnect":
        raise ClientLeft("the client left while it sent its request")
    return message.get("body", b""), message.get("more_body", False)


def parse_json(body: bytes) -> dict[str, Any]:
    """The body's JSON object, strictly: UTF-8, no NaN, no duplicate keys, no lone surrogates. Raises InvalidRequest."""
    if not body.strip():
        raise InvalidRequest("the request has no body: send a JSON object")
    if len(body) > MAX_BRACKETS and body.count(b"[") > MAX_BRACKETS:
        raise InvalidRequest(f"the body has over {MAX_BRACKETS} arrays: send less at a time")
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_no_constant, object_pairs_hook=_unique)
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not valid UTF-8 (byte {error.start}): encode it as UTF-8") from error
    except json.JSONDecodeError as error:
        raise InvalidRequest(
            f"the body is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        ) from error
    except RecursionError as error:
        raise InvalidRequest("the body's JSON is nested too deeply: flatten it") from error
    except ValueError as error:
        raise InvalidRequest("the body's JSON has a number with too many digits: use at most 64 bits") from error
    if not isinstance(value, dict):
        raise InvalidRequest(f"the body must be a JSON object, not {_kind(value)}")
    if b"\\u" in body or b"\\U" in body:
        _check_surrogates(value)
    return value


def _check_headers(headers: Iterable[tuple[bytes, bytes]], limit: int) -> None:
    for name, value in headers:
        if name == b"content-length" and value.isdigit() and int(value[:20]) > limit:
            raise _too_large(limit)
        if name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
            raise InvalidRequest("compressed request bodies are not taken: send it without Content-Encoding")


def _too_large(limit: int) -> RequestTooLarge:
    return RequestTooLarge(
        f"the request's body is over {limit} bytes: send less, or start the server with a larger --max-body-bytes"
    )


def _no_constant(name: str) -> Any:
    raise InvalidRequest(f"the body has {name}, which is not JSON: numbers must be finite")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object as a dict; what no honest client sends is refused here, before it costs more."""
    if len(pairs) > MAX_KEYS:
        raise InvalidRequest(f"the body's JSON has an object of {len(pairs)} keys: give at most {MAX_KEYS}")
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise InvalidRequest(f"the body's JSON has the key '{twice[:80]}' twice: give it once", param=twice[:80])
    return found


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
