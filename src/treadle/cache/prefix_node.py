"""Node of the prefix index: one block of tokens and its child blocks.

Tokens are packed into 8 bytes each, so a block is one dictionary key, compared by its bytes. No child's key is a prefix
of another child's. Among children sorted by key, the one with the longest common prefix with a given key is adjacent
to that key's insertion point.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

TOKEN_BYTES = 8
MOST_COMPARED = 16
"""Most children with a common beginning of which the latest is searched."""


class NodeState(Enum):
    """LINKED: in the tree. DETACHED: out of the tree, but still referenced. FREED: its handle was returned."""

    LINKED = 1
    DETACHED = 2
    FREED = 3


def pack(tokens: Sequence[int]) -> bytes:
    """Pack tokens (signed 64-bit integers) into a key."""
    return array("q", tokens).tobytes()


def unpack(key: bytes) -> tuple[int, ...]:
    return struct.unpack(f"{len(key) // TOKEN_BYTES}q", key)


def common_prefix(one: bytes, other: bytes) -> int:
    """Return the number of tokens in the common prefix of two keys."""
    shorter = min(len(one), len(other))
    if one[:shorter] == other[:shorter]:
        return shorter // TOKEN_BYTES
    differ = int.from_bytes(one[:shorter], "little") ^ int.from_bytes(other[:shorter], "little")
    return ((differ & -differ).bit_length() - 1) // (8 * TOKEN_BYTES)


@dataclass(slots=True, eq=False)
class Node:
    """A block, with the caller's `handle` and `size`. A root has neither tokens nor parent.

    `refs`: references to this node. `pins`: `refs` plus the number of pinned children; a node is pinned while it or a
    descendant is referenced. Fields of the eviction order: `rank`; `last_request`, the last to use the node;
    `match_ended`, whether a match of another request ended here; `branches`, the number of branches counted here;
    `queued`, whether the node is in the heap.
    """

    salt: str
    key: bytes
    parent: Node | None
    handle: int
    size: int
    serial: int
    state: NodeState = NodeState.LINKED
    refs: int = 0
    pins: int = 0
    rank: tuple[int, int] = (0, 0)
    last_request: str = ""
    match_ended: bool = False
    branches: int = 0
    queued: bool = False
    children: dict[bytes, Node] | None = None
    order: list[bytes] | None = None  # sorted keys of the children, if there are two or more

    @property
    def tokens(self) -> int:
        """Number of tokens in the block."""
        return len(self.key) // TOKEN_BYTES

    @property
    def evictable(self) -> bool:
        """Whether the node is an unpinned leaf of the tree."""
        return self.state is NodeState.LINKED and not self.children and not self.pins

    def add(self, child: Node) -> None:
        """Link a child. Its key must not be a prefix of another child's, nor the reverse."""
        if self.children is None:
            self.children = {child.key: child}
            return
        self.children[child.key] = child
        if self.order is not None:
            insort(self.order, child.key)
        else:
            self.order = sorted(self.children)

    def remove(self, child: Node) -> None:
        """Unlink a child. The parent inherits its rank and branches, as every use of the child was a use of the
        parent."""
        assert self.children is not None
        del self.children[child.key]
        if self.order is not None:
            del self.order[bisect_left(self.order, child.key)]
            if len(self.order) == 1:
                self.order = None
        if not self.children:
            self.children = None
        self.rank = max(self.rank, child.rank)
        self.branches += child.branches

    def best_child(self, key: bytes) -> tuple[Node | None, int]:
        """Return the child with the longest common prefix with `key` and that length in tokens; (None, 0) if there is
        none."""
        best, agreed = None, 0
        if self.children is not None:
            for near in self._neighbours(key):
                if (same := common_prefix(near, key)) > agreed:
                    best, agreed = self.children[near], same
        return best, agreed

    def latest_child(self, beginning: bytes) -> Node | None:
        """Return the latest stored child whose key begins with `beginning`; of many children, one of the first."""
        children = self.children or {}
        keys: Iterable[bytes] = children
        if self.order is not None:
            at = bisect_left(self.order, beginning)
            keys = self.order[at : at + MOST_COMPARED]
        found = (children[key] for key in keys if key.startswith(beginning))
        return max(found, key=lambda child: child.serial, default=None)

    def _neighbours(self, key: bytes) -> Sequence[bytes]:
        """Return the keys on either side of `key`'s insertion point, or the only child's."""
        if self.order is None:
            return tuple(self.children or ())
        at = bisect_left(self.order, key)
        return self.order[max(at - 1, 0) : at + 1]
