"""Cache blocks that one plan may allocate, and the admission of waiting sequences by them."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable

from .sequence import Sequence
from .shared_blocks import shared_blocks

EXPECTED_TOKENS = 256  # of a completion; a sequence may go on past them while there are blocks


class BlockBudget:
    """Free blocks of `block_size` tokens for one plan; `free` None means no limit."""

    def __init__(self, block_size: int, free: int | None) -> None:
        self.block_size = block_size
        self.limited = free is not None
        self.free = sys.maxsize if free is None else free

    def blocks(self, tokens: int) -> int:
        """Return the number of blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_size)

    def growth(self, held: int, more: int = 1) -> int:
        """Return the blocks that a sequence of `held` tokens needs for `more` tokens."""
        return self.blocks(held + more) - self.blocks(held)

    def allocate(self, held: int, more: int = 1) -> bool:
        """Take the blocks that a sequence of `held` tokens needs for `more` tokens. Return False, and take none, if
        there are too few."""
        growth = self.growth(held, more)
        if growth > self.free:
            return False
        self.free -= growth
        return True

    def capacity(self, held: int) -> int:
        """Return how many more tokens a sequence of `held` tokens could get."""
        return max(0, (self.free + self.blocks(held)) * self.block_size - held)


class OptimisticAdmission:
    """Admission by expected need, for memory in blocks.

    Every running sequence is promised its prompt, its tokens so far, and one block to grow into. A waiting sequence is
    admitted if EXPECTED_TOKENS of its completion fit beside these promises; it may be preempted for what it needs
    beyond. With nothing else running it is always admitted, as it fits alone. With `shares_blocks`, blocks that it
    shares with running sequences are not counted again.
    """

    def __init__(self, budget: BlockBudget, running: Collection[Sequence], *, shares_blocks: bool = False) -> None:
        self._budget = budget
        self._running = running
        self._shares_blocks = shares_blocks
        self._alone = not running
        self._promised = sum(map(self._promise, running))

    def admits(self, seq: Sequence) -> bool:
        """Whether `seq` fits. If it does, its blocks are promised to it."""
        need = self._budget.blocks(min(seq.num_tokens + EXPECTED_TOKENS, seq.max_num_tokens)) - self._shared(seq)
        if not self._alone and self._promised + need > self._budget.free:
            return False
        self._alone = False
        self._promised += self._promise(seq)
        return True

    def _promise(self, seq: Sequence) -> int:
        soon = min(seq.num_tokens + seq.tokens_in_flight + self._budget.block_size, seq.max_num_tokens)
        held = self._budget.blocks(seq.num_computed_tokens) + self._shared(seq)
        return max(0, self._budget.blocks(soon) - held)

    def _shared(self, seq: Sequence) -> int:
        return shared_blocks(seq, self._running, self._budget.block_size) if self._shares_blocks else 0


class TokenReservations:
    """Admission by the most that sequences can come to, for memory that is not given out in blocks. All running ones
    together may reserve `limit` tokens (0: no limit)."""

    def __init__(self, limit: int, running: Iterable[Sequence]) -> None:
        self._limit = limit
        self._reserved = sum(seq.max_num_tokens for seq in running) if limit else 0

    def admits(self, seq: Sequence) -> bool:
        """Whether `seq` fits. If it does, its tokens are reserved."""
        if self._limit and self._reserved + seq.max_num_tokens > self._limit:
            return False
        self._reserved += seq.max_num_tokens
        return True
