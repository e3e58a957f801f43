"""Reading a request's body, bounded in bytes and time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

from starlette.types import Receive

from ...core.refusals import Refusal
from ...errors import Busy, InvalidRequest, RequestTooLarge
from .errors import BodyTimeout, ClientLeft

IDLE_S = 30.0
TOTAL_S = 300.0


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


def _check_headers(headers: Iterable[tuple[bytes, bytes]], limit: int) -> None:
    for name, value in headers:
        if name == b"content-length" and value.isdigit() and int(value[:20]) > limit:
            raise _too_large(limit)
        if name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
            raise InvalidRequest("compressed request bodies are not taken: send it without Content-Encoding")


def _too_large(limit: int) -> RequestTooLarge:
    return RequestTooLarge(
        f"the request's body is over {limit} bytes, more than a prompt that fits the model's context can need: send "
        "less, or start the server with a larger --max-body-bytes"
    )
