"""Store of pixels in shared memory: held while a request uses them, and kept for the next one under a budget.

A second question about an image finds its pixels, and an image that two requests have at once is prepared once. Where
the machine has less shared memory than the budget, pixels that are not in use make room for others.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from ... import shared_memory
from ...errors import Busy, ServerStopping
from ...media.pixels_memory import NoRoom, Pixels
from ...text.work.fault_log import LimitedLog

BUDGET_BYTES = 1 << 30
MOST_UNUSED = 1 << 14
"""Pixels that are kept without a user: each is a file in shared memory, however small."""

log = logging.getLogger(__name__)


class StoreFull(Busy):
    """Refusal of pixels for which there is no room beside those in use."""


@dataclass(eq=False)
class _Entry:
    """Pixels with the number of their users."""

    pixels: Pixels
    users: int = 0


@dataclass(eq=False)
class _Preparation:
    """Pixels that are being made, with the number of those who wait for them."""

    task: asyncio.Task[None]
    waiting: int = 0


class PixelStore:
    """Pixels by digest. `budget` bytes are kept, those in use included; where they are all in use, more are refused.
    Of those not in use there are `most_unused`. `unlink` removes the memory of one. `on_refused` is called for the
    metrics."""

    def __init__(
        self,
        budget: int = BUDGET_BYTES,
        unlink: Callable[[str], None] = shared_memory.unlink,
        on_refused: Callable[[], None] = lambda: None,
        most_unused: int = MOST_UNUSED,
    ) -> None:
        self.budget = budget
        self.held_bytes = 0
        self.used_bytes = 0
        self.hits = 0
        self._unlink = unlink
        self._on_refused = on_refused
        self._log = LimitedLog(time.monotonic, log)
        self._most_unused = most_unused
        self._entries: dict[bytes, _Entry] = {}
        self._unused: OrderedDict[bytes, None] = OrderedDict()  # those used longest ago first
        self._preparing: dict[bytes, _Preparation] = {}

    @property
    def free_bytes(self) -> int:
        """Bytes that are not in use."""
        return self.budget - self.used_bytes

    async def take(self, digest: bytes, prepare: Callable[[], Awaitable[Pixels]]) -> Pixels:
        """Return the pixels of this digest, and count one more user. `prepare` makes them where they are not there, and
        is cancelled once nobody waits for them. Raises StoreFull where they don't fit, ServerStopping, and the errors
        of `prepare`."""
        self.hits += digest in self._entries or digest in self._preparing
        while (entry := self._entries.get(digest)) is None:
            begun = self._preparing.get(digest)
            if begun is None or begun.task.done():
                task = asyncio.create_task(self._prepare(digest, prepare), name="treadle-image")
                begun = self._preparing[digest] = _Preparation(task)
                task.add_done_callback(_seen)
                task.add_done_callback(partial(self._forget, digest))
            await self._wait(digest, begun)
        if not entry.users:
            self.used_bytes += entry.pixels.size_bytes
            del self._unused[digest]
        entry.users += 1
        return entry.pixels

    def release(self, digest: bytes) -> None:
        """Count one user less."""
        entry = self._entries[digest]
        entry.users -= 1
        if not entry.users:
            self.used_bytes -= entry.pixels.size_bytes
            self._unused[digest] = None
            self._evict(0)

    async def close(self) -> None:
        """Remove all pixels."""
        tasks = [begun.task for begun in self._preparing.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for digest in list(self._entries):
            self._remove(digest)

    async def _wait(self, digest: bytes, begun: _Preparation) -> None:
        begun.waiting += 1
        try:
            await asyncio.shield(begun.task)
        except asyncio.CancelledError:
            own = asyncio.current_task()
            if begun.task.cancelled() and own is not None and not own.cancelling():
                raise ServerStopping("the server is shutting down") from None
            raise
        finally:
            begun.waiting -= 1
            if not begun.waiting and not begun.task.done():
                begun.task.cancel()
                self._forget(digest, begun.task)  # who comes now begins anew

    def _forget(self, digest: bytes, task: asyncio.Task[None]) -> None:
        begun = self._preparing.get(digest)
        if begun is not None and begun.task is task:
            del self._preparing[digest]

    async def _prepare(self, digest: bytes, prepare: Callable[[], Awaitable[Pixels]]) -> None:
        pixels = await self._made(prepare)
        if pixels.size_bytes > self.free_bytes:
            self._unlink(pixels.name)
            self._on_refused()
            raise StoreFull(
                "the server is busy: it holds too many images at once; try again in about 1 s", retry_after_s=1.0
            )
        self._evict(pixels.size_bytes)
        self._entries[digest] = _Entry(pixels)
        self._unused[digest] = None
        self.held_bytes += pixels.size_bytes

    async def _made(self, prepare: Callable[[], Awaitable[Pixels]]) -> Pixels:
        """Make pixels, again without those that are not in use where the machine has no room for them."""
        try:
            return await prepare()
        except NoRoom as error:
            if not self._drop_unused():
                raise self._refused(error) from None
        try:
            return await prepare()
        except NoRoom as error:
            raise self._refused(error) from None

    def _refused(self, error: NoRoom) -> NoRoom:
        self._on_refused()
        self._log.write("an image got 503: %s", error.message)
        return error

    def _drop_unused(self) -> bool:
        """Remove all pixels that are not in use. Return whether there were any."""
        any_ = bool(self._unused)
        for digest in list(self._unused):
            self._remove(digest)
        return any_

    def _evict(self, needed: int) -> None:
        """Remove the pixels that were used longest ago until `needed` bytes fit, and no more than may be are unused."""
        while self._unused and (self.held_bytes + needed > self.budget or len(self._unused) > self._most_unused):
            self._remove(next(iter(self._unused)))

    def _remove(self, digest: bytes) -> None:
        self._unused.pop(digest, None)
        pixels = self._entries.pop(digest).pixels
        self.held_bytes -= pixels.size_bytes
        self._unlink(pixels.name)

    def statistics(self) -> dict[str, Any]:
        """Return plain values for `/v1/status`."""
        return {
            "kept": len(self._entries),
            "held_bytes": self.held_bytes,
            "used_bytes": self.used_bytes,
            "limit_bytes": self.budget,
            "hits": self.hits,
        }


def _seen(task: asyncio.Task[None]) -> None:
    """Take notice of an error whose callers have all left."""
    if not task.cancelled():
        task.exception()
