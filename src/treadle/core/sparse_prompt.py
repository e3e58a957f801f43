"""A prompt that is prefilled in part, in a sequence's books (SpecPrefill; Liu et al., ICML 2025).

A scorer, a small model, computes the prompt and a few tokens behind it, and compares the queries of these with the
prompt's keys: tokens that they attend to are kept. How many is known before, as memory is taken for them: a share of
chunks of tokens, with those at the beginning and at the end of what was scored. A cached prefix is kept whole.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

KEPT_CHUNK = 32
"""Tokens that are kept or left out together."""
HEAD_CHUNKS, TAIL_CHUNKS = 2, 8
"""Chunks that are kept whatever their scores: the first ones, to which all tokens attend, and the last ones, as they
have the question."""
LOOK_AHEAD = 8
"""Tokens whose queries score a prompt: its last one, and greedy ones of the scorer behind it."""
COMPARING_UNITS = 4
"""Parts of the layers whose keys are compared with these queries, one after the other."""
LOOK_AHEAD_UNITS = LOOK_AHEAD + COMPARING_UNITS


def longest_scored(context: int, scorer_context: int) -> int:
    """Return the tokens of the longest prompt that a scorer and a model with these contexts can score and answer."""
    return min(context - 1, scorer_context - LOOK_AHEAD)


def kept_chunks(chunks: int, keep: float) -> int:
    """Return how many of `chunks` chunks are kept for a share of `keep`."""
    return min(chunks, max(HEAD_CHUNKS + TAIL_CHUNKS, math.ceil(round(keep * chunks, 6))))


def kept_tokens(tokens: int, keep: float) -> int:
    """Return how many of `tokens` scored tokens are kept. Their last chunk, which may be shorter, is one of those."""
    chunks = -(-tokens // KEPT_CHUNK)
    return tokens - KEPT_CHUNK * (chunks - kept_chunks(chunks, keep))


@dataclass(slots=True, eq=False)
class SparsePrompt:
    """What is kept of a prompt of `length` tokens, the first `start` of which are cached: `kept` tokens in all.

    `units` of scoring it are planned, and some may be in flight. `chosen` are the positions of what is kept behind the
    cached tokens, once they are known: they stay, whatever becomes of the sequence's cache. Then the first `lead` of
    the kept tokens have no gaps between them.
    """

    length: int
    start: int
    kept: int
    units: int = 0
    begun: bool = False  # the scorer has it
    prompt: int = 0  # a hash of the prompt and its start
    chosen: tuple[int, ...] | None = None
    lead: int = -1

    @classmethod
    def of(cls, length: int, start: int, keep: float) -> SparsePrompt:
        """Return that of a prompt whose tokens from `start` on are scored, to keep a share of them."""
        return cls(length, start, start + kept_tokens(length - start, keep))

    @property
    def skipped(self) -> int:
        return self.length - self.kept

    @property
    def scored(self) -> int:
        """Tokens of which a share is kept."""
        return self.length - self.start

    @property
    def tokens_left(self) -> int:
        """Tokens of the prompt that the scorer has to compute before the look-ahead."""
        return max(0, self.length - 1 - self.units)

    @property
    def units_left(self) -> int:
        """Units of the look-ahead that are to be planned."""
        return min(LOOK_AHEAD_UNITS, self.length - 1 + LOOK_AHEAD_UNITS - self.units)

    def choose(self, positions: tuple[int, ...]) -> None:
        """Settle the positions that are kept behind the cached tokens."""
        ascending = all(a < b for a, b in pairwise(positions))
        if len(positions) != self.kept - self.start or not ascending or not self._within(positions):
            raise AssertionError(f"{self.kept - self.start} ascending positions of the prompt are kept")
        self.chosen = positions
        run = next((i for i, position in enumerate(positions) if position != self.start + i), len(positions))
        self.lead = self.start + run

    def _within(self, positions: tuple[int, ...]) -> bool:
        return self.start <= positions[0] and positions[-1] == self.length - 1

    def positions(self, start: int, count: int) -> tuple[int, ...]:
        """Return the positions of `count` tokens in the sequence's cache, from its token `start` on: some may be behind
        the prompt."""
        assert self.chosen is not None
        end = start + count
        low, high = max(start, self.start), min(end, self.kept)
        return (
            *range(start, min(end, self.start)),
            *self.chosen[low - self.start : max(low, high) - self.start],
            *range(max(start, self.kept) + self.skipped, max(end, self.kept) + self.skipped),
        )

    def reached(self, count: int) -> int:
        """Return the length of the part of the prompt that is done with once `count` tokens are in the cache."""
        if count >= self.kept:
            return self.length
        return count if count <= self.start or self.chosen is None else self.chosen[count - self.start - 1] + 1

    def restart(self) -> None:
        """Forget a scoring that has not come to its end."""
        if self.chosen is None:
            self.units, self.begun = 0, False
