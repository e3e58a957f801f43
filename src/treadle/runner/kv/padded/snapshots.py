"""What is kept of prompts that are in mlx-lm's caches: copies of all of a row's after exactly so many tokens (F6).

A recurrent state is of use only to a prompt that begins with exactly the tokens it has seen. So who decides where a
copy is taken decides who can use it: there are few of them (`marks`), as each may be as large as a row. Where there are
keys and values of all tokens and nothing else, as with latent attention, a copy can be cut to what a prompt shares.

In the index a prompt is a path of blocks that stand for nothing, so that it is known where prompts part. A snapshot
after n tokens is a leaf of its own: the tokens behind the last whole block, and END, which no prompt has. So it is
found by exactly its tokens, has its place beside those that go on the same way, and its own turn to be given up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from ....cache.index import Freed, Match, PrefixIndex
from ....cache.node import TOKEN_BYTES, Node, pack
from ....core.messages import PrefixStatistics
from ... import mlxlm
from ...mlxlm import Caches, MlxLm

BLOCK = 64
"""While prompts are read, states are kept after multiples of it. Their last tokens are no good place: in a chat they
belong to the template, and the next turn has others there."""
LEAST = 32
"""Tokens that a snapshot has to spare whoever uses it, over the one before."""
NODE_BYTES = 1024
"""What a block of a prompt takes in the index, in the host's memory."""
END = -1
_END_KEY = pack((END,))


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A row's caches after `tokens` tokens. Nobody writes to them."""

    caches: Caches
    tokens: int


class Snapshots:
    """Snapshots of rows, by their tokens. `cuts` says whether caches can be cut to their first tokens."""

    def __init__(self, library: MlxLm, *, cuts: bool = False) -> None:
        self._library = library
        self._cuts = cuts
        self._index = PrefixIndex(BLOCK)
        self._kept: dict[int, Snapshot] = {}
        self._handles = 0
        self._looked_up = self._reused = self._copied_bytes = 0
        self._stored = self._evicted = self._held = 0

    # Finding -----------------------------------------------------------------------------------------------------

    def find(self, salt: str, tokens: Sequence[int], request: str) -> Snapshot | None:
        """The longest beginning of `tokens` that is kept, with caches that can be written to."""
        self._looked_up += len(tokens)
        match = self._index.match(salt, tokens, request)
        node, count = self._within(match) if self._cuts else self._deepest(match.nodes, tokens)
        if node is None:
            return None
        kept = self._kept[node.handle]
        self._index.use(node, request)
        caches = mlxlm.shallow_copies(kept.caches)
        if count < kept.tokens:
            mlxlm.trim(caches, kept.tokens - count)
            self._library.detach(caches)
            mx.eval(mlxlm.states(caches))
        self._reused += count
        leaves = self._library.leaves(caches)  # a state is replaced, keys and values are written to
        self._copied_bytes += sum(int(cache.nbytes) for cache in leaves if hasattr(cache, "keys"))
        return Snapshot(caches, count)

    def _within(self, match: Match) -> tuple[Node | None, int]:
        """A snapshot that begins with as much of what is matched as any, and how much that is."""
        seen: Node | None = None
        for depth in range(len(match.path), 0, -1):
            above = match.path[depth - 1]
            if (node := _snapshot_below(above, seen)) is not None:
                return node, match.tokens if seen is None else depth * BLOCK
            seen = above
        return None, 0

    def _deepest(self, path: Sequence[Node], tokens: Sequence[int]) -> tuple[Node | None, int]:
        """The last snapshot on the way of `tokens`, the whole blocks of which are on `path`, and how long it is."""
        for depth in range(len(path), 0, -1):
            children = path[depth - 1].children
            if children is None or (depth < len(path) and len(children) == 1):
                continue
            behind = pack(tokens[depth * BLOCK : (depth + 1) * BLOCK - 1])
            for end in range(len(behind), -1, -TOKEN_BYTES):
                if (node := children.get(behind[:end] + _END_KEY)) is not None:
                    return node, depth * BLOCK + end // TOKEN_BYTES
        return None, 0

    def checkpoints(self, salt: str, tokens: Sequence[int], start: int, request: str) -> list[int]:
        """After how many tokens a row that has `start` of `tokens` should be kept: where its way parts from those of
        others, and before its end, as many prompts have the same end; what can be cut is kept whole. From now on others
        see where theirs part."""
        parting = len(self._index.match(salt, tokens, request).nodes) * BLOCK
        self._path(salt, tokens, request)
        ends = {len(tokens)} if self._cuts else {parting, len(tokens) // BLOCK * BLOCK}
        return sorted(end for end in ends if end - start >= LEAST)

    # Keeping -----------------------------------------------------------------------------------------------------

    def store(self, salt: str, tokens: Sequence[int], caches: Caches, room: int, request: str) -> None:
        """Keep `caches` after `tokens`, at least a block, if there is room in `room` bytes for all that is kept. They
        are nobody else's, but their arrays may be."""
        if self._index.match(salt, (*tokens, END), request).tokens > len(tokens):
            return
        self._library.detach(caches)
        size = mlxlm.kv_bytes(caches)
        needed = size + NODE_BYTES * (len(tokens) // BLOCK)
        if needed > room:
            return
        self.shrink(room - needed)
        mx.eval(mlxlm.states(caches))
        self._handles += 1
        rest = tokens[len(tokens) // BLOCK * BLOCK :]
        self._index.insert(self._path(salt, tokens, request), salt, (*rest, END), self._handles, size, request)
        self._kept[self._handles] = Snapshot(caches, len(tokens))
        self._stored += len(tokens)
        self._held += len(tokens)

    def _path(self, salt: str, tokens: Sequence[int], request: str) -> Node | None:
        """The last whole block of `tokens`; it and those before are in the index now."""
        node = None
        for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
            node = self._index.insert(node, salt, tokens[start : start + BLOCK], 0, NODE_BYTES, request).node
        return node

    # Giving up ---------------------------------------------------------------------------------------------------

    def shrink(self, room: int) -> None:
        """Take no more than `room` bytes."""
        if self._index.size > room:
            self._evicted += self._drop(self._index.evict(self._index.size - max(0, room)))

    def clear(self) -> int:
        """Forget everything; how many tokens were kept."""
        return self._drop(self._index.clear())

    def _drop(self, freed: Sequence[Freed]) -> int:
        """Forget the snapshots among `freed`; how many tokens they had."""
        gone = [self._kept.pop(handle) for handle, _ in freed if handle]
        tokens = sum(snapshot.tokens for snapshot in gone)
        self._held -= tokens
        return tokens

    def statistics(self) -> PrefixStatistics:
        """What was reused, and is kept to be: a snapshot of n tokens counts as n."""
        return PrefixStatistics(
            looked_up=self._looked_up,
            reused=self._reused,
            copied_bytes=self._copied_bytes,
            stored=self._stored,
            evicted=self._evicted,
            held=self._held,
            held_bytes=self._index.size,
        )


def _snapshot_below(node: Node, but: Node | None) -> Node | None:
    """A snapshot at `node` or below, not looking at and below `but`."""
    rest = [node]
    while rest:
        node = rest.pop()
        if node.handle:
            return node
        rest.extend(child for child in (node.children or {}).values() if child is not but)
    return None
