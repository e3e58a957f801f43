"""Who may grow in a step, and who gives way where there is too little room.

Every decoding row claims the room for its next token. The row with the best claim of all counts wherever it stands: a
prompt that the newer ones' growth leaves no room would otherwise wait for their ends. Where there is too little, those
with the best claims grow and the others are held back for the step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from .block_budget import BlockBudget
from .sequence import Sequence


@dataclass(slots=True)
class DecodeDemand:
    """`rows` decode in the next step if there are `need` blocks; `kept` more are for a first row that prefills."""

    rows: list[Sequence]
    need: int
    kept: int

    def short(self, room: BlockBudget) -> int:
        """Blocks that are missing; none are where it is not positive."""
        return self.need + self.kept - room.left


def decode_demand(running: Collection[Sequence], last_step: int, room: BlockBudget) -> DecodeDemand:
    """What the rows need to go on in the step after `last_step`."""
    rows = [row for row in running if row.decodes_after(last_step) and row.joined]
    block = room.block
    need = sum(row.cached % block == 0 for row in rows)
    kept = 0
    if room.limited and len(rows) < len(running):
        first = min((row for row in running if row.joined), key=_rank, default=None)
        kept = room.growth(first.cached) if first is not None and first.prefill_left > 0 else 0
    return DecodeDemand(rows, need, kept)


def select_victims(running: Iterable[Sequence], short: int, room: BlockBudget) -> list[Sequence]:
    """Rows whose memory makes up for `short` blocks, the worst claim first; never the one with the best.

    What they share with others does not come free, so what they hold is an estimate: there may be less room than hoped
    for in the next plan, and then others follow them.
    """
    if short <= 0:
        return []
    holders = sorted((row for row in running if row.joined), key=_rank)
    leaving = []
    while short > 0 and len(holders) > 1:
        row = holders.pop()
        short -= room.blocks(row.cached) - row.reused // room.block + (room.growth(row.cached) if row.decodes else 0)
        leaving.append(row)
    return leaving


def allocate(claimed: DecodeDemand, room: BlockBudget) -> set[Sequence]:
    """Take a token's room for the rows that have not given way, while there is some; who got it."""
    if claimed.short(room) <= 0:
        room.left -= claimed.need
        return set(claimed.rows)
    room.left -= claimed.kept
    growing = {row for row in sorted(claimed.rows, key=_rank) if row.joined and room.take(row.cached)}
    room.left += claimed.kept
    return growing


def _rank(row: Sequence) -> tuple[int, int]:
    return row.rank
