"""Kinds of work that steps do beside decoding, and the sizes of its chunks."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

MIN_CHUNK = 16
FIRST_CHUNK = 64


class Work(StrEnum):
    """Work of a step beside decoding: of one kind in each step, as each has costs of its own."""

    PROMPTS = "prompts"
    SCORING = "scoring"  # tokens of prompts, by the scorer
    LOOK_AHEAD = "look-ahead"  # of the scorer, in units
    IMAGES = "images"  # layers of a vision tower, in units


@dataclass(frozen=True)
class ChunkLimits:
    """Sizes of chunks: at most `max_tokens` in a step, in multiples of `quantum`, and rounded down to one of `sizes`,
    ascending, but for those below or above all of them."""

    max_tokens: int
    quantum: int = MIN_CHUNK
    sizes: Sequence[int] = ()

    @classmethod
    def of(cls, max_tokens: int, quantum: int, sizes: Sequence[int]) -> ChunkLimits:
        """Return the limits for chunks of prompts, whose least length is MIN_CHUNK."""
        return cls(max_tokens, min(max(quantum, MIN_CHUNK), max_tokens), sizes)

    @property
    def first(self) -> int:
        """The size of a chunk where no cost is known."""
        return min(self.max_tokens, max(FIRST_CHUNK, self.quantum)) if self.quantum >= MIN_CHUNK else self.quantum

    def clamp(self, tokens: int) -> int:
        """Return the nearest size of a chunk."""
        if self.quantum > MIN_CHUNK:
            tokens -= tokens % self.quantum
        return self.whole(min(max(tokens, self.quantum), self.max_tokens))

    def whole(self, tokens: int) -> int:
        """Return the largest of the sizes that so many tokens fill."""
        below = bisect_right(self.sizes, tokens)
        return self.sizes[below - 1] if 0 < below < len(self.sizes) else tokens
