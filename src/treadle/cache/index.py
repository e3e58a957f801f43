"""The index of the prefix cache: which tokens are kept, where, and what to give up first (F6).

It knows tokens, salts, sizes and use. What a node stands for (a page that rows share in place, arrays that are copied)
is the caller's: it gives each node a handle, and gets the handle back, once, when the node is freed.

- A tree per salt. A node is one block of exactly `block` tokens, or a tail of fewer, which nothing can follow.
- Nodes are equal by their tokens and their path, never by a hash, and a path never leaves its salt: what one salt
  stored, no other can find or measure.
- No child of a node is the beginning of another: a tail that something stored covers is not stored, and a longer block
  takes the place of the tail that it begins with.
- Whoever holds a node holds its path. What is held is never freed: it is detached where it has to leave the tree, and
  freed when the last one lets go.
- Only leaves are evicted, so a trunk stays as long as anything hangs on it (`eviction`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from .events import Event, Removed, Stored, chained_id
from .eviction import EvictionOrder
from .node import TOKEN_BYTES, Node, Place, pack, unpack


class Freed(NamedTuple):
    """A node is gone; its handle is the caller's again."""

    handle: int
    size: int


class Match(NamedTuple):
    """The longest cached beginning of some tokens: full blocks in order, then the first `agree` tokens of `last`, a
    full block or a tail (None and 0 where nothing more agrees). `tokens` is the length of all."""

    nodes: tuple[Node, ...] = ()
    last: Node | None = None
    agree: int = 0
    tokens: int = 0

    @property
    def path(self) -> tuple[Node, ...]:
        """All the nodes, as to be held."""
        return self.nodes if self.last is None else (*self.nodes, self.last)


class Insertion(NamedTuple):
    """`node` stands for the tokens now. If it is not `stored`, it was there before, and the caller keeps what it
    offered; None where the parent has left the tree. `freed` is the tail whose place was taken."""

    node: Node | None
    stored: bool
    freed: tuple[Freed, ...] = ()


class PrefixIndex:
    """Blocks of `block` tokens. All of it is called on one thread.

    `size` is what all nodes take, in the caller's unit, `nodes` and `tokens` their number and length, those that are
    detached but still held included. `stored_tokens` and `evicted_tokens` count since the start. With `events` true,
    what is stored and removed is recorded until `drain_events`.
    """

    def __init__(self, block: int, *, events: bool = False) -> None:
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
        self._events: list[Event] | None = [] if events else None

    @property
    def evictable(self) -> int:
        """What `evict` could free at most: the size of all that nobody holds."""
        return self.size - self._pinned

    @property
    def salts(self) -> int:
        return len(self._roots)

    # Finding and storing -----------------------------------------------------------------------------------------

    def match(self, salt: str, tokens: Sequence[int], request: str = "") -> Match:
        """The longest cached beginning of `tokens`. Hold its path before anything else can be evicted.

        It counts as a use; uses under the name of one `request` count as one.
        """
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
        last, agree = node.closest(pack(tokens[done : done + block]))
        # Many ways begin with the same few tokens of a template: they are no use of the block that goes on from there.
        if last is not None and 2 * agree >= last.tokens:
            self._order.use(last, request)
        elif nodes:
            self._order.use(node, request)
        return Match(tuple(nodes), last, agree, done + agree)

    def insert(
        self, parent: Node | None, salt: str, tokens: Sequence[int], handle: int, size: int, request: str = ""
    ) -> Insertion:
        """Store `tokens`, at most a block, after `parent`, a full block of the same salt, or at the beginning.

        `size` is above 0. A new node is held by nobody: hold it before anything else can be evicted.
        """
        assert 0 < len(tokens) <= self.block
        assert size > 0
        if parent is not None:
            assert parent.salt == salt
            assert parent.tokens == self.block
            if parent.place is not Place.LINKED:
                return Insertion(None, False)
        key = pack(tokens)
        above = parent or self._roots.get(salt)
        near, agree = above.closest(key) if above is not None else (None, 0)
        if near is not None and agree == len(tokens):
            self._order.refresh(near)
            return Insertion(near, False)
        node = self._link(above or self._root(salt), key, handle, size, request)
        freed: list[Freed] = []
        if near is not None and agree == near.tokens:
            self.stored_tokens -= near.tokens
            self._unlink(near, freed)
        return Insertion(node, True, tuple(freed))

    def use(self, node: Node, request: str = "") -> None:
        """`request` has used a linked node which its match did not end at."""
        self._order.use(node, request)

    # Holding -----------------------------------------------------------------------------------------------------

    def hold(self, nodes: Iterable[Node]) -> None:
        """Keep each of `nodes`, and its path with it, until it is let go as often as it was held."""
        for node in nodes:
            assert node.place is not Place.FREED
            node.holds += 1
            self._pin(node)

    def let_go(self, nodes: Iterable[Node]) -> list[Freed]:
        """Hold each of `nodes` once less; what had left the tree already and was held for the last time."""
        freed: list[Freed] = []
        for node in nodes:
            assert node.holds > 0
            node.holds -= 1
            self._unpin(node, freed)
        return freed

    # Giving up ---------------------------------------------------------------------------------------------------

    def evict(self, amount: int) -> list[Freed]:
        """Free nodes that nobody holds until they make up `amount`, or as much as there is."""
        freed: list[Freed] = []
        enough = self.size - amount
        while self.size > enough and (node := self._order.pop()) is not None:
            self.evicted_tokens += node.tokens
            self._unlink(node, freed)
        return freed

    def clear(self, salt: str | None = None) -> list[Freed]:
        """Forget everything of a salt, or everything. What is held can't be found any more, and is freed when it is
        let go."""
        salts = list(self._roots) if salt is None else [salt] if salt in self._roots else []
        freed: list[Freed] = []
        for name in salts:
            root = self._roots.pop(name)
            for node in reversed(list(_below(root))):
                self._detach(node, freed)
                node.children = node.order = None
            root.children = root.order = None
        return freed

    def drain_events(self) -> list[Event]:
        """What happened since the last time, in order. Empty unless the index records events."""
        if not self._events:
            return []
        events, self._events = self._events, []
        return events

    def _keys(self, tokens: Sequence[int]) -> Iterator[bytes]:
        """The keys of the full blocks of `tokens`, first few blocks and then ever more packed at a time."""
        size, first, some = self.block * TOKEN_BYTES, 0, self.block
        while first + self.block <= len(tokens):
            packed = pack(tokens[first : first + some])
            for start in range(0, len(packed) - size + 1, size):
                yield packed[start : start + size]
            first += some
            some *= 2

    # The tree ----------------------------------------------------------------------------------------------------

    def _root(self, salt: str) -> Node:
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
        self._order.begin(node, request)
        self._order.offer(node)
        if self._events is not None:
            node.id = chained_id(parent.id, parent.salt, key)
            self._events.append(Stored(node.id, parent.id, parent.salt, unpack(key)))
        return node

    def _unlink(self, node: Node, freed: list[Freed]) -> None:
        """Take a leaf out of the tree."""
        parent = node.parent
        assert parent is not None
        parent.remove(node)
        self._detach(node, freed)
        if parent.evictable:
            self._retire(parent)

    def _retire(self, node: Node) -> None:
        """A leaf that nobody holds waits for its turn; an empty root goes at once."""
        if node.parent is None:
            del self._roots[node.salt]
        else:
            self._order.offer(node)

    def _detach(self, node: Node, freed: list[Freed]) -> None:
        node.place = Place.DETACHED
        self._order.withdraw(node)
        if self._events is not None:
            self._events.append(Removed(node.id))
        if not node.pins:
            self._free(node, freed)

    def _free(self, node: Node, freed: list[Freed]) -> None:
        node.place = Place.FREED
        self.size -= node.size
        self.nodes -= 1
        self.tokens -= node.tokens
        freed.append(Freed(node.handle, node.size))

    def _pin(self, node: Node) -> None:
        """One more reason to keep the node; a node's first one is one for its parent."""
        at: Node | None = node
        while at is not None and at.parent is not None:
            at.pins += 1
            if at.pins > 1:
                return
            self._pinned += at.size
            at = at.parent

    def _unpin(self, node: Node, freed: list[Freed]) -> None:
        at: Node | None = node
        while at is not None and at.parent is not None:
            at.pins -= 1
            if at.pins:
                return
            self._pinned -= at.size
            if at.place is Place.DETACHED:
                self._free(at, freed)
            elif not at.children:
                self._order.offer(at)
            at = at.parent

    # Checking ----------------------------------------------------------------------------------------------------

    def check(self, held: Iterable[Node] = ()) -> None:
        """Assert that everything agrees; `held` is each node as often as it is held. For tests: it walks the tree."""
        holds = Counter(held)
        linked = [node for root in self._roots.values() for node in _below(root)]
        tree = set(linked)
        pinned = {above for node in holds for above in _path(node)}
        present = {*linked, *pinned}
        for figure, nodes in ((self.size, present), (self._pinned, pinned)):
            assert figure == sum(node.size for node in nodes)
        assert (self.nodes, self.tokens) == (len(present), sum(node.tokens for node in present))
        reasons = holds + Counter(node.parent for node in pinned)
        for node in present:
            assert node.place is (Place.LINKED if node in tree else Place.DETACHED)
            assert (node.holds, node.pins) == (holds[node], reasons[node])
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
    """The node and all above it but the root."""
    while node.parent is not None:
        yield node
        node = node.parent


def _below(root: Node) -> Iterator[Node]:
    """All nodes under a root, parents first."""
    rest = list((root.children or {}).values())
    while rest:
        node = rest.pop()
        yield node
        rest.extend((node.children or {}).values())
