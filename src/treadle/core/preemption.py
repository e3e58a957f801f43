"""Allocation of cache blocks to decoding sequences, and the choice of victims when there are too few.

Every decoding sequence demands the block of its next token. One block more, or those of the image that comes next, are
reserved for the sequence with the best rank while it prefills: otherwise the growth of newer sequences could hold its
prompt up until they end. When blocks are short, sequences are served by rank and the rest skip the step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from .block_budget import BlockBudget
from .sequence import Sequence


@dataclass(slots=True)
class DecodeDemand:
    """Sequences that can decode in the next step, the blocks they need for one token each, and the blocks reserved for
    the prompt of the best-ranked sequence."""

    sequences: list[Sequence]
    blocks: int
    reserved: int

    def shortfall(self, budget: BlockBudget) -> int:
        """Return the number of missing blocks; zero or less if there are enough."""
        return self.blocks + self.reserved - budget.free


def decode_demand(
    running: Collection[Sequence], last_step: int, budget: BlockBudget, *, whole_images: bool = False
) -> DecodeDemand:
    """Return the demand of the step after `last_step`. `whole_images`: one chunk computes all tokens of an image."""
    sequences = [seq for seq in running if seq.decodes_after(last_step) and seq.joined]
    size = budget.block_size
    blocks = sum(seq.num_computed_tokens % size == 0 for seq in sequences)
    reserved = 0
    if budget.limited and len(sequences) < len(running):
        first = min((seq for seq in running if seq.joined), key=_rank, default=None)
        if first is not None and first.prefill_left > 0:
            reserved = budget.growth(first.num_computed_tokens, first.least_chunk if whole_images else 1)
    return DecodeDemand(sequences, blocks, reserved)


def select_victims(running: Iterable[Sequence], shortfall: int, budget: BlockBudget) -> list[Sequence]:
    """Return the sequences to preempt for `shortfall` blocks, worst rank first; never the one with the best rank.

    The gain is an estimate, because blocks that a victim shares do not come free. If it is not enough, the next plan
    preempts more.
    """
    if shortfall <= 0:
        return []
    holders = sorted((seq for seq in running if seq.joined), key=_rank)
    victims = []
    while shortfall > 0 and len(holders) > 1:
        victim = holders.pop()
        held = victim.num_computed_tokens
        shortfall -= budget.blocks(held) - victim.cached_tokens // budget.block_size
        shortfall -= budget.growth(held) if victim.decodes else 0
        victims.append(victim)
    return victims


def allocate(demand: DecodeDemand, budget: BlockBudget) -> set[Sequence]:
    """Take one token's block for each demanding sequence that was not preempted; return those that got it, by rank
    where blocks are short."""
    if demand.shortfall(budget) <= 0:
        budget.free -= demand.blocks
        return set(demand.sequences)
    budget.free -= demand.reserved
    ranked = sorted(demand.sequences, key=_rank)
    served = {seq for seq in ranked if seq.joined and budget.allocate(seq.num_computed_tokens)}
    budget.free += demand.reserved
    return served


def _rank(seq: Sequence) -> tuple[int, int]:
    return seq.rank
