"""Pixels in the store: shared while they are used, kept under a budget, and removed."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest

from tests.support.aio import in_loop
from treadle.errors import Busy, InvalidRequest, ServerStopping
from treadle.fronts.media.store import PixelStore
from treadle.media.pixels_memory import TABLE_BYTES, NoRoom, Pixels
from treadle.text.images import Layout

ITEMS = (4 << 10) - TABLE_BYTES  # of pixels of 4 KiB


class Made:
    """Makes pixels of 4 KiB, and remembers which names were removed."""

    def __init__(self, memory: int = 1 << 20) -> None:
        """The machine has room for the pixels of so many images (`memory`)."""
        self.memory = memory
        self.count = 0
        self.removed: list[str] = []
        self.refused = 0

    def store(self, budget: int = 3 << 12) -> PixelStore:
        def on_refused() -> None:
            self.refused += 1

        return PixelStore(budget, self.removed.append, on_refused)

    async def __call__(self, name: str = "", items: int = ITEMS) -> Pixels:
        await asyncio.sleep(0)
        if self.count - len(self.removed) >= self.memory:
            raise NoRoom("no room", retry_after_s=1.0)
        self.count += 1
        return Pixels(name, (items,), Layout())


@in_loop
async def test_an_image_that_is_used_twice_at_once_is_made_once() -> None:
    made = Made()
    store = made.store()
    found = await asyncio.gather(*(store.take(b"a", lambda: made("a")) for _ in range(3)))
    assert (made.count, {pixels.name for pixels in found}) == (1, {"a"})
    assert (store.free_bytes, store.hits) == (2 << 12, 2)
    for _ in range(3):
        store.release(b"a")
    assert (store.free_bytes, made.removed) == (3 << 12, [])
    await store.close()
    assert made.removed == ["a"]


@in_loop
async def test_what_was_used_longest_ago_is_removed_first() -> None:
    made = Made()
    store = made.store()
    for name in "abc":
        await store.take(name.encode(), partial(made, name))
        store.release(name.encode())
    await store.take(b"a", lambda: made("a"))
    store.release(b"a")
    await store.take(b"d", lambda: made("d"))
    assert made.removed == ["b"]
    assert (made.count, store.held_bytes) == (4, 3 << 12)


@in_loop
async def test_no_more_than_a_number_are_kept_without_a_user() -> None:
    """Each is a file, however few bytes it has."""
    made = Made()
    store = PixelStore(1 << 20, made.removed.append, most_unused=2)
    for name in "abcd":
        await store.take(name.encode(), partial(made, name))
    assert made.removed == [], "those in use stay"
    for name in "badc":
        store.release(name.encode())
    assert made.removed == ["b", "a"]
    await store.take(b"d", partial(made, "d"))
    store.release(b"d")
    assert (made.count, made.removed) == (4, ["b", "a"])


class Unwalked(dict[bytes, Any]):
    """A dictionary for single keys alone."""

    def __iter__(self) -> Any:
        raise AssertionError("walked over all that is kept")

    items = keys = values = __iter__


@in_loop
async def test_a_use_costs_nothing_for_all_others_that_are_kept() -> None:
    """Else a request with a thousand images blocks the event loop for seconds beside thousands of others."""
    made = Made()
    store = made.store()
    store._entries = Unwalked()
    for name in "abcd":
        await store.take(name.encode(), partial(made, name))
        store.release(name.encode())
    await store.take(b"d", partial(made, "d"))
    assert (made.count, made.removed) == (4, ["a"])


@in_loop
async def test_pixels_in_use_are_never_removed_and_more_is_refused() -> None:
    made = Made()
    store = made.store()
    for name in "abc":
        await store.take(name.encode(), partial(made, name))
    with pytest.raises(Busy, match="too many images at once") as caught:
        await store.take(b"d", lambda: made("d"))
    assert caught.value.retry_after_s
    assert (made.removed, made.refused) == (["d"], 1)
    store.release(b"a")
    await store.take(b"d", lambda: made("d"))
    assert made.removed == ["d", "a"]


@in_loop
async def test_pixels_that_are_not_in_use_make_room_where_the_machine_has_less_than_the_budget() -> None:
    """Docker gives a container 64 MB of shared memory, which is full of earlier images soon."""
    made = Made(memory=2)
    store = made.store()
    for name in "abcd":
        await store.take(name.encode(), partial(made, name))
        store.release(name.encode())
    assert (made.removed, made.refused) == (["a", "b"], 0)
    assert store.held_bytes == 2 << 12


@in_loop
async def test_an_image_that_the_machine_has_no_room_for_beside_those_in_use_is_refused(caplog: Any) -> None:
    made = Made(memory=2)
    store = made.store()
    for name in "ab":
        await store.take(name.encode(), partial(made, name))
    for _ in range(2):
        with pytest.raises(NoRoom, match="no room"):
            await store.take(b"c", partial(made, "c"))
    store.release(b"a")
    assert (await store.take(b"c", partial(made, "c"))).name == "c"
    store.release(b"c")
    made.memory = 0
    with pytest.raises(NoRoom):
        await store.take(b"d", partial(made, "d"))
    assert (made.removed, made.refused) == (["a", "c"], 3)
    assert caplog.messages == ["an image got 503: no room"]


@in_loop
async def test_errors_reach_all_who_wait_and_are_not_kept() -> None:
    made = Made()
    store = made.store()

    async def fails() -> Pixels:
        await asyncio.sleep(0)
        raise InvalidRequest("no")

    results = await asyncio.gather(*(store.take(b"a", fails) for _ in range(2)), return_exceptions=True)
    assert [type(result) for result in results] == [InvalidRequest] * 2
    assert (await store.take(b"a", lambda: made("a"))).name == "a"


@in_loop
async def test_one_who_leaves_does_not_take_the_image_from_another() -> None:
    made, goes = Made(), asyncio.Event()
    store = made.store()

    async def slow() -> Pixels:
        await goes.wait()
        return await made("a")

    first = asyncio.create_task(store.take(b"a", slow))
    await asyncio.sleep(0)
    second = asyncio.create_task(store.take(b"a", slow))
    await asyncio.sleep(0)
    first.cancel()
    goes.set()
    assert (await second).name == "a"
    assert store.free_bytes == 2 << 12
    with pytest.raises(asyncio.CancelledError):
        await first


@in_loop
async def test_what_nobody_waits_for_any_more_is_not_made() -> None:
    """Who asks for it then makes it anew."""
    made, began, ended = Made(), list[str](), list[str]()
    store = made.store()

    async def slow() -> Pixels:
        began.append("a")
        try:
            await asyncio.sleep(1000)
        finally:
            ended.append("a")
        raise AssertionError

    leaving = [asyncio.create_task(store.take(b"a", slow)) for _ in range(2)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    leaving[0].cancel()
    await asyncio.gather(leaving[0], return_exceptions=True)
    assert (began, ended) == (["a"], [])
    leaving[1].cancel()
    await asyncio.gather(leaving[1], return_exceptions=True)
    assert (await store.take(b"a", lambda: made("a"))).name == "a"
    assert (began, ended) == (["a"], ["a"])
    await store.close()


@in_loop
async def test_an_error_that_nobody_waits_for_is_no_noise(caplog: Any) -> None:
    store = Made().store()

    async def fails() -> Pixels:
        await asyncio.sleep(0)
        raise InvalidRequest("no")

    leaving = asyncio.create_task(store.take(b"a", fails))
    await asyncio.sleep(0)
    leaving.cancel()
    for _ in range(5):
        await asyncio.sleep(0)
    await store.close()
    assert not caplog.messages


@in_loop
async def test_closing_ends_what_is_being_made() -> None:
    made = Made()
    store = made.store()

    async def never() -> Pixels:
        await asyncio.sleep(1000)
        raise AssertionError

    waiting = asyncio.create_task(store.take(b"a", never))
    await asyncio.sleep(0)
    await store.close()
    with pytest.raises(ServerStopping):
        await waiting
    assert store.statistics() == {"kept": 0, "held_bytes": 0, "used_bytes": 0, "limit_bytes": 3 << 12, "hits": 0}
