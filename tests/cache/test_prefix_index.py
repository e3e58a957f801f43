"""Prefix index: match, insert, references and eviction (F6)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from treadle.cache.prefix_index import Freed, Insertion, Match, PrefixIndex
from treadle.cache.prefix_node import Node, NodeState

BLOCK = 4


class Shelf:
    """An index with handles counted from 1, every block of size 1."""

    def __init__(self) -> None:
        self.index = PrefixIndex(BLOCK)
        self.handle = 0

    def put(self, tokens: Sequence[int], salt: str = "", parent: Node | None = None) -> Insertion:
        self.handle += 1
        return self.index.insert(parent, salt, tokens, self.handle, 1)

    def store(self, tokens: Sequence[int], salt: str = "") -> list[Node]:
        """Store all blocks of a prompt, one at a time, with handles 1, 2, ..."""
        nodes: list[Node] = []
        for start in range(0, len(tokens), BLOCK):
            put = self.put(tokens[start : start + BLOCK], salt, nodes[-1] if nodes else None)
            assert put.node is not None
            nodes.append(put.node)
        return nodes


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


def handles(nodes: Sequence[Node]) -> list[int]:
    return [node.handle for node in nodes]


# Finding


def test_an_empty_index_finds_nothing(shelf: Shelf) -> None:
    assert shelf.index.match("", range(100)) == Match((), None, 0, 0)


def test_no_tokens_match_nothing(shelf: Shelf) -> None:
    shelf.store(range(8))
    assert shelf.index.match("", ()) == Match()


def test_the_same_prompt_is_found_whole(shelf: Shelf) -> None:
    nodes = shelf.store(range(8))
    assert shelf.index.match("", range(8)) == Match(tuple(nodes), None, 0, 8)


def test_an_extension_finds_all_of_what_it_extends(shelf: Shelf) -> None:
    nodes = shelf.store(range(10))
    match = shelf.index.match("", range(50))
    assert match == Match(tuple(nodes[:2]), nodes[2], 2, 10)
    assert match.path == tuple(nodes)


@pytest.mark.parametrize("same", range(1, 12))
def test_what_diverges_is_reused_to_the_token(shelf: Shelf, same: int) -> None:
    shelf.store(range(12))
    match = shelf.index.match("", [*range(same), *(99 for _ in range(30))])
    assert match.tokens == same
    assert handles(match.path) == list(range(1, -(-same // BLOCK) + 1))


@pytest.mark.parametrize("length", range(1, 12))
def test_a_beginning_of_what_is_stored_is_found_to_the_token(shelf: Shelf, length: int) -> None:
    shelf.store(range(12))
    assert shelf.index.match("", range(length)).tokens == length


def test_a_tail_is_reused_in_part(shelf: Shelf) -> None:
    nodes = shelf.store([0, 1, 2, 3, 4, 5, 6])
    assert shelf.index.match("", [0, 1, 2, 3, 4, 5, 9, 9, 9]) == Match((nodes[0],), nodes[1], 2, 6)


def test_of_several_ways_the_one_that_agrees_longest_is_taken(shelf: Shelf) -> None:
    for way in ([5, 1, 1, 1], [5, 6, 1, 1], [5, 6, 7, 1], [5, 6], [6, 6, 7, 8]):
        shelf.store(way)
    match = shelf.index.match("", [5, 6, 7, 8])
    assert (match.last and match.last.handle, match.agree) == (3, 3)


def test_tokens_between_equal_ones_do_not_count(shelf: Shelf) -> None:
    shelf.store([1, 2, 3, 4])
    assert shelf.index.match("", [9, 2, 3, 4]).tokens == 0


def test_no_salt_finds_what_another_stored(shelf: Shelf) -> None:
    """CVE-2025-46570: what one tenant sent is not even measurable for another."""
    mine, yours = shelf.store(range(8), "mine"), shelf.store(range(8), "yours")
    assert shelf.index.match("mine", range(8)).nodes == tuple(mine)
    assert shelf.index.match("yours", range(8)).nodes == tuple(yours)
    assert shelf.index.match("", range(8)) == Match()
    assert shelf.index.nodes == 4


def test_equal_hashes_are_no_match(shelf: Shelf) -> None:
    """In Python -1 and -2 have the same hash, and so have tuples of them: only the tokens themselves decide."""
    assert hash((-1, 0, 0, 0)) == hash((-2, 0, 0, 0))
    shelf.store([-1, 0, 0, 0])
    assert shelf.index.match("", [-2, 0, 0, 0]).tokens == 0


@pytest.mark.parametrize("token", [0, 2**31, 2**32 + 1, 2**63 - 1, -(2**63)])
def test_tokens_may_be_any_number_of_64_bits(shelf: Shelf, token: int) -> None:
    shelf.store([token] * 6)
    assert shelf.index.match("", [token] * 6).tokens == 6
    assert shelf.index.match("", [token & 0xFFFF] * 6).tokens == (6 if token == token & 0xFFFF else 0)


# Storing


def test_an_equal_block_is_the_one_that_is_there(shelf: Shelf) -> None:
    (first,) = shelf.store(range(4))
    assert shelf.put(range(4)) == Insertion(first, False)
    assert (shelf.index.nodes, shelf.index.stored_tokens) == (1, 4)


def test_the_same_tokens_after_another_block_are_another_block(shelf: Shelf) -> None:
    first, second = shelf.store([1, 2, 3, 4, 1, 2, 3, 4])
    assert first is not second
    assert second.parent is first


def test_a_tail_that_something_covers_is_not_stored(shelf: Shelf) -> None:
    for there in (range(4), range(10, 13)):
        (node,) = shelf.store(there)
        assert shelf.put(there[:2]) == Insertion(node, False)


def test_a_longer_block_takes_the_place_of_the_tail_it_begins_with(shelf: Shelf) -> None:
    (tail,) = shelf.store([1, 2])
    longer = shelf.put([1, 2, 3])
    assert longer.freed == (Freed(tail.handle, 1),)
    full = shelf.put([1, 2, 3, 4])
    assert full.freed == (Freed(2, 1),)
    assert tail.state is NodeState.FREED
    assert (shelf.index.nodes, shelf.index.tokens, shelf.index.size) == (1, 4, 1)


def test_tokens_that_take_a_tails_place_are_stored_once(shelf: Shelf) -> None:
    for length in (1, 2, 3, 4):
        shelf.put(range(length))
    assert shelf.index.stored_tokens == 4


def test_other_tails_stay_beside_a_new_block(shelf: Shelf) -> None:
    shelf.store([1, 2, 9])
    assert shelf.put([1, 2, 3, 4]).freed == ()
    assert shelf.index.match("", [1, 2, 9]).tokens == 3


def test_a_held_tail_is_found_no_more_and_freed_when_it_is_let_go(shelf: Shelf) -> None:
    (tail,) = shelf.store([1, 2])
    shelf.index.acquire([tail])
    full = shelf.put([1, 2, 3, 4])
    assert full.freed == ()
    assert shelf.index.match("", [1, 2, 9]).last is full.node
    assert (shelf.index.size, shelf.index.evictable) == (2, 1)
    assert shelf.index.evict(2) == [Freed(2, 1)]
    assert shelf.index.release([tail]) == [Freed(tail.handle, 1)]
    assert shelf.index.size == 0


def test_nothing_is_stored_after_a_block_that_has_left(shelf: Shelf) -> None:
    """A row goes on below a block that was evicted or cleared meanwhile: it keeps its own."""
    gone, held = shelf.store(range(4))[0], shelf.store(range(10, 14))[0]
    shelf.index.acquire([held])
    shelf.index.clear()
    for parent in (gone, held):
        assert shelf.put([7], parent=parent) == Insertion(None, False)
    assert shelf.index.salts == 0


@pytest.mark.parametrize(("tokens", "size"), [((), 1), (range(5), 1), (range(4), 0), (range(4), -1)])
def test_a_block_has_one_to_block_tokens_and_a_size(shelf: Shelf, tokens: Sequence[int], size: int) -> None:
    with pytest.raises(AssertionError):
        shelf.index.insert(None, "", tokens, 1, size)


def test_nothing_follows_a_tail(shelf: Shelf) -> None:
    (tail,) = shelf.store([1, 2])
    with pytest.raises(AssertionError):
        shelf.put([3], parent=tail)


def test_a_path_stays_in_its_salt(shelf: Shelf) -> None:
    (mine,) = shelf.store(range(4), "mine")
    with pytest.raises(AssertionError):
        shelf.put([7], salt="yours", parent=mine)


def test_blocks_have_at_least_one_token() -> None:
    with pytest.raises(AssertionError):
        PrefixIndex(0)


# Holding


def test_whoever_holds_a_block_holds_its_path(shelf: Shelf) -> None:
    trunk, leaf = shelf.store(range(8))
    shelf.store([*range(4), 9])
    shelf.index.acquire([leaf])
    assert shelf.index.evictable == 1
    assert shelf.index.evict(3) == [Freed(4, 1)]
    assert (trunk.state, leaf.state) == (NodeState.LINKED, NodeState.LINKED)


def test_the_last_to_let_go_makes_it_evictable(shelf: Shelf) -> None:
    nodes = shelf.store(range(8))
    shelf.index.acquire(nodes)
    shelf.index.acquire(nodes)
    shelf.index.release(nodes)
    assert (shelf.index.evictable, shelf.index.evict(1)) == (0, [])
    shelf.index.release(reversed(nodes))
    assert shelf.index.evictable == 2
    assert shelf.index.evict(2) == [Freed(2, 1), Freed(1, 1)]


def test_a_block_is_let_go_only_as_often_as_it_was_held(shelf: Shelf) -> None:
    trunk, leaf = shelf.store(range(8))
    shelf.index.acquire([leaf])
    with pytest.raises(AssertionError):
        shelf.index.release([trunk])
    shelf.index.release([leaf])
    with pytest.raises(AssertionError):
        shelf.index.release([leaf])


def test_what_is_freed_can_not_be_held(shelf: Shelf) -> None:
    nodes = shelf.store(range(4))
    shelf.index.evict(1)
    with pytest.raises(AssertionError):
        shelf.index.acquire(nodes)


# Giving up


@pytest.mark.parametrize(("amount", "count"), [(-1, 0), (0, 0), (1, 1), (3, 1), (4, 2), (100, 3)])
def test_evict_frees_what_is_asked_or_all_there_is(amount: int, count: int) -> None:
    index = PrefixIndex(BLOCK)
    for number in range(3):
        index.insert(None, "", [number], number, size=3)
    assert len(index.evict(amount)) == count
    assert (index.size, index.evicted_tokens) == (9 - 3 * count, count)


def test_a_trunk_stays_as_long_as_anything_hangs_on_it(shelf: Shelf) -> None:
    shelf.store(range(4))
    shelf.store([*range(4), 8])
    shelf.store([*range(4), 9])
    assert [handle for handle, _ in shelf.index.evict(10)][-1] == 1


def test_clear_forgets_a_salt_and_no_other(shelf: Shelf) -> None:
    shelf.store(range(8), "mine")
    shelf.store(range(8), "yours")
    assert sorted(shelf.index.clear("mine")) == [Freed(1, 1), Freed(2, 1)]
    assert shelf.index.clear("mine") == []
    assert shelf.index.match("mine", range(8)).tokens == 0
    assert shelf.index.match("yours", range(8)).tokens == 8


def test_what_is_held_is_freed_after_clear_when_it_is_let_go(shelf: Shelf) -> None:
    trunk, leaf = shelf.store(range(8), "mine")
    shelf.store(range(8), "yours")
    shelf.index.acquire([trunk, leaf])
    assert shelf.index.clear() == [Freed(4, 1), Freed(3, 1)]
    assert shelf.index.match("mine", range(8)).tokens == 0
    again = shelf.store(range(8), "mine")
    assert shelf.index.release([trunk]) == []
    assert shelf.index.release([leaf]) == [Freed(2, 1), Freed(1, 1)]
    assert shelf.index.match("mine", range(8)).nodes == tuple(again)


def test_salts_without_blocks_are_forgotten(shelf: Shelf) -> None:
    """Salts come from clients: their table must not grow for ever."""
    for number in range(100):
        shelf.index.match(f"never stored {number}", range(8))
        shelf.store(range(8), str(number))
    assert shelf.index.salts == 100
    shelf.index.evict(199)
    assert shelf.index.salts == 1
    shelf.index.clear()
    assert shelf.index.salts == 0


# Continuations


@pytest.mark.parametrize("length", range(1, 12))
def test_cached_tokens_go_on_behind_any_beginning_of_them(shelf: Shelf, length: int) -> None:
    shelf.store(range(11))
    assert shelf.index.continuation("", range(length), 100) == list(range(length, 11))
    assert shelf.index.continuation("", range(length), 3) == list(range(length, 11))[:3]


def test_nothing_goes_on_behind_tokens_that_are_not_all_cached(shelf: Shelf) -> None:
    shelf.store(range(10))
    assert shelf.index.continuation("", [*range(9), 99], 5) == []
    assert shelf.index.continuation("", range(20), 5) == []
    assert shelf.index.continuation("another salt", range(4), 5) == []


@pytest.mark.parametrize("at", [4, 5])
def test_of_several_continuations_the_latest_is_told(shelf: Shelf, at: int) -> None:
    for last in (30, 10, 20):
        shelf.store([*range(at), last])
    assert shelf.index.continuation("", range(at), 5) == [20]


def test_a_continuation_is_no_use_of_its_blocks(shelf: Shelf) -> None:
    shelf.store([1, 2, 3, 4])
    shelf.store([5, 6, 7, 8])
    assert shelf.index.continuation("", [1, 2], 5) == [3, 4]
    assert shelf.index.evict(1) == [Freed(1, 1)]


# Integrity


@pytest.mark.parametrize("figure", ["size", "nodes", "tokens"])
def test_check_finds_a_wrong_figure(shelf: Shelf, figure: str) -> None:
    shelf.store(range(8))
    shelf.index.check()
    setattr(shelf.index, figure, 3)
    with pytest.raises(AssertionError):
        shelf.index.check()


def test_check_finds_who_was_not_let_go(shelf: Shelf) -> None:
    nodes = shelf.store(range(8))
    shelf.index.acquire(nodes)
    shelf.index.check(nodes)
    with pytest.raises(AssertionError):
        shelf.index.check()
