"""What fits into the cache: blocks of tokens within one plan, and who may come in."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable

from .sequence import Sequence
from .shared_blocks import shared_blocks

EXPECTED = 256  # tokens that a row is expected to generate; it may go on past them while there is room


class BlockBudget:
    """Blocks of `block` tokens that one plan may still give out; `left` None: as many as it likes."""

    def __init__(self, block: int, left: int | None) -> None:
        self.block = block
        self.limited = left is not None
        self.left = sys.maxsize if left is None else left

    def blocks(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens."""
        return -(-tokens // self.block)

    def growth(self, held: int, more: int = 1) -> int:
        """Blocks that a row of `held` tokens takes for `more`."""
        return self.blocks(held + more) - self.blocks(held)

    def take(self, held: int, more: int = 1) -> bool:
        """Give a row of `held` tokens what it takes for `more`, if there is that much."""
        growth = self.growth(held, more)
        if growth > self.left:
            return False
        self.left -= growth
        return True

    def most(self, held: int) -> int:
        """How many tokens a row of `held` tokens can be given."""
        return max(0, (self.left + self.blocks(held)) * self.block - held)


class OptimisticAdmission:
    """Room that is spoken for, as rows come in one by one.

    A row is promised its prompt and what it has generated, and a block's tokens to grow by if it may come to them. It
    comes in where there is room for EXPECTED tokens of it beside the promises to others; what it then grows beyond, it
    may have to give back. Where nothing else runs it comes in, as it fits alone. Where rows that begin alike hold the
    same blocks (`holding`), what others hold of a row is not counted again.
    """

    def __init__(self, room: BlockBudget, running: Collection[Sequence], *, holding: bool = False) -> None:
        self._room = room
        self._running = running
        self._holding = holding
        self._alone = not running
        self._promised = sum(map(self._promise, running))

    def admits(self, row: Sequence) -> bool:
        need = self._room.blocks(min(row.known + EXPECTED, row.reserved)) - self._held(row)
        if not self._alone and self._promised + need > self._room.left:
            return False
        self._alone = False
        self._promised += self._promise(row)
        return True

    def _promise(self, row: Sequence) -> int:
        soon = min(row.known + row.ahead + self._room.block, row.reserved)
        return max(0, self._room.blocks(soon) - self._room.blocks(row.cached) - self._held(row))

    def _held(self, row: Sequence) -> int:
        return shared_blocks(row, self._running, self._room.block) if self._holding else 0


class TokenReservations:
    """The same where memory is not given out in blocks: each row is promised all that it may come to hold, of `limit`
    tokens in all (0: no limit)."""

    def __init__(self, limit: int, running: Iterable[Sequence]) -> None:
        self._limit = limit
        self._reserved = sum(row.reserved for row in running) if limit else 0

    def admits(self, row: Sequence) -> bool:
        if self._limit and self._reserved + row.reserved > self._limit:
            return False
        self._reserved += row.reserved
        return True
