"""Keys of tokens, and the children of a node."""

from __future__ import annotations

import random

import pytest

from treadle.cache.prefix_node import Node, common_prefix, pack, unpack


def node(*tokens: int) -> Node:
    return Node("", pack(tokens), None, handle=0, size=1, serial=0)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ((), (1,), 0),
        ((1,), (2,), 0),
        ((1, 2, 3), (1, 2, 3), 3),
        ((1, 2), (1, 2, 3), 2),
        ((1, 2, 3), (1, 9, 3), 1),
        ((1, 2**40), (1, 2**41), 1),
        ((1, 256), (1, 0), 1),
        ((-1, 5), (-1, 6), 1),
        ((2**63 - 1,), (-1,), 0),
    ],
)
def test_agreement_is_in_whole_tokens(one: tuple[int, ...], other: tuple[int, ...], same: int) -> None:
    assert common_prefix(pack(one), pack(other)) == common_prefix(pack(other), pack(one)) == same


def test_a_key_is_its_tokens() -> None:
    tokens = (0, 1, -1, 2**63 - 1, -(2**63))
    assert unpack(pack(tokens)) == tokens
    assert node(*tokens).tokens == 5


@pytest.mark.parametrize("seed", range(20))
def test_the_closest_child_is_found_among_many(seed: int) -> None:
    chance = random.Random(seed)
    parent, children = node(), {}
    for _ in range(200):
        ways = tuple(chance.choices((0, 1, 255, 256, 2**40), k=6))
        if chance.random() < 0.3 and children:
            parent.remove(children.pop(chance.choice(list(children))))
        elif ways not in children:
            children[ways] = node(*ways)
            parent.add(children[ways])
        asked = pack(chance.choices((0, 1, 255, 256, 2**40), k=chance.randint(0, 6)))
        longest = max((common_prefix(child.key, asked) for child in children.values()), default=0)
        found, agree = parent.best_child(asked)
        assert agree == longest
        assert (found is None) == (longest == 0)
        assert found is None or common_prefix(found.key, asked) == longest
    assert set(parent.children or {}) == {pack(ways) for ways in children}


def test_a_parent_takes_over_what_is_known_of_a_childs_use() -> None:
    parent, child = node(1), node(2)
    parent.rank, parent.branches = (1, 5), 1
    child.rank, child.branches = (2, 3), 2
    parent.add(child)
    parent.remove(child)
    assert (parent.rank, parent.branches) == ((2, 3), 3)
