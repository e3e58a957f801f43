"""Rows that have buffers of their own: what MLX's stock operations attend over without masks, on any device.

Joining, leaving and growing touch nobody else, and a row takes the memory of the tokens it holds. Prefixes are kept as
copies of blocks, made as they are completed, and of what a row leaves behind its last whole one; the row that reuses
them copies them once more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ....cache.index import Freed, PrefixIndex
from ....cache.node import Node
from ....cache.store import BlockStore
from ....core.messages import PrefixStatistics, Sharing
from ...forward.ragged import PlacedSegment, RowSegment
from .buffer import STEP, Buffer
from .layer import ContiguousLayer, Pass

PREFIX_BLOCK = 32
"""Tokens of a block that can be reused."""


class _Row:
    """A row's buffers, one a layer, with the first `settled` of its `tokens`, and its place in the index, which has
    `kept` of them."""

    def __init__(self, buffers: list[Buffer], salt: str) -> None:
        self.buffers = buffers
        self.salt = salt
        self.tokens: Sequence[int] = ()
        self.settled = 0
        self.kept = 0
        self.node: Node | None = None
        self.shares = True

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)


class ContiguousLayout:
    """`windows` has one number a layer, 0 where it sees everything. `budget` bytes (0: no limit) hold rows and kept
    prefixes; rows get `blocks` blocks of it. `keeps` says whether prefixes are kept at all, `plain` how single tokens
    attend (`layer`)."""

    block = STEP
    lookahead = 0
    in_sizes = False
    sharing = Sharing.COPIED

    def __init__(
        self,
        windows: Sequence[int],
        *,
        blocks: int = 0,
        budget: int = 0,
        keeps: bool = True,
        plain: bool = False,
    ) -> None:
        self.blocks = blocks
        self._windows = list(windows)
        self._budget = budget
        self._step = Pass()
        self._layers = [ContiguousLayer(i, w, self._step, plain=plain) for i, w in enumerate(windows)]
        self._rows: dict[str, _Row] = {}
        self._index = PrefixIndex(PREFIX_BLOCK) if keeps else None
        self._store = BlockStore()
        self._looked_up = self._reused = 0

    def layers(self) -> list[Any]:
        return list(self._layers)

    def room(self) -> int:
        held = sum(-(-row.buffers[0].end // STEP) for row in self._rows.values())
        return max(0, self.blocks - held)

    def row_bytes(self) -> int:
        return sum(row.nbytes for row in self._rows.values())

    # Rows --------------------------------------------------------------------------------------------------------

    def reuse(self, row: str, salt: str, tokens: Sequence[int]) -> int:
        self.release(row)
        mine = self._new(row, salt)
        if self._index is None:
            return 0
        self._looked_up += len(tokens)
        found = self._index.match(salt, tokens, row)
        if not found.tokens:
            return 0
        sizes = [PREFIX_BLOCK] * len(found.nodes) + ([found.agree] if found.last is not None else [])
        handles = [node.handle for node in found.path]
        for layer, buffer in enumerate(mine.buffers):
            first = max(0, found.tokens - (buffer.window - 1 + buffer.slack)) if buffer.window else 0
            skip = first // PREFIX_BLOCK
            keys, values = self._store.parts(layer, handles[skip:], sizes[skip:])
            buffer.begin_with(keys, values, skip * PREFIX_BLOCK)
        mx.eval([(buffer.keys, buffer.values) for buffer in mine.buffers])
        self._store.copied_bytes += mine.nbytes
        mine.kept, mine.node = len(found.nodes) * PREFIX_BLOCK, found.nodes[-1] if found.nodes else None
        self._reused += found.tokens
        return found.tokens

    def admit(self, row: str, salt: str, tokens: Sequence[int] = ()) -> None:
        mine = self._rows.get(row) or self._new(row, salt)
        mine.tokens = tokens

    def _new(self, row: str, salt: str) -> _Row:
        self._rows[row] = _Row([Buffer(w, PREFIX_BLOCK) for w in self._windows], salt)
        return self._rows[row]

    def release(self, row: str) -> None:
        """What it has behind its last whole block is kept as well."""
        mine = self._rows.pop(row, None)
        if mine is not None and self._index is not None and mine.shares and mine.kept < mine.settled:
            self._keep(mine, row, mine.tokens[mine.kept : mine.settled])
            self._store.flush()
            self._trim()

    def lose(self, row: str) -> None:
        self._rows.pop(row, None)
        self._step.rows = {}  # the pass that failed never came to `written`

    # Passes ------------------------------------------------------------------------------------------------------

    def order(self, pieces: Sequence[RowSegment]) -> list[RowSegment]:
        """Single tokens first."""
        return sorted(pieces, key=lambda piece: len(piece.tokens) > 1)

    def begin(self, placed: Sequence[PlacedSegment], positions: npt.NDArray[np.int32]) -> None:
        self._step.singles = [piece for piece in placed if piece.count == 1]
        self._step.longer = [piece for piece in placed if piece.count > 1]
        self._step.positions = mx.array(positions)
        self._step.rows = {piece.id: self._rows[piece.id].buffers for piece in placed}
        for piece in placed:  # a pass that is computed again writes over what it wrote
            for buffer in self._step.rows[piece.id]:
                buffer.cut(piece.start)

    def written(self) -> list[Any]:
        arrays = [(b.keys, b.values) for buffers in self._step.rows.values() for b in buffers]
        self._step.rows = {}  # the graph is built: nothing here keeps a row that leaves
        return arrays

    # Prefixes ----------------------------------------------------------------------------------------------------

    def settle(self, held: Mapping[str, int]) -> None:
        if self._index is None:
            return
        for row, count in held.items():
            mine = self._rows.get(row)
            if mine is not None:
                full, mine.settled = mine.settled // PREFIX_BLOCK, count
                if full < count // PREFIX_BLOCK:
                    self._keep_blocks(mine, row)

    def _keep_blocks(self, mine: _Row, row: str) -> None:
        while mine.shares and mine.kept + PREFIX_BLOCK <= mine.settled:
            self._keep(mine, row, mine.tokens[mine.kept : mine.kept + PREFIX_BLOCK])
        self._store.flush()
        self._trim()

    def _keep(self, mine: _Row, row: str, tokens: Sequence[int]) -> None:
        """Copy the next block, or the end, unless it is there already."""
        assert self._index is not None
        start, end = mine.kept, mine.kept + len(tokens)
        if any(buffer.base > start for buffer in mine.buffers):
            mine.shares = False
            return
        size = sum(buffer.nbytes * len(tokens) // buffer.keys.shape[2] for buffer in mine.buffers)
        handle = self._store.new_handle()
        done = self._index.insert(mine.node, mine.salt, tokens, handle, size, row)
        self._free(done.freed)
        if done.node is None:
            mine.shares = False  # what it continues was given up: nothing more of it can be found
            return
        if done.stored:
            self._store.put(handle, [buffer.between(start, end) for buffer in mine.buffers])
        mine.kept, mine.node = end, done.node

    def _trim(self) -> None:
        """Keep no more than the budget leaves beside the rows."""
        if self._index is None or not self._budget:
            return
        over = self.row_bytes() + self._index.size - self._budget
        if over > 0:
            self._free(self._index.evict(over))

    def _free(self, freed: Sequence[Freed]) -> None:
        for handle, _ in freed:
            self._store.drop(handle)

    def close(self) -> None:
        self._rows.clear()
        self._step.rows = {}
        if self._index is not None:
            self._free(self._index.clear())

    def reset(self) -> int:
        if self._index is None:
            return 0
        tokens = self._index.tokens
        self._free(self._index.clear())
        for row in self._rows.values():
            row.shares = False
        return tokens

    def statistics(self) -> PrefixStatistics:
        index = self._index
        if index is None:
            return PrefixStatistics()
        return PrefixStatistics(
            looked_up=self._looked_up,
            reused=self._reused,
            copied_bytes=self._store.copied_bytes,
            stored=index.stored_tokens,
            evicted=index.evicted_tokens,
            held=index.tokens,
            held_bytes=index.size,
        )
