"""Block events of the prefix cache, from the engine's reports to any number of subscribers.

Rules:
- The engine records events of a salt only while somebody subscribes to it.
- A feed mirrors the salt's cached blocks, so that a late subscriber costs the engine nothing: it gets all of them
  first.
- Each batch has a number. Subscribers have no queues of their own: all read one history of bounded length. One that
  falls behind it gets all blocks anew.
- Numbers go on from the clock when a feed is opened. So none of an earlier feed, or of an earlier server's, can be
  taken for one of this feed's.
- A lost engine's blocks are gone; the next engine is asked for its own.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from ..core.messages import BlockEvent, BlockRemoved, BlocksCleared, BlockStored, WatchBlocks
from ..errors import TreadleError

BATCH_EVENTS = 512
"""Events of one batch: with blocks of 32 tokens about 60 KB as a message."""
HISTORY_EVENTS = 16_384
"""Events that a subscriber may be behind."""


@dataclass(frozen=True)
class Chunk:
    """A batch that is one of `count` parts of a snapshot with `blocks` blocks in all."""

    index: int
    count: int
    blocks: int


@dataclass(frozen=True)
class EventBatch:
    """Events in order. `first_id` numbers the first of them since the feed was opened, from 1; those of a `chunk` have
    no numbers."""

    number: int
    at_s: float
    events: tuple[BlockEvent, ...]
    first_id: int = 0
    chunk: Chunk | None = None


class BlockFeed:
    """One salt's blocks and the history of their changes. Lives on the event loop."""

    def __init__(self, salt: str, now: Callable[[], float] = time.time) -> None:
        self.salt = salt
        self.subscribers = 0
        self._now = now
        self._blocks: dict[int, BlockStored] = {}  # parents first
        self._history: deque[EventBatch] = deque()
        self._kept = 0  # events in the history
        self._last = int(now() * 1e6)
        self._events = 0
        self._synced = False  # what comes continues what is known
        self._news = asyncio.Event()
        self._closed: TreadleError | None = None

    # From the engine ---------------------------------------------------------------------------------------------

    def take(self, events: Sequence[BlockEvent]) -> bool:
        """Apply the engine's events and publish them. False where some were lost: then it has to be asked anew."""
        told = [event for event in events if self._apply(event)]
        for first in range(0, len(told), BATCH_EVENTS):
            self._publish(tuple(told[first : first + BATCH_EVENTS]))
        lost = any(isinstance(event, BlocksCleared) and event.lost for event in events)
        return self._synced or not lost

    def lose(self) -> None:
        """The engine is gone, with its blocks."""
        if self._forget():
            self._publish((BlocksCleared(self.salt),))
        self._synced = False

    def close(self, error: TreadleError) -> None:
        """End all subscriptions with `error`."""
        self._closed = error
        self._wake()

    def _apply(self, event: BlockEvent) -> bool:
        """Whether the event is news."""
        match event:
            case BlocksCleared():
                self._synced = not event.lost
                return self._forget()
            case BlockStored() if self._synced:
                self._blocks[event.id] = event
                return True
            case BlockRemoved() if self._synced:
                return self._blocks.pop(event.id, None) is not None
        return False

    def _forget(self) -> bool:
        """Forget all blocks; whether there were any."""
        known, self._blocks = bool(self._blocks), {}
        return known

    def _publish(self, events: tuple[BlockEvent, ...]) -> None:
        self._last += 1
        self._history.append(EventBatch(self._last, self._now(), events, self._events + 1))
        self._events += len(events)
        self._kept += len(events)
        while self._kept > HISTORY_EVENTS:
            self._kept -= len(self._history.popleft().events)
        self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    # To subscribers ----------------------------------------------------------------------------------------------

    async def follow(self, start: int = 0) -> AsyncGenerator[EventBatch, None]:
        """The batches from number `start` on; where that is 0 or not in the history, all blocks first. Raises what the
        feed is closed with."""
        number = start
        while True:
            if self._closed is not None:
                raise self._closed
            news = self._news
            if not self._reaches(number):
                number = self._last + 1
                for chunk in self._snapshot():
                    yield chunk
            elif number <= self._last:
                yield self._history[number - self._last - 1]
                number += 1
            else:
                await news.wait()

    def _reaches(self, number: int) -> bool:
        """Whether nothing is missing between `number` and the next batch."""
        return self._last - len(self._history) < number <= self._last + 1

    def _snapshot(self) -> list[EventBatch]:
        """All blocks that are known, after a BlocksCleared."""
        blocks, now = self._blocks.values(), self._now()
        count = max(1, math.ceil(len(blocks) / BATCH_EVENTS))
        rest = iter(tuple(blocks))
        chunks = []
        for index in range(count):
            events: tuple[BlockEvent, ...] = tuple(islice(rest, BATCH_EVENTS))
            if not index:
                events = (BlocksCleared(self.salt), *events)
            number = self._last - count + 1 + index
            chunks.append(EventBatch(number, now, events, chunk=Chunk(index, count, len(blocks))))
        return chunks


class BlockFeeds:
    """The feeds of one engine client, by salt. `send` sends to the engine that lives now."""

    def __init__(self, send: Callable[[WatchBlocks], None]) -> None:
        self._send = send
        self._feeds: dict[str, BlockFeed] = {}
        self._up = False  # an engine is there to be asked
        self._closed: TreadleError | None = None

    async def follow(self, salt: str, start: int = 0) -> AsyncGenerator[EventBatch, None]:
        """The batches of a salt's feed; see `BlockFeed.follow`. Close the iterator to end the subscription."""
        if self._closed is not None:
            raise self._closed
        feed = self._feeds.get(salt)
        if feed is None:
            feed = self._feeds[salt] = BlockFeed(salt)
            self._watch(feed)
        feed.subscribers += 1
        try:
            async for batch in feed.follow(start):
                yield batch
        finally:
            feed.subscribers -= 1
            if not feed.subscribers:
                del self._feeds[salt]
                self._watch(feed, on=False)

    def take(self, events: Sequence[BlockEvent]) -> None:
        """Hand on the events of one report."""
        salts = dict.fromkeys(event.salt for event in events)
        for salt in salts:
            feed = self._feeds.get(salt)
            if feed is not None and not feed.take([event for event in events if event.salt == salt]):
                self._watch(feed)

    def ready(self) -> None:
        """An engine has started."""
        self._up = True
        for feed in self._feeds.values():
            self._watch(feed)

    def lose(self) -> None:
        """The engine is gone."""
        self._up = False
        for feed in self._feeds.values():
            feed.lose()

    def close(self, error: TreadleError) -> None:
        """There will be no engine any more: end all subscriptions with `error`."""
        self._closed = error
        for feed in self._feeds.values():
            feed.close(error)

    def _watch(self, feed: BlockFeed, on: bool = True) -> None:
        if self._up:
            self._send(WatchBlocks(feed.salt, on))
