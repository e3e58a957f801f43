"""What a router hears of the prefix index."""

from __future__ import annotations

import pytest

from treadle.cache.events import chained_id
from treadle.cache.prefix_index import PrefixIndex
from treadle.cache.prefix_node import Node, NodeState, pack
from treadle.core.messages import BlockRemoved, BlocksCleared, BlockStored

BLOCK = 4
FIRST = chained_id(0, "s", pack(range(4)))
SECOND = chained_id(FIRST, "s", pack(range(4, 8)))
STORED = (BlockStored("s", FIRST, 0, (0, 1, 2, 3)), BlockStored("s", SECOND, FIRST, (4, 5, 6, 7)))


def insert(index: PrefixIndex, parent: Node | None, tokens: range, salt: str = "s") -> Node:
    node = index.insert(parent, salt, tokens, 1, 1).node
    assert node is not None
    return node


def filled(index: PrefixIndex) -> Node:
    """Two blocks; the second."""
    return insert(index, insert(index, None, range(4)), range(4, 8))


def watched(salt: str = "s") -> PrefixIndex:
    index = PrefixIndex(BLOCK)
    index.watch(salt)
    assert index.drain_events() == (BlocksCleared(salt),)
    return index


def test_blocks_are_told_after_their_parents() -> None:
    index = watched()
    filled(index)
    assert index.drain_events() == STORED
    assert index.drain_events() == ()


def test_a_block_that_is_given_up_is_told_and_can_come_back() -> None:
    index = watched()
    filled(index)
    index.drain_events()
    index.evict(2)
    assert index.drain_events() == (BlockRemoved("s", SECOND), BlockRemoved("s", FIRST))
    filled(index)
    assert index.drain_events() == STORED


def test_what_is_emptied_at_once_is_one_event() -> None:
    index = watched()
    index.acquire([filled(index)])
    index.clear()
    assert index.drain_events() == (BlocksCleared("s"),), "nobody needs what was stored just before"
    insert(index, None, range(4))
    assert index.drain_events() == STORED[:1]


def test_a_held_block_that_leaves_the_tree_is_told_at_once_and_only_then() -> None:
    index = watched()
    last = filled(index)
    index.acquire([last])
    index.clear("s")
    index.drain_events()
    index.release([last])
    assert index.drain_events() == ()


def test_tails_are_nobodys_business() -> None:
    index = watched()
    insert(index, None, range(3))
    insert(index, None, range(4))
    assert index.drain_events() == STORED[:1], "it takes the place of the tail"


def test_other_salts_are_not_told() -> None:
    index = watched()
    insert(index, None, range(4), "other")
    index.clear("other")
    index.evict(1)
    assert index.drain_events() == ()


def test_nothing_is_recorded_unless_asked_for() -> None:
    index = PrefixIndex(BLOCK)
    filled(index)
    index.watch("s", on=False)
    index.clear()
    assert index.drain_events() == ()


def test_who_comes_late_hears_what_is_there() -> None:
    index = PrefixIndex(BLOCK)
    insert(index, filled(index), range(3))
    index.watch("s")
    assert index.drain_events() == (BlocksCleared("s"), *STORED)


def test_a_watch_can_start_anew_and_end() -> None:
    index = watched()
    index.watch("other")
    filled(index)
    index.watch("s")
    assert index.drain_events() == (BlocksCleared("other"), BlocksCleared("s"), *STORED)
    index.watch("s", on=False)
    insert(index, None, range(9, 13))
    insert(index, None, range(4), "other")
    assert [event.salt for event in index.drain_events()] == ["other"]


def test_what_is_there_is_told_a_few_blocks_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what changes meanwhile is neither lost nor told twice."""
    monkeypatch.setattr("treadle.cache.events.ANNOUNCED_AT_ONCE", 1)
    index = PrefixIndex(BLOCK)
    second = filled(index)
    index.watch("s")
    third = insert(index, second, range(8, 12))  # its parent is not announced yet
    other = insert(index, None, range(20, 24))  # it has none
    told = [index.drain_events()]
    insert(index, third, range(12, 16))
    index.acquire([third])
    index.evict(2)  # the fourth and the other one
    while events := index.drain_events():
        told.append(events)
    assert other.state is NodeState.FREED
    names = [[type(event).__name__ for event in events] for events in told]
    assert names == [["BlocksCleared", "BlockStored", "BlockStored"], ["BlockRemoved", "BlockStored"], ["BlockStored"]]


def test_what_is_given_up_before_it_was_told_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treadle.cache.events.ANNOUNCED_AT_ONCE", 1)
    index = PrefixIndex(BLOCK)
    filled(index)
    index.watch("s")
    assert index.drain_events() == (BlocksCleared("s"), STORED[0])
    index.evict(1)
    assert index.drain_events() == ()


def test_ids_tell_paths_salts_and_tokens_apart() -> None:
    key = pack((1, 2))
    ids = [
        chained_id(0, "", key),
        chained_id(1, "", key),
        chained_id(-1, "", key),
        chained_id(0, "a", key),
        chained_id(0, "\ud800", key),
        chained_id(0, "", pack((1,))),
        chained_id(0, "", pack((2, 1))),
    ]
    assert len(set(ids)) == len(ids)
    assert all(-(2**63) <= id_ < 2**63 for id_ in ids)
    assert ids[0] == chained_id(0, "", key)
