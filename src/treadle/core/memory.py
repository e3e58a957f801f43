"""Who may grow in a step, and who gives way where there is too little room.

Decoding rows grow first, those with the best claim before others. The row with the best claim of all counts wherever it
stands: a prompt that the newer ones' growth leaves no room would otherwise wait for their ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .room import Room
from .row import Row


def claims(rows: Iterable[Row], last_step: int) -> list[Row]:
    """Those of `rows` that have to grow by a token in the step after `last_step`, the best claim first."""
    joined = sorted((row for row in rows if row.joined), key=lambda row: row.rank)
    return [row for i, row in enumerate(joined) if row.decodes_after(last_step) or (i == 0 and row.prefill_left > 0)]


def shortage(claimants: Iterable[Row], room: Room) -> int:
    """Blocks that are missing for all of them to grow; none are where it is not positive."""
    return sum(room.growth(row.cached) for row in claimants) - room.left


def give_way(rows: Iterable[Row], short: int, room: Room) -> list[Row]:
    """Rows whose memory makes up for `short` blocks, the worst claim first; never the one with the best.

    What they share with others does not come free, so what they hold is an estimate: there may be less room than hoped
    for in the next plan, and then others follow them.
    """
    holders = sorted((row for row in rows if row.joined), key=lambda row: row.rank)
    leaving = []
    while short > 0 and len(holders) > 1:
        row = holders.pop()
        short -= room.blocks(row.cached) - row.reused // room.block + (room.growth(row.cached) if row.decodes else 0)
        leaving.append(row)
    return leaving


def grow(claimants: Sequence[Row], room: Room) -> set[Row]:
    """Take a token's room for each of them that decodes, while there is some; who got it. What a first one that
    prefills will need is left for it."""
    kept, growing = 0, set()
    for row in claimants:
        if not row.decodes:
            kept = room.growth(row.cached)
            room.left -= kept
        elif room.take(row.cached):
            growing.add(row)
    room.left += kept
    return growing
