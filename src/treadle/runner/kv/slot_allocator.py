"""Slots for the states of recurrent layers: two or more a sequence, and those of cached blocks. Pure numbers.

A slot holds the states of all recurrent layers after some number of a sequence's tokens. A step reads one and writes
another, so it can be computed again, and a state that is worth keeping is kept by keeping its slot. A state serves only
prompts that begin with exactly its tokens: it is attached to the block of the prefix index that ends there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ...cache.prefix_index import Match
from ..recurrent.step import FRESH
from .block_resources import BlockResources


def _ignored(slot: int) -> None:
    """Do nothing with a slot."""


@dataclass(slots=True, eq=False)
class SlotTable:
    """A sequence's slots, by the number of tokens that their states have seen."""

    states: dict[int, int] = field(default_factory=dict)


class SlotAllocator(BlockResources):
    """`count` slots. `keep` is called with each one that is attached to a block, `clear` with each one that is free
    again."""

    def __init__(
        self, count: int, keep: Callable[[int], None] = _ignored, clear: Callable[[int], None] = _ignored
    ) -> None:
        super().__init__(count, "slots for recurrent states")
        self._keep = keep
        self._clear = clear

    def usable(self, handles: Sequence[int]) -> npt.NDArray[np.bool_]:
        """Return whether the first n of the blocks with `handles` can be reused, for each n from 0 on: the last one has
        a state."""
        return np.array([True, *map(self.has, handles)])

    def reusable(self, found: Match) -> Match:
        """The part of a match after which there is a state: all of it, or whole blocks."""
        last = found.last
        if last is not None and found.agree == last.tokens and self.has(last.handle):
            return found
        nodes = found.nodes
        while nodes and not self.has(nodes[-1].handle):
            nodes = nodes[:-1]
        return Match(nodes, tokens=sum(node.tokens for node in nodes))

    def reuse(self, mine: SlotTable, handle: int, tokens: int) -> None:
        """Begin an empty table with the state of a block, which has seen `tokens` tokens."""
        slot = self._unit_of[handle]
        self._hold(slot)
        mine.states[tokens] = slot

    def leave_behind(self, mine: SlotTable, start: int, committed: int, marks: Collection[int]) -> None:
        """Let go of all states but the one that a step from `start` on reads, and those at one of `marks` that are not
        committed yet. These are kept for others as long as states of sequences that end."""
        for seen in list(mine.states):
            if seen != start and (seen > start or seen <= committed or seen not in marks):
                self._let_go(mine.states.pop(seen), last=seen in marks)

    def advance(self, mine: SlotTable, start: int, end: int) -> tuple[int, int]:
        """Return the slot of the state after `start` tokens (FRESH at the beginning), and one for that after `end`.
        Raises MemoryError where none is left."""
        mine.states[end] = self._take()
        return (mine.states[start] if start else FRESH), mine.states[end]

    def retract(self, mine: SlotTable, tokens: int, committed: int, marks: Collection[int]) -> int:
        """Let go of all states but the last one after at most `tokens` tokens, and those at one of `marks` that are not
        committed yet. Return how many tokens it has seen."""
        seen = max((seen for seen in mine.states if seen <= tokens), default=0)
        self.leave_behind(mine, seen, committed, marks)
        return seen

    def attach(self, mine: SlotTable, tokens: int, handle: int) -> None:
        """Attach the state after `tokens` tokens, if the sequence has it, to the block that ends there."""
        slot = mine.states.get(tokens)
        if slot is not None:
            mine.states[tokens] = kept = self._attach(slot, handle)
            if kept == slot:
                self._keep(slot)

    def _recycle(self, unit: int) -> None:
        super()._recycle(unit)
        self._clear(unit)

    def release(self, mine: SlotTable) -> None:
        """Let go of all states."""
        for slot in mine.states.values():
            self._let_go(slot)
        mine.states.clear()
