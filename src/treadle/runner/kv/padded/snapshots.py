"""Snapshots: the prefix cache over mlx-lm's caches, as copies of all of a sequence's after exactly n tokens (F6).

A recurrent state is of use only to a prompt that begins with exactly the tokens it has seen. So the position of a
snapshot decides which prompts can use it; there are few (`checkpoints`), as each may be as large as a sequence. Where
caches hold keys and values of all tokens and nothing else, as with latent attention, a copy can be cut.

In the index a prompt is a path of empty blocks, which show where prompts diverge. A snapshot after n tokens is a leaf
of its own: the tokens behind the last whole block, and END, which no prompt has. So it is found by exactly its tokens,
stands beside longer prompts, and is evicted on its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from ....cache.prefix_index import Freed, Match, PrefixIndex
from ....cache.prefix_node import TOKEN_BYTES, Node, pack
from ....core.statistics import PrefixStatistics
from ... import mlxlm
from ...mlxlm import Caches, MlxLm

BLOCK = 64
"""Checkpoints are at multiples of it. A prompt's last tokens are no good place: in a chat they belong to the template,
and the next turn has others there."""
LEAST = 32
"""The least tokens that a snapshot saves its users over the one before."""
NODE_BYTES = 1024
"""Host memory of a block in the index."""
END = -1
_END_KEY = pack((END,))


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A sequence's caches after `tokens` tokens. They are never written to."""

    caches: Caches
    tokens: int


class Snapshots:
    """Snapshots by their tokens. With `cuts`, caches can be cut to their first tokens. `evaluate` waits for copies, or
    only begins them."""

    def __init__(self, library: MlxLm, *, cuts: bool = False, evaluate: Callable[..., None] = mx.eval) -> None:
        self._library = library
        self._evaluate = evaluate
        self._cuts = cuts
        self._index = PrefixIndex(BLOCK)
        self._kept: dict[int, Snapshot] = {}
        self._handles = 0
        self.looked_up = self._reused = self._copied_bytes = 0
        self._stored = self._evicted = self._held = 0

    # Finding -----------------------------------------------------------------------------------------------------

    def match(self, salt: str, tokens: Sequence[int]) -> int:
        """Return the length in tokens of the longest prefix of `tokens` that is kept. Changes nothing."""
        return self._located(self._index.find(salt, tokens), tokens)[1]

    def find(self, salt: str, tokens: Sequence[int], request: str) -> Snapshot | None:
        """Return the longest prefix of `tokens` that is kept, with caches that can be written to."""
        node, count = self._located(self._index.match(salt, tokens, request), tokens)
        if node is None:
            return None
        kept = self._kept[node.handle]
        self._index.use(node, request)
        caches = mlxlm.shallow_copies(kept.caches)
        if count < kept.tokens:
            mlxlm.trim(caches, kept.tokens - count)
            self._library.detach(caches)
            self._evaluate(mlxlm.states(caches))
        self._reused += count
        leaves = self._library.leaves(caches)  # a state is replaced, keys and values are written to
        self._copied_bytes += sum(int(cache.nbytes) for cache in leaves if hasattr(cache, "keys"))
        return Snapshot(caches, count)

    def _located(self, match: Match, tokens: Sequence[int]) -> tuple[Node | None, int]:
        """Return the snapshot to use for `tokens`, and how many of them it spares."""
        return self._within(match) if self._cuts else self._deepest(match.nodes, tokens)

    def _within(self, match: Match) -> tuple[Node | None, int]:
        """The snapshot that shares most tokens with the match, and their number."""
        seen: Node | None = None
        for depth in range(len(match.path), 0, -1):
            above = match.path[depth - 1]
            if (node := _snapshot_below(above, seen)) is not None:
                return node, match.tokens if seen is None else depth * BLOCK
            seen = above
        return None, 0

    def _deepest(self, path: Sequence[Node], tokens: Sequence[int]) -> tuple[Node | None, int]:
        """The longest snapshot of a prefix of `tokens`, whose whole blocks are on `path`, and its tokens."""
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
        """Positions after which a sequence with `start` of `tokens` computed should be stored: where it diverges from
        other prompts, and shortly before its end, as many prompts have the same end; whole where it can be cut. The
        prompt is in the index from now on, so that later ones see where they diverge from it."""
        parting = len(self._index.match(salt, tokens, request).nodes) * BLOCK
        self._path(salt, tokens, request)
        ends = {len(tokens)} if self._cuts else {parting, len(tokens) // BLOCK * BLOCK}
        return sorted(end for end in ends if end - start >= LEAST)

    # Storing -----------------------------------------------------------------------------------------------------

    def store(self, salt: str, tokens: Sequence[int], caches: Caches, budget: int, request: str) -> None:
        """Store `caches` after `tokens`, at least a block, if all snapshots fit into `budget` bytes with it. Nobody
        else writes to the caches, but their arrays may be shared."""
        if self._index.match(salt, (*tokens, END), request).tokens > len(tokens):
            return
        self._library.detach(caches)
        size = mlxlm.kv_bytes(caches)
        needed = size + NODE_BYTES * (len(tokens) // BLOCK)
        if needed > budget:
            return
        self.shrink(budget - needed)
        self._evaluate(mlxlm.states(caches))
        self._handles += 1
        rest = tokens[len(tokens) // BLOCK * BLOCK :]
        self._index.insert(self._path(salt, tokens, request), salt, (*rest, END), self._handles, size, request)
        self._kept[self._handles] = Snapshot(caches, len(tokens))
        self._stored += len(tokens)
        self._held += len(tokens)

    def _path(self, salt: str, tokens: Sequence[int], request: str) -> Node | None:
        """Insert the whole blocks of `tokens` into the index; the last one."""
        node = None
        for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
            node = self._index.insert(node, salt, tokens[start : start + BLOCK], 0, NODE_BYTES, request).node
        return node

    # Evicting ---------------------------------------------------------------------------------------------------

    def shrink(self, budget: int) -> None:
        """Evict snapshots beyond `budget` bytes."""
        if self._index.size > budget:
            self._evicted += self._drop(self._index.evict(self._index.size - max(0, budget)))

    def clear(self) -> int:
        """Drop all snapshots; the number of their tokens."""
        return self._drop(self._index.clear())

    def _drop(self, freed: Sequence[Freed]) -> int:
        """Drop the snapshots among `freed`; the number of their tokens."""
        gone = [self._kept.pop(handle) for handle, _ in freed if handle]
        tokens = sum(snapshot.tokens for snapshot in gone)
        self._held -= tokens
        return tokens

    def statistics(self) -> PrefixStatistics:
        """Counters of the cache, in tokens: a snapshot of n tokens counts as n."""
        return PrefixStatistics(
            looked_up=self.looked_up,
            reused=self._reused,
            copied_bytes=self._copied_bytes,
            stored=self._stored,
            evicted=self._evicted,
            held=self._held,
            held_bytes=self._index.size,
        )


def _snapshot_below(node: Node, but: Node | None) -> Node | None:
    """A snapshot at `node` or below it, except at `but` and below."""
    rest = [node]
    while rest:
        node = rest.pop()
        if node.handle:
            return node
        rest.extend(child for child in (node.children or {}).values() if child is not but)
    return None
