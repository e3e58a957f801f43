"""One block of tokens in the prefix index, and the blocks that continue it.

Tokens are kept packed, 8 bytes each: a block is one dictionary key that compares by its bytes alone. No child of a node
is the beginning of another one. With the children in the order of their bytes, the one that agrees longest with given
tokens stands next to where these would be inserted.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

TOKEN_BYTES = 8


class Place(Enum):
    """LINKED nodes can be found. DETACHED ones are out of the tree, but still held. FREED ones are gone."""

    LINKED = 1
    DETACHED = 2
    FREED = 3


def pack(tokens: Sequence[int]) -> bytes:
    """The key of some tokens (any integers of 64 bits)."""
    return array("q", tokens).tobytes()


def unpack(key: bytes) -> tuple[int, ...]:
    return struct.unpack(f"{len(key) // TOKEN_BYTES}q", key)


def agreement(one: bytes, other: bytes) -> int:
    """With how many of the same tokens two keys begin."""
    shorter = min(len(one), len(other))
    if one[:shorter] == other[:shorter]:
        return shorter // TOKEN_BYTES
    differ = int.from_bytes(one[:shorter], "little") ^ int.from_bytes(other[:shorter], "little")
    return ((differ & -differ).bit_length() - 1) // (8 * TOKEN_BYTES)


@dataclass(slots=True, eq=False)
class Node:
    """A block, with the caller's `handle` and `size`. A root has neither tokens nor parent.

    `holds` counts who holds this very node; `pins` adds the children that are pinned: a node is pinned while anyone
    holds it or something below it. `id` is 0 unless the index records events. The rest is the eviction order's: `rank`,
    the last `user`, whether a match of another one `ended` here, and how many ways `parted` here.
    """

    salt: str
    key: bytes
    parent: Node | None
    handle: int
    size: int
    serial: int
    id: int = 0
    place: Place = Place.LINKED
    holds: int = 0
    pins: int = 0
    rank: tuple[int, int] = (0, 0)
    user: str = ""
    ended: bool = False
    parted: int = 0
    queued: bool = False
    children: dict[bytes, Node] | None = None
    order: list[bytes] | None = None  # keys of the children, sorted, where there are two or more

    @property
    def tokens(self) -> int:
        """How many tokens the block has."""
        return len(self.key) // TOKEN_BYTES

    @property
    def evictable(self) -> bool:
        """Nothing hangs on it and nobody holds it."""
        return self.place is Place.LINKED and not self.children and not self.pins

    def add(self, child: Node) -> None:
        """Link a child that no other child begins, and that begins no other."""
        if self.children is None:
            self.children = {child.key: child}
            return
        self.children[child.key] = child
        if self.order is not None:
            insort(self.order, child.key)
        else:
            self.order = sorted(self.children)

    def remove(self, child: Node) -> None:
        """Unlink a child. What was known of its use is the parent's now, as who used the child used the parent."""
        assert self.children is not None
        del self.children[child.key]
        if self.order is not None:
            del self.order[bisect_left(self.order, child.key)]
            if len(self.order) == 1:
                self.order = None
        if not self.children:
            self.children = None
        self.rank = max(self.rank, child.rank)
        self.parted += child.parted

    def closest(self, key: bytes) -> tuple[Node | None, int]:
        """The child that agrees with the most tokens of `key`, at least one, and with how many; else None and 0."""
        best, agreed = None, 0
        if self.children is not None:
            for near in self._beside(key):
                if (same := agreement(near, key)) > agreed:
                    best, agreed = self.children[near], same
        return best, agreed

    def _beside(self, key: bytes) -> Sequence[bytes]:
        """Keys of the only child, or of those on either side of `key`'s place."""
        if self.order is None:
            return tuple(self.children or ())
        at = bisect_left(self.order, key)
        return self.order[max(at - 1, 0) : at + 1]
