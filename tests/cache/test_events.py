"""Events of the prefix index."""

from __future__ import annotations

from treadle.cache.events import Removed, Stored, chained_id
from treadle.cache.index import PrefixIndex
from treadle.cache.node import Node, pack


def filled(index: PrefixIndex) -> tuple[Node, Node]:
    first = index.insert(None, "s", range(4), 1, 1).node
    second = index.insert(first, "s", (7,), 2, 1).node
    assert first is not None
    assert second is not None
    return first, second


def test_blocks_are_told_after_their_parents_and_removed_before_them() -> None:
    index = PrefixIndex(4, events=True)
    first, second = filled(index)
    assert index.drain_events() == [Stored(first.id, 0, "s", (0, 1, 2, 3)), Stored(second.id, first.id, "s", (7,))]
    index.clear()
    assert index.drain_events() == [Removed(second.id), Removed(first.id)]
    assert index.drain_events() == []


def test_a_held_block_that_leaves_the_tree_is_told_at_once_and_only_then() -> None:
    index = PrefixIndex(4, events=True)
    tail = index.insert(None, "", (1,), 1, 1).node
    assert tail is not None
    index.acquire([tail])
    longer = index.insert(None, "", (1, 2), 2, 1).node
    assert longer is not None
    assert index.drain_events()[1:] == [Stored(longer.id, 0, "", (1, 2)), Removed(tail.id)]
    index.release([tail])
    assert index.drain_events() == []


def test_nothing_is_recorded_unless_asked_for() -> None:
    index = PrefixIndex(4)
    assert [node.id for node in filled(index)] == [0, 0]
    index.clear()
    assert index.drain_events() == []


def test_the_same_path_has_the_same_id_in_any_index() -> None:
    one, other = (filled(PrefixIndex(4, events=True)) for _ in range(2))
    assert [node.id for node in one] == [node.id for node in other]


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
