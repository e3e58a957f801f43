"""Reader of request bodies, with limits of bytes and time, and a budget of bytes until they are tokenized."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

from starlette.types import Receive

from ...core.refusals import Refusal
from ...errors import Busy, InvalidRequest, RequestTooLarge
from .errors import BodyTimeout, ClientLeft

IDLE_S = 30.0
TOTAL_S = 300.0


BODIES_BYTES = 512 * 1024 * 1024
EXEMPT_BYTES = 64 * 1024
"""Bodies up to this size are not counted: a connection's read buffer holds as much."""
SHARES = 4
"""One tenant's bodies hold a quarter of the budget at most."""


class BodyBudget:
    """Budget of bytes of request bodies from their arrival until they are tokenized: `limit` for all tenants together,
    and a quarter of that for each."""

    def __init__(self, limit: int, on_refused: Callable[[Refusal], None] = lambda reason: None) -> None:
        self._limit = limit
        self._on_refused = on_refused
        self._by_tenant: Counter[str] = Counter()
        self.held = 0

    def take(self, tenant: str, size: int) -> None:
        """Count bytes. Raises Busy if they exceed the tenant's part or the limit."""
        if self._by_tenant[tenant] + size > self._limit // SHARES:
            raise self._refused("it holds too many of your large requests at once")
        if self.held + size > self._limit:
            raise self._refused("it holds too many large requests at once")
        self._by_tenant[tenant] += size
        self.held += size

    def give_back(self, tenant: str, size: int) -> None:
        self._by_tenant[tenant] -= size
        self.held -= size
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]

    def statistics(self) -> dict[str, Any]:
        """Return plain values for `/v1/status`."""
        return {"held_bytes": self.held, "limit_bytes": self._limit, "sharers": len(self._by_tenant)}

    def _refused(self, cause: str) -> Busy:
        self._on_refused(Refusal.BODY_BYTES)
        return Busy(f"the server is busy: {cause}", retry_after_s=1.0)


class Body:
    """One request's body, counted in `budget` until it is released, at the latest when the context ends. Several frames
    wait while an answer is made and would each keep the bytes, so they share this holder."""

    def __init__(self, budget: BodyBudget, tenant: str) -> None:
        self.data = b""
        self._budget = budget
        self._tenant = tenant
        self._counted = 0

    def grow(self, size: int) -> None:
        """Count `size` bytes in all. Raises Busy."""
        if size > EXEMPT_BYTES:
            self._budget.take(self._tenant, size - self._counted)
            self._counted = size

    def release(self) -> None:
        """Drop the bytes. Idempotent."""
        self.data = b""
        if self._counted:
            self._budget.give_back(self._tenant, self._counted)
            self._counted = 0

    def __enter__(self) -> Body:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


async def read_body(
    receive: Receive,
    headers: Iterable[tuple[bytes, bytes]],
    into: Body,
    *,
    limit: int,
    idle_s: float = IDLE_S,
    total_s: float = TOTAL_S,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Read the whole body.

    Raises RequestTooLarge as soon as it is known to be over `limit` bytes, BodyTimeout when `idle_s` pass without a
    byte or `total_s` in all, InvalidRequest if it is compressed, Busy when its budget is used up, and ClientLeft when
    the client leaves.
    """
    _check_headers(headers, limit)
    body = bytearray()
    deadline, more = clock() + total_s, True
    while more:
        part, more = await _part(receive, min(idle_s, deadline - clock()), len(body))
        if len(body) + len(part) > limit:
            raise _too_large(limit)
        into.grow(len(body) + len(part))
        body += part
    into.data = bytes(body)


async def _part(receive: Receive, timeout_s: float, so_far: int) -> tuple[bytes, bool]:
    """Return the next piece of the body, and whether more follows."""
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
