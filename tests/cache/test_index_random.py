"""Seeded random operations: the index agrees with the reference implementation in all results."""

from __future__ import annotations

import random

import pytest

from tests.cache.oracle import Entry, Oracle, Tokens
from treadle.cache.events import chained_id
from treadle.cache.prefix_index import Freed, PrefixIndex
from treadle.cache.prefix_node import Node, NodeState, pack
from treadle.core.messages import BlockRemoved, BlocksCleared, BlockStored

SALTS = ("", "a", "b")


class Life:
    """One seed's random operations."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.block = self.chance.choice((1, 2, 3, 4, 8))
        self.letters = self.chance.choice((2, 3, 50))
        self.index = PrefixIndex(self.block)
        self.oracle = Oracle(self.block)
        self.nodes: dict[int, Node] = {}  # by handle, gone ones too
        self.rows: list[list[Node]] = []
        self.handles = 0
        self.heard: dict[str, set[int]] = {}  # by salt that is watched

    def run(self, operations: int) -> None:
        steps = (self.match, self.match, self.request, self.request, self.request, self.end, self.end, self.evict)
        for _ in range(operations):
            self.chance.choice(steps)()
            if self.chance.random() < 0.02:
                self.clear()
            if self.chance.random() < 0.05:
                self.watch()
            self.check()
        while self.rows:
            self.end()
        assert self.index.evictable == self.index.size
        assert {handle for handle, _ in self.index.evict(self.index.size)} == set(self.oracle.evict(10**9))
        self.check()
        assert (self.index.size, self.index.nodes, self.index.tokens, self.index.salts) == (0, 0, 0, 0)
        assert not any(self.heard.values())

    # Operations

    def tokens(self) -> Tokens:
        """Return new tokens, or a stored path and more."""
        more = tuple(self.chance.choices(range(self.letters), k=self.chance.randint(0, 3 * self.block + 2)))
        stored = list(self.oracle.present.values())
        if not stored or self.chance.random() < 0.3:
            return more
        path = self.chance.choice(stored).path
        return path[: self.chance.randint(0, len(path))] + more

    def match(self) -> tuple[str, Tokens, str, list[Node], Node | None]:
        salt, request, tokens = self.chance.choice(SALTS), self.chance.choice(("", "x", "y", "z")), self.tokens()
        longest = self.oracle.longest(salt, tokens)
        self.check_continuation(salt, tokens)
        found = self.index.match(salt, tokens, request)
        assert found.tokens == longest == self.block * len(found.nodes) + found.agree
        full = [self.entry(node) for node in found.nodes]
        for number, entry in enumerate(full, 1):
            assert (entry.salt, entry.path) == (salt, tokens[: number * self.block])
        last = None if found.last is None else self.entry(found.last)
        if last is not None:
            assert last.salt == salt
            assert last.above is (full[-1] if full else None)
            assert last.path[:longest] == tokens[:longest]
        assert (last is None) == (found.agree == 0)
        self.oracle.matched(last, found.agree, full[-1] if full else None, request)
        return salt, tokens, request, list(found.path), found.nodes[-1] if found.nodes else None

    def request(self) -> None:
        """Match, acquire, and store the rest block by block, with other requests in between."""
        salt, tokens, request, path, parent = self.match()
        row: list[Node] = []
        self.rows.append(row)
        self.acquire(row, path if self.chance.random() < 0.5 else path[-1:])
        done = 0 if parent is None else len(self.entry(parent).path)
        for start in range(done, len(tokens), self.block):
            if self.chance.random() < 0.1:
                self.evict()
            node = self.insert(parent, salt, tokens[start : start + self.block], request)
            if node is None or node.tokens < self.block:
                return
            self.acquire(row, [node])
            parent = node

    def insert(self, parent: Node | None, salt: str, tokens: Tokens, request: str) -> Node | None:
        self.handles += 1
        handle, size = self.handles, self.chance.randint(1, 3)
        result = self.index.insert(parent, salt, tokens, handle, size, request)
        if parent is not None and parent.state is not NodeState.LINKED:
            assert result == (None, False, ())
            return None
        above = None if parent is None else self.entry(parent)
        assert result.node is not None
        if covering := self.oracle.covering(above, salt, tokens):
            assert not result.stored
            assert self.entry(result.node) in covering
            self.oracle.refresh(self.entry(result.node))
        else:
            assert result.stored
            assert result.node.handle == handle
            self.nodes[handle] = result.node
            freed = self.oracle.store(above, salt, tokens, handle, size, request)
            assert {handle for handle, _ in result.freed} == freed
        return result.node

    def acquire(self, row: list[Node], nodes: list[Node]) -> None:
        self.index.acquire(nodes)
        self.oracle.held.update(self.entry(node) for node in nodes)
        row += nodes

    def end(self) -> None:
        if self.rows:
            row = self.rows.pop(self.chance.randrange(len(self.rows)))
            self.chance.shuffle(row)
            entries = [self.entry(node) for node in row]
            assert {handle for handle, _ in self.index.release(row)} == self.oracle.release(entries)

    def evict(self) -> None:
        amount = self.chance.choice((0, 1, 2, 5, 20))
        freed = self.index.evict(amount)
        assert [handle for handle, _ in freed] == self.oracle.evict(amount)
        self.check_sizes(freed)

    def clear(self) -> None:
        salt = self.chance.choice((None, *SALTS))
        freed = self.index.clear(salt)
        assert {handle for handle, _ in freed} == self.oracle.clear(salt)
        self.check_sizes(freed)

    def watch(self) -> None:
        salt, on = self.chance.choice(SALTS), self.chance.random() < 0.7
        self.index.watch(salt, on)
        self.heard.pop(salt, None)
        if on:
            self.heard[salt] = set()

    # Checks

    def entry(self, node: Node) -> Entry:
        assert self.nodes[node.handle] is node
        return self.oracle.present[node.handle]

    def check_continuation(self, salt: str, tokens: Tokens) -> None:
        """What goes on behind tokens is stored behind them."""
        more = self.index.continuation(salt, tokens, 2 * self.block)
        longer = {
            entry.path[len(tokens) :] for entry in self.oracle.linked(salt) if entry.path[: len(tokens)] == tokens
        }
        assert bool(more) == any(longer)
        assert not more or tuple(more) in {path[: len(more)] for path in longer}

    def check_sizes(self, freed: list[Freed]) -> None:
        assert len({handle for handle, _ in freed}) == len(freed)
        assert all(self.nodes[handle].size == size for handle, size in freed)

    def check(self) -> None:
        self.index.check(node for row in self.rows for node in row)
        present = self.oracle.present.values()
        assert self.index.size == sum(entry.size for entry in present)
        assert self.index.size - self.index.evictable == sum(entry.size for entry in self.oracle.pinned())
        assert self.index.nodes == len(present)
        assert self.index.tokens == sum(len(entry.tokens) for entry in present)
        assert self.index.evicted_tokens == self.oracle.evicted
        assert self.index.salts == len({entry.salt for entry in self.oracle.linked()})
        self.listen()

    def listen(self) -> None:
        """Whoever hears the events of a salt knows which of its full blocks can be found."""
        while events := self.index.drain_events():
            for event in events:
                heard = self.heard[event.salt]
                match event:
                    case BlockStored():
                        assert event.parent == 0 or event.parent in heard
                        assert event.id not in heard
                        heard.add(event.id)
                    case BlockRemoved():
                        heard.remove(event.id)
                    case BlocksCleared():
                        heard.clear()
        for salt, heard in self.heard.items():
            full = [entry for entry in self.oracle.linked(salt) if len(entry.tokens) == self.block]
            assert heard == {id_of(entry) for entry in full}


def id_of(entry: Entry) -> int:
    above = 0 if entry.above is None else id_of(entry.above)
    return chained_id(above, entry.salt, pack(entry.tokens))


@pytest.mark.untraced
@pytest.mark.parametrize("at_once", [1, 128])
@pytest.mark.parametrize("seed", range(60))
def test_the_index_does_what_a_search_through_a_list_does(
    seed: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F6"""
    monkeypatch.setattr("treadle.cache.events.ANNOUNCED_AT_ONCE", at_once)
    Life(seed).run(120)
