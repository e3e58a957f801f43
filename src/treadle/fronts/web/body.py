"""Reader of request bodies, compressed ones too, with limits of bytes and time, and a budget of bytes until they are
tokenized."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection
from types import TracebackType
from typing import Any

from starlette.types import Receive

from ...core.refusals import Refusal
from ...errors import Busy, RequestTooLarge
from .content_coding import Inflater, coding_of, inflater_of
from .errors import BodyTimeout, ClientLeft

IDLE_S = 30.0
TOTAL_S = 300.0
BODIES_BYTES = 512 * 1024 * 1024
EXEMPT_BYTES = 64 * 1024
"""Bodies up to this size are not counted: a connection's read buffer holds as much."""
SHARES = 4
"""One tenant's bodies hold a quarter of the budget at most."""
INLINE_BYTES = 64 * 1024
"""The event loop inflates the first so many bytes of a body, in about 0.1 ms."""
PIECE_BYTES = 1 << 20
"""A thread inflates the others, in pieces of so many bytes and about 1 ms. Bodies are collected in such pieces."""


class BodyBudget:
    """Budget of bytes of request bodies from their arrival until they are tokenized: `limit` for all tenants together,
    and a quarter of that for each."""

    def __init__(self, limit: int, on_refused: Callable[[Refusal], None] = lambda reason: None) -> None:
        self._limit = limit
        self._on_refused = on_refused
        self._by_tenant: Counter[str] = Counter()
        self.held = 0
        self.inflating = asyncio.Lock()
        """Held while a thread inflates a piece of a body: all of them together take one core at most."""

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

    async def inflated(self, inflater: Inflater, so_far: int, most: int) -> bytes:
        """Return the next bytes of a compressed body that has given `so_far`: at most `most`, and a bounded piece."""
        if so_far < INLINE_BYTES:
            return inflater.take(min(INLINE_BYTES, most))
        async with self._budget.inflating:
            return await asyncio.to_thread(inflater.take, min(PIECE_BYTES, most))

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
    headers: Collection[tuple[bytes, bytes]],
    into: Body,
    *,
    limit: int,
    idle_s: float = IDLE_S,
    total_s: float = TOTAL_S,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Read the whole body, and inflate a compressed one.

    Raises RequestTooLarge as soon as it is known to be over `limit` bytes, compressed or not, BodyTimeout when `idle_s`
    pass without a byte or `total_s` in all, UnsupportedCoding and InvalidRequest for compressed data that can't be
    inflated, Busy when its budget is used up, and ClientLeft when the client leaves.
    """
    deadline, more = clock() + total_s, True
    coding = _check_headers(headers, limit)
    if coding is not None:
        inflater = inflater_of(coding)
        await _read_inflated(receive, inflater, into, limit=limit, idle_s=idle_s, deadline=deadline, clock=clock)
        return
    body = _Pieces()
    while more:
        part, more = await _part(receive, min(idle_s, deadline - clock()), len(body))
        if len(body) + len(part) > limit:
            raise _too_large(limit)
        into.grow(len(body) + len(part))
        body.add(part)
    into.data = await body.whole()


class _Pieces:
    """Bytes of a body so far, in pieces of PIECE_BYTES: joining those takes the event loop no time."""

    def __init__(self) -> None:
        self._length = 0
        self._full: list[bytes] = []
        self._last = bytearray()

    def __len__(self) -> int:
        return self._length

    def add(self, part: bytes) -> None:
        self._last += part
        self._length += len(part)
        if len(self._last) >= PIECE_BYTES:
            self._close_piece()

    async def whole(self) -> bytes:
        """Return all bytes, once. `bytes.join` runs without the GIL."""
        if not self._full:
            return bytes(self._last)
        self._close_piece()
        return await asyncio.to_thread(b"".join, self._full)

    def _close_piece(self) -> None:
        self._full.append(bytes(self._last))
        self._last.clear()


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


async def _read_inflated(
    receive: Receive,
    inflater: Inflater,
    into: Body,
    *,
    limit: int,
    idle_s: float,
    deadline: float,
    clock: Callable[[], float],
) -> None:
    """Read a compressed body. Its compressed size is limited too, as some data inflates to nothing."""
    body, sent, more = _Pieces(), 0, True
    while more:
        part, more = await _part(receive, min(idle_s, deadline - clock()), sent)
        sent += len(part)
        if sent > limit:
            raise _too_large(limit)
        inflater.push(part)
        while not inflater.hungry:
            piece = await into.inflated(inflater, len(body), limit + 1 - len(body))
            if len(body) + len(piece) > limit:
                raise _too_large(limit)
            into.grow(len(body) + len(piece))
            body.add(piece)
    inflater.finish()
    into.data = await body.whole()


def _check_headers(headers: Collection[tuple[bytes, bytes]], limit: int) -> str | None:
    """Return the body's content coding. Raises RequestTooLarge and UnsupportedCoding."""
    coded = False
    for name, value in headers:
        if name == b"content-length" and value.isdigit() and int(value[:20]) > limit:
            raise _too_large(limit)
        coded = coded or name == b"content-encoding"
    return coding_of(headers) if coded else None


def _too_large(limit: int) -> RequestTooLarge:
    return RequestTooLarge(
        f"the request's body is over {limit} bytes, more than a prompt that fits the model's context can need: send "
        "less, or start the server with a larger --max-body-bytes"
    )
