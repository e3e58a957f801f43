"""Event log of the prefix index: blocks of watched salts, stored after their parents and removed before them.

A salt that is watched from some moment on begins with BlocksCleared. The blocks that are in the tree then are announced
a few at a time, so that no step waits for thousands of them: each after its parent, and what changes meanwhile in its
turn. A block that follows one which is not announced yet is announced with it.
"""

from __future__ import annotations

from hashlib import blake2b

from ..core.messages import BlockEvent, BlockRemoved, BlocksCleared, BlockStored
from .prefix_node import Node, NodeState, unpack

ANNOUNCED_AT_ONCE = 128
"""Blocks that were there before the watch, in one report: a third of a millisecond."""


class EventLog:
    """Events of full blocks of `block` tokens, of the salts that are watched. Tails are left out: routers compare whole
    blocks."""

    def __init__(self, block: int) -> None:
        self._block = block
        self._ids: dict[str, dict[Node, int]] = {}  # of the blocks that are announced
        self._waiting: list[Node] = []  # their parents are announced
        self._events: list[BlockEvent] = []

    @property
    def watches(self) -> bool:
        """Whether any salt is watched."""
        return bool(self._ids)

    def watch(self, salt: str, root: Node | None) -> None:
        """Start a salt anew; `root` is that of its tree."""
        self.ignore(salt)
        self._ids[salt] = {}
        self._events.append(BlocksCleared(salt))
        if root is not None:
            self._follow(root)

    def ignore(self, salt: str) -> None:
        """Forget a salt, with its events that were not drained."""
        if self._ids.pop(salt, None) is not None:
            self._events = [event for event in self._events if event.salt != salt]
            self._waiting = [node for node in self._waiting if node.salt != salt]

    def stored(self, node: Node) -> None:
        """A node was linked."""
        ids = self._ids.get(node.salt)
        if ids is not None and node.tokens == self._block:
            parent = node.parent
            assert parent is not None
            if parent.parent is None or parent in ids:
                self._announce(node, ids)

    def removed(self, node: Node) -> None:
        """A node has left the tree."""
        ids = self._ids.get(node.salt)
        if ids is not None and (id_ := ids.pop(node, None)) is not None:
            self._events.append(BlockRemoved(node.salt, id_))

    def cleared(self, salt: str) -> None:
        """All nodes of a salt are about to leave the tree."""
        if salt in self._ids:
            self.watch(salt, None)

    def drain(self) -> tuple[BlockEvent, ...]:
        """Return the events since the last call, in order, and the next blocks that were there before. Empty once all
        are announced."""
        enough = len(self._events) + ANNOUNCED_AT_ONCE
        while self._waiting and len(self._events) < enough:
            node = self._waiting.pop()
            ids = self._ids[node.salt]
            if node.state is NodeState.LINKED:
                self._announce(node, ids)
                self._follow(node)
        events, self._events = self._events, []
        return tuple(events)

    def _announce(self, node: Node, ids: dict[Node, int]) -> None:
        parent = 0 if node.parent is None else ids.get(node.parent, 0)
        ids[node] = id_ = chained_id(parent, node.salt, node.key)
        self._events.append(BlockStored(node.salt, id_, parent, unpack(node.key)))

    def _follow(self, node: Node) -> None:
        """Announce the node's children next."""
        self._waiting += [child for child in (node.children or {}).values() if child.tokens == self._block]


def chained_id(parent: int, salt: str, key: bytes) -> int:
    """The same for the same path under the same salt, in any process: a signed 64-bit number, as routers take it.

    It names blocks for others. Nothing is ever found by it.
    """
    name = salt.encode("utf-8", "surrogatepass")
    digest = blake2b(parent.to_bytes(8, "little", signed=True), digest_size=8)
    digest.update(len(name).to_bytes(4, "little"))
    digest.update(name)
    digest.update(key)
    return int.from_bytes(digest.digest(), "little", signed=True)
