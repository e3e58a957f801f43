"""What a row that has not joined will hold together with one that has: blocks that cost it nothing (`Sharing.HELD`).

Only what the steps that were applied have brought counts, so a prompt that many wait for is counted for each of them
until it is computed. Where the other one ends first, its blocks are the cache's, and what was let in on them may have
to give way. It costs little: a row remembers whom it is compared with, and no more than MOST_TWINS are.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice

from .inflight_prefix import shared
from .sequence import Sequence

MOST_TWINS = 4


def shared_blocks(row: Sequence, running: Collection[Sequence], block: int) -> int:
    """Whole blocks of `block` tokens that `row` begins with and one of those that are `running` holds."""
    if row.joined or row.request.prompt_logprobs is not None:
        return 0
    if row.twin is None or not (row.twin.live and row.twin.joined):
        row.twin = _closest(row, running, block)
    return 0 if row.twin is None else min(row.common, row.twin.kept) // block


def _closest(row: Sequence, running: Collection[Sequence], block: int) -> Sequence | None:
    salt, first = row.request.salt, row.request.prompt[:block]
    alike = (r for r in running if r.joined and r.request.salt == salt and r.request.prompt[:block] == first)
    twin, row.common = None, 0
    for other in islice(alike, MOST_TWINS):
        common = shared(row.request.prompt, other.request.prompt)
        if common > row.common:
            twin, row.common = other, common
    return twin
