"""Block events on their way from the engine's reports to subscribers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from tests.support.aio import in_loop
from treadle.core.messages import BlockEvent, BlockRemoved, BlocksCleared, BlockStored, WatchBlocks
from treadle.engine import block_event_feeds
from treadle.engine.block_event_feeds import BlockFeeds, Chunk, EventBatch
from treadle.errors import ServerStopping

CLEARED = BlocksCleared("s")
LOST = BlocksCleared("s", lost=True)
ON, OFF = WatchBlocks("s"), WatchBlocks("s", on=False)


def stored(*ids: int, salt: str = "s") -> tuple[BlockEvent, ...]:
    return tuple(BlockStored(salt, id_, 0, (id_,)) for id_ in ids)


class Engine:
    """The feeds of an engine that is there, and what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[WatchBlocks] = []
        self.feeds = BlockFeeds(self.asked.append)
        self.feeds.ready()

    def says(self, *events: BlockEvent) -> None:
        self.feeds.take(events)


class Subscriber:
    """Reads batches one by one; `blocks` is what it knows to be there."""

    def __init__(self, engine: Engine, start: int = 0, salt: str = "s") -> None:
        self.batches: AsyncGenerator[EventBatch, None] = engine.feeds.follow(salt, start)
        self.blocks: set[int] = set()
        self.last = 0

    async def read(self) -> EventBatch:
        async with asyncio.timeout(60):
            batch = await anext(self.batches)
        assert self.last in (0, batch.number - 1) or batch.chunk is not None, "a gap"
        self.last = batch.number
        for event in batch.events:
            match event:
                case BlockStored():
                    assert event.id not in self.blocks
                    self.blocks.add(event.id)
                case BlockRemoved():
                    self.blocks.remove(event.id)
                case BlocksCleared():
                    self.blocks.clear()
        return batch

    async def knows(self, *ids: int) -> None:
        while self.blocks != set(ids):
            await self.read()


async def subscribed(engine: Engine, start: int = 0) -> Subscriber:
    """One that has read what there was."""
    it = Subscriber(engine, start)
    await it.read()
    return it


@in_loop
async def test_a_subscriber_hears_of_what_is_there_and_of_each_change() -> None:
    engine = Engine()
    it = await subscribed(engine)
    assert engine.asked == [ON]
    engine.says(CLEARED, *stored(1, 2))
    engine.says(BlockRemoved("s", 2))
    first, second = await it.read(), await it.read()
    assert (first.events, second.events) == (stored(1, 2), (BlockRemoved("s", 2),))
    assert (first.first_id, second.first_id) == (1, 3)
    assert second.number == first.number + 1
    assert it.blocks == {1}


@in_loop
async def test_nobody_is_told_of_other_salts_or_of_what_came_before_the_watch() -> None:
    engine = Engine()
    it = await subscribed(engine)
    engine.says(*stored(9), BlockRemoved("s", 8))
    engine.says(*stored(7, salt="other"))
    engine.says(CLEARED, *stored(1), BlockRemoved("s", 6))
    assert (await it.read()).events == stored(1)


@in_loop
async def test_a_late_subscriber_gets_all_blocks_and_costs_the_engine_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_event_feeds, "BATCH_EVENTS", 2)
    engine = Engine()
    early = await subscribed(engine)
    engine.says(CLEARED, *stored(1, 2, 3, 4, 5))
    await early.knows(1, 2, 3, 4, 5)
    late = Subscriber(engine)
    chunks = [await late.read() for _ in range(3)]
    assert [chunk.chunk for chunk in chunks] == [Chunk(i, 3, 5) for i in range(3)]
    assert [chunk.number for chunk in chunks] == [early.last - 2, early.last - 1, early.last]
    assert chunks[0].events == (CLEARED, *stored(1, 2))
    engine.says(BlockRemoved("s", 3))
    for it in (early, late):
        assert (await it.read()).number == chunks[-1].number + 1
        assert it.blocks == {1, 2, 4, 5}
    assert engine.asked == [ON]


@in_loop
async def test_one_that_comes_back_goes_on_where_it_was() -> None:
    engine = Engine()
    other, it = await subscribed(engine), await subscribed(engine)
    engine.says(CLEARED, *stored(1))
    await it.knows(1)
    await it.batches.aclose()
    engine.says(*stored(2))
    again = Subscriber(engine, start=it.last + 1)
    assert (await again.read()).events == stored(2)
    waits = Subscriber(engine, start=again.last + 1)
    reading = asyncio.create_task(waits.read())
    await asyncio.sleep(0)
    engine.says(*stored(3))
    assert (await reading).events == stored(3), "nothing was missed, so nothing is repeated"
    for number in (other.last - 1, again.last + 10):
        assert (await Subscriber(engine, start=number).read()).chunk is not None, "it was never here"


@in_loop
async def test_one_that_falls_behind_starts_anew_and_nobody_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_event_feeds, "HISTORY_EVENTS", 10)
    engine = Engine()
    quick, slow = await subscribed(engine), await subscribed(engine)
    engine.says(CLEARED)
    for id_ in range(1, 31):
        engine.says(*stored(id_))
        assert (await quick.read()).chunk is None
    engine.says(BlockRemoved("s", 1))
    batch = await slow.read()
    assert batch.events[0] == CLEARED
    assert slow.blocks == set(range(2, 31))
    engine.says(*stored(40))
    assert (await slow.read()).events == stored(40)
    assert len(engine.asked) == 1


@in_loop
async def test_events_that_were_lost_are_asked_for_again() -> None:
    engine = Engine()
    it = await subscribed(engine)
    engine.says(CLEARED, *stored(1))
    await it.knows(1)
    engine.says(LOST, *stored(2), BlockRemoved("s", 1))
    assert engine.asked == [ON, ON]
    await it.knows()
    engine.says(*stored(3))
    assert engine.asked == [ON, ON], "it is on its way"
    engine.says(CLEARED, *stored(4))
    await it.knows(4)
    engine.says(LOST, CLEARED, *stored(5))
    assert engine.asked == [ON, ON], "what was asked for before came with it"
    await it.knows(5)


@in_loop
async def test_a_lost_engines_blocks_are_gone_and_the_next_one_is_asked() -> None:
    engine = Engine()
    it = await subscribed(engine)
    engine.says(CLEARED, *stored(1))
    await it.knows(1)
    engine.feeds.lose()
    engine.feeds.lose()
    engine.says(*stored(2))
    await it.knows()
    late = await subscribed(engine)
    other = Subscriber(engine, salt="other")
    await other.read()
    await other.batches.aclose()
    assert engine.asked == [ON], "there is nobody to ask"
    engine.feeds.ready()
    assert engine.asked == [ON, ON]
    engine.says(CLEARED, *stored(3))
    for each in (it, late):
        await each.knows(3)


@in_loop
async def test_the_last_one_that_leaves_ends_the_recording() -> None:
    engine = Engine()
    one, other = await subscribed(engine), await subscribed(engine)
    engine.says(CLEARED, *stored(1))
    await one.batches.aclose()
    assert engine.asked == [ON]
    await other.batches.aclose()
    assert engine.asked == [ON, OFF]
    again = await subscribed(engine)
    assert engine.asked == [ON, OFF, ON]
    assert again.last >= other.last, "no number means two things"
    assert again.blocks == set()


@in_loop
async def test_the_end_of_the_engine_ends_all_subscriptions() -> None:
    engine = Engine()
    it = await subscribed(engine)
    reading = asyncio.create_task(it.read())
    await asyncio.sleep(0)
    engine.feeds.close(ServerStopping("bye"))
    with pytest.raises(ServerStopping):
        await reading
    with pytest.raises(ServerStopping):
        await Subscriber(engine).read()
