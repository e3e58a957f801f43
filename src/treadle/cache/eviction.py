"""Eviction order of the prefix index: unpinned leaves, least recently used first, shared prefixes generations later.

A *trunk* is a node at which requests branched. Trunks live longer, so that one long prompt does not flush prefixes that
are shared. The turns of one conversation extend each other without branching and make no trunk.

A generation ends when all non-trunk nodes that were stored or used in it are gone. A trunk lives one generation longer
for each branch, at most `MAX_LIFE`, so an unused trunk is evicted after at most that many turnovers of the cache.

A use marks only the node at which the match ended. It implies a use of the node's ancestors: an ancestor becomes a leaf
only when its children are gone, and then inherits their rank (`Node.remove`). Ranks never decrease, so a heap entry may
be outdated but is never too late; it is pushed again with its current rank when it is popped. A node has at most one
entry.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from .prefix_node import Node, NodeState

MAX_LIFE = 4
MIN_STALE = 64


class EvictionOrder:
    """Heap of evictable nodes by (generation, last use)."""

    def __init__(self) -> None:
        self._generation = 0
        self._uses = 0
        self._heap: list[tuple[tuple[int, int], int, Node]] = []
        self._stale = 0

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, node: Node, request: str) -> None:
        """Register a node stored by `request`."""
        node.last_request = request
        self.refresh(node)

    def refresh(self, node: Node) -> None:
        """Mark the node as just used."""
        self._uses += 1
        node.rank = (self._generation + 1 + min(node.branches, MAX_LIFE), self._uses)

    def use(self, node: Node, request: str) -> None:
        """Record that a match of `request` ended at the node. It is a branch if other requests continued from the node
        or ended there too. Each unnamed request counts as a different one."""
        if not request or request != node.last_request:
            node.branches += node.match_ended or bool(node.children)
            node.match_ended = True
            node.last_request = request
        self.refresh(node)

    def enqueue(self, node: Node) -> None:
        """Push an evictable node, unless it is queued."""
        if not node.queued:
            node.queued = True
            heappush(self._heap, (node.rank, node.serial, node))

    def discard(self, node: Node) -> None:
        """Note that a node left the tree without being popped; drop stale entries once they are half of the heap."""
        if node.queued:
            self._stale += 1
            if self._stale > MIN_STALE and 2 * self._stale > len(self._heap):
                self._drop_stale()

    def pop(self) -> Node | None:
        """Pop the next node to evict; None if no node is evictable."""
        while self._heap:
            rank, _, node = heappop(self._heap)
            node.queued = False
            if node.state is not NodeState.LINKED:
                self._stale -= 1
            elif node.evictable:
                if node.rank == rank:
                    self._generation = max(self._generation, rank[0])
                    return node
                self.enqueue(node)
        return None

    def check(self) -> None:
        """Assert that stale entries are counted correctly and no node is queued twice. For tests."""
        nodes = [node for _, _, node in self._heap]
        assert len(set(nodes)) == len(nodes)
        assert self._stale == sum(node.state is not NodeState.LINKED for node in nodes)

    def _drop_stale(self) -> None:
        """Remove the entries of nodes that have left the tree."""
        self._heap = [entry for entry in self._heap if entry[2].state is NodeState.LINKED]
        heapify(self._heap)
        self._stale = 0
