"""In which order nodes of the prefix index are given up: leaves that nobody holds, least recently used first, but
trunks generations later.

A trunk is a node where the ways of requests parted, so that one long prompt of its own does not flush what others
share. Turns of one conversation follow each other and part nowhere: their number makes no trunk.

A generation ends when all that was stored or used in it, and is no trunk, is gone. A trunk lives one generation longer
for each way that parted there, `LONGEST_LIFE` at most: one that nobody uses any more goes after so many turnovers of
the cache.

Only where a match ended is marked as used. Whoever used a child used its parents, and a parent is no leaf before the
child is gone: then it takes over the child's rank (`Node.remove`). Ranks only ever rise, so a heap entry may be out of
date, is at most too early, and is put back with the right rank when it comes up. A node has at most one entry.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from .node import Node, Place

LONGEST_LIFE = 4
FEW = 64


class EvictionOrder:
    """Which node goes next."""

    def __init__(self) -> None:
        self._generation = 0
        self._uses = 0
        self._heap: list[tuple[tuple[int, int], int, Node]] = []
        self._stale = 0

    def __len__(self) -> int:
        return len(self._heap)

    def begin(self, node: Node, request: str) -> None:
        """`request` has stored the node."""
        node.user = request
        self.refresh(node)

    def refresh(self, node: Node) -> None:
        """The node was used just now."""
        self._uses += 1
        node.rank = (self._generation + 1 + min(node.parted, LONGEST_LIFE), self._uses)

    def use(self, node: Node, request: str) -> None:
        """A match of `request` ended at the node: if others went on from there, or ended there too, the ways part.
        An unnamed request is another one each time."""
        if not request or request != node.user:
            node.parted += node.ended or bool(node.children)
            node.ended = True
            node.user = request
        self.refresh(node)

    def offer(self, node: Node) -> None:
        """An evictable node is up for its turn."""
        if not node.queued:
            node.queued = True
            heappush(self._heap, (node.rank, node.serial, node))

    def withdraw(self, node: Node) -> None:
        """A node has left the tree otherwise than by its turn."""
        if node.queued:
            self._stale += 1
            if self._stale > FEW and 2 * self._stale > len(self._heap):
                self._sweep()

    def pop(self) -> Node | None:
        """The next to go; None where there is nothing evictable."""
        while self._heap:
            rank, _, node = heappop(self._heap)
            node.queued = False
            if node.place is not Place.LINKED:
                self._stale -= 1
            elif node.evictable:
                if node.rank == rank:
                    self._generation = max(self._generation, rank[0])
                    return node
                self.offer(node)
        return None

    def check(self) -> None:
        """Assert that what waits is counted right, and waits once. For tests."""
        nodes = [node for _, _, node in self._heap]
        assert len(set(nodes)) == len(nodes)
        assert self._stale == sum(node.place is not Place.LINKED for node in nodes)

    def _sweep(self) -> None:
        """Drop the entries of nodes that are gone."""
        self._heap = [entry for entry in self._heap if entry[2].place is Place.LINKED]
        heapify(self._heap)
        self._stale = 0
