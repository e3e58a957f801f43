"""Prefix index: trees of cached token blocks by salt, with references and eviction (F6).

The index holds tokens, salts, sizes and uses. The content of a node (a page shared in place, arrays to copy) belongs to
the caller, who gives each node a handle and gets it back once, when the node is freed.

- There is one tree per salt. A node is a block of exactly `block` tokens, or a shorter tail, which has no children.
- Nodes are compared by their tokens and path, never by a hash, and paths never cross salts: entries of one salt can't
  be found, nor their presence measured, by another.
- No child's tokens are a prefix of another child's: a tail covered by a stored block is not stored, and a longer block
  replaces the tail that is its prefix.
- A reference to a node pins its path. A pinned node is never freed: if it must leave the tree it is detached, and freed
  with its last reference.
- Only leaves are evicted, so a node stays as long as it has children (`eviction`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from ..core.messages import BlockEvent
from .events import EventLog
from .eviction import EvictionOrder
from .prefix_node import TOKEN_BYTES, Node, NodeState, pack, unpack


class Freed(NamedTuple):
    """A freed node's handle, returned to the caller, and its size."""

    handle: int
    size: int


class Match(NamedTuple):
    """Longest cached prefix: full blocks `nodes`, then the first `agree` tokens of `last`, a full block or a tail (None
    and 0 if there is no partial match). `tokens`: total length."""

    nodes: tuple[Node, ...] = ()
    last: Node | None = None
    agree: int = 0
    tokens: int = 0

    @property
    def path(self) -> tuple[Node, ...]:
        """All matched nodes, for `PrefixIndex.acquire`."""
        return self.nodes if self.last is None else (*self.nodes, self.last)


class Insertion(NamedTuple):
    """Result of an insertion. `node`: the node with the tokens; None if the parent has left the tree. `stored`: whether
    it is new; otherwise the caller keeps its handle. `freed`: the tail that the node replaced."""

    node: Node | None
    stored: bool
    freed: tuple[Freed, ...] = ()


class PrefixIndex:
    """Prefix index with blocks of `block` tokens. Not thread-safe.

    `size` (in the caller's unit), `nodes` and `tokens` are totals over all nodes, including detached ones.
    `stored_tokens` and `evicted_tokens` count since the start. Events of watched salts are
    recorded until `drain_events`.
    """

    def __init__(self, block: int) -> None:
        assert block > 0
        self.block = block
        self.size = 0
        self.nodes = 0
        self.tokens = 0
        self.stored_tokens = 0
        self.evicted_tokens = 0
        self._pinned = 0
        self._serial = 0
        self._roots: dict[str, Node] = {}
        self._order = EvictionOrder()
        self._log: EventLog | None = None

    @property
    def evictable(self) -> int:
        """Total size of unpinned nodes, all of which `evict` could free."""
        return self.size - self._pinned

    @property
    def salts(self) -> int:
        return len(self._roots)

    # Finding and storing -----------------------------------------------------------------------------------------

    def match(self, salt: str, tokens: Sequence[int], request: str = "") -> Match:
        """Find the longest cached prefix of `tokens`. Call `acquire` with its path before the next eviction.

        A match is a use. Repeated uses by one `request` count as one.
        """
        found = self.find(salt, tokens)
        # A few tokens of a chat template begin many prompts: a match of less than half a block is no use of it.
        if found.last is not None and 2 * found.agree >= found.last.tokens:
            self._order.use(found.last, request)
        elif found.nodes:
            self._order.use(found.nodes[-1], request)
        return found

    def find(self, salt: str, tokens: Sequence[int]) -> Match:
        """Return the same as `match`, without counting it as a use."""
        node = self._roots.get(salt)
        if node is None:
            return Match()
        block = self.block
        nodes: list[Node] = []
        for key in self._keys(tokens):
            child = None if node.children is None else node.children.get(key)
            if child is None:
                break
            nodes.append(child)
            node = child
        done = len(nodes) * block
        last, agree = node.best_child(pack(tokens[done : done + block]))
        return Match(tuple(nodes), last, agree, done + agree)

    def continuation(self, salt: str, tokens: Sequence[int], most: int) -> list[int]:
        """Return up to `most` cached tokens behind `tokens`, along the latest blocks; none where not all of `tokens`
        are cached. That is no use of the blocks."""
        at, found, more = self._roots.get(salt), self.find(salt, tokens), list[int]()
        if found.tokens < len(tokens):
            return more
        if found.nodes:
            at = found.nodes[-1]
        begun = pack(tokens[len(found.nodes) * self.block :])
        while at is not None and len(more) < most and (at := at.latest_child(begun)) is not None:
            more += unpack(at.key[len(begun) :])
            begun = b""
        return more[:most]

    def insert(
        self, parent: Node | None, salt: str, tokens: Sequence[int], handle: int, size: int, request: str = ""
    ) -> Insertion:
        """Store `tokens`, at most one block, after `parent` (a full block of the same salt; None: at the root).

        `size` must be positive. A new node has no references: call `acquire` before the next eviction.
        """
        assert 0 < len(tokens) <= self.block
        assert size > 0
        if parent is not None:
            assert parent.salt == salt
            assert parent.tokens == self.block
            if parent.state is not NodeState.LINKED:
                return Insertion(None, False)
        key = pack(tokens)
        above = parent or self._roots.get(salt)
        near, agree = above.best_child(key) if above is not None else (None, 0)
        if near is not None and agree == len(tokens):
            self._order.refresh(near)
            return Insertion(near, False)
        node = self._link(above or self._new_root(salt), key, handle, size, request)
        freed: list[Freed] = []
        if near is not None and agree == near.tokens:
            self.stored_tokens -= near.tokens
            self._unlink(near, freed)
        return Insertion(node, True, tuple(freed))

    def use(self, node: Node, request: str = "") -> None:
        """Record a use of a linked node at which the match of `request` did not end."""
        self._order.use(node, request)

    # References --------------------------------------------------------------------------------------------------

    def acquire(self, nodes: Iterable[Node]) -> None:
        """Add a reference to each of `nodes`, which pins its path until a matching `release`."""
        for node in nodes:
            assert node.state is not NodeState.FREED
            node.refs += 1
            self._add_pin(node)

    def release(self, nodes: Iterable[Node]) -> list[Freed]:
        """Drop a reference to each of `nodes`. Returns detached nodes that are freed by it."""
        freed: list[Freed] = []
        for node in nodes:
            assert node.refs > 0
            node.refs -= 1
            self._remove_pin(node, freed)
        return freed

    # Eviction ----------------------------------------------------------------------------------------------------

    def evict(self, amount: int) -> list[Freed]:
        """Free unpinned nodes with a total size of at least `amount`, or all of them if they are smaller."""
        freed: list[Freed] = []
        enough = self.size - amount
        while self.size > enough and (node := self._order.pop()) is not None:
            self.evicted_tokens += node.tokens
            self._unlink(node, freed)
        return freed

    def clear(self, salt: str | None = None) -> list[Freed]:
        """Remove all nodes of a salt, or of all salts. Pinned nodes are detached, and freed with their last
        reference."""
        salts = list(self._roots) if salt is None else [salt] if salt in self._roots else []
        freed: list[Freed] = []
        for name in salts:
            root = self._roots.pop(name)
            if self._log is not None:
                self._log.cleared(name)
            for node in reversed(list(_descendants(root))):
                self._detach(node, freed)
                node.children = node.order = None
            root.children = root.order = None
        return freed

    # Watching ----------------------------------------------------------------------------------------------------

    def watch(self, salt: str, on: bool = True) -> None:
        """Record the events of a salt from its present blocks on, or no longer."""
        if on:
            self._log = self._log or EventLog(self.block)
            self._log.watch(salt, self._roots.get(salt))
        elif self._log is not None:
            self._log.ignore(salt)
            self._log = self._log if self._log.watches else None

    def drain_events(self) -> tuple[BlockEvent, ...]:
        """Return and clear the recorded events in order; see `EventLog.drain`."""
        return () if self._log is None else self._log.drain()

    def _keys(self, tokens: Sequence[int]) -> Iterator[bytes]:
        """Yield the keys of the full blocks of `tokens`, packing twice as many blocks each time."""
        size, first, some = self.block * TOKEN_BYTES, 0, self.block
        while first + self.block <= len(tokens):
            packed = pack(tokens[first : first + some])
            for start in range(0, len(packed) - size + 1, size):
                yield packed[start : start + size]
            first += some
            some *= 2

    # The tree ----------------------------------------------------------------------------------------------------

    def _new_root(self, salt: str) -> Node:
        root = self._roots[salt] = Node(salt, b"", None, handle=-1, size=0, serial=0)
        return root

    def _link(self, parent: Node, key: bytes, handle: int, size: int, request: str) -> Node:
        self._serial += 1
        node = Node(parent.salt, key, parent, handle, size, self._serial)
        parent.add(node)
        self.size += size
        self.nodes += 1
        self.tokens += node.tokens
        self.stored_tokens += node.tokens
        self._order.add(node, request)
        self._order.enqueue(node)
        if self._log is not None:
            self._log.stored(node)
        return node

    def _unlink(self, node: Node, freed: list[Freed]) -> None:
        """Remove a leaf from the tree."""
        parent = node.parent
        assert parent is not None
        parent.remove(node)
        self._detach(node, freed)
        if parent.evictable:
            self._on_leaf(parent)

    def _on_leaf(self, node: Node) -> None:
        """Queue a new evictable leaf; remove an empty root."""
        if node.parent is None:
            del self._roots[node.salt]
        else:
            self._order.enqueue(node)

    def _detach(self, node: Node, freed: list[Freed]) -> None:
        node.state = NodeState.DETACHED
        self._order.discard(node)
        if self._log is not None:
            self._log.removed(node)
        if not node.pins:
            self._free(node, freed)

    def _free(self, node: Node, freed: list[Freed]) -> None:
        node.state = NodeState.FREED
        self.size -= node.size
        self.nodes -= 1
        self.tokens -= node.tokens
        freed.append(Freed(node.handle, node.size))

    def _add_pin(self, node: Node) -> None:
        """Add a pin to the node. A node's first pin also pins its parent."""
        at: Node | None = node
        while at is not None and at.parent is not None:
            at.pins += 1
            if at.pins > 1:
                return
            self._pinned += at.size
            at = at.parent

    def _remove_pin(self, node: Node, freed: list[Freed]) -> None:
        at: Node | None = node
        while at is not None and at.parent is not None:
            at.pins -= 1
            if at.pins:
                return
            self._pinned -= at.size
            if at.state is NodeState.DETACHED:
                self._free(at, freed)
            elif not at.children:
                self._order.enqueue(at)
            at = at.parent

    # Checking ----------------------------------------------------------------------------------------------------

    def check(self, held: Iterable[Node] = ()) -> None:
        """Assert that all books agree. `held`: each node once a reference. For tests: walks the trees."""
        refs = Counter(held)
        linked = [node for root in self._roots.values() for node in _descendants(root)]
        tree = set(linked)
        pinned = {above for node in refs for above in _path(node)}
        present = {*linked, *pinned}
        for figure, nodes in ((self.size, present), (self._pinned, pinned)):
            assert figure == sum(node.size for node in nodes)
        assert (self.nodes, self.tokens) == (len(present), sum(node.tokens for node in present))
        reasons = refs + Counter(node.parent for node in pinned)
        for node in present:
            assert node.state is (NodeState.LINKED if node in tree else NodeState.DETACHED)
            assert (node.refs, node.pins) == (refs[node], reasons[node])
            assert node.queued or not node.evictable
        for node in (*self._roots.values(), *linked):
            self._check_children(node)
        self._order.check()

    def _check_children(self, node: Node) -> None:
        children = node.children or {}
        assert children or node.parent is not None
        assert not children or node.parent is None or node.tokens == self.block
        keys = sorted(children)
        assert (node.order or keys) == keys
        assert not any(after.startswith(before) for before, after in pairwise(keys))
        for key, child in children.items():
            assert (child.key, child.parent, child.salt) == (key, node, node.salt)
            assert 0 < child.tokens <= self.block


def _path(node: Node) -> Iterator[Node]:
    """Yield the node and its ancestors below the root."""
    while node.parent is not None:
        yield node
        node = node.parent


def _descendants(root: Node) -> Iterator[Node]:
    """Yield all nodes below a root, parents first."""
    rest = list((root.children or {}).values())
    while rest:
        node = rest.pop()
        yield node
        rest.extend((node.children or {}).values())
