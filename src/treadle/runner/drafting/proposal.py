"""A proposal of draft tokens, and the comparison with the tokens that a row gains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...core.plan import DraftTrial


@dataclass(slots=True)
class Proposal:
    """Proposed `tokens` of a row, from position `start` of its own tokens on. The row has gained the first `used` of
    them, and trials tell of the first `told`."""

    tokens: Sequence[int]
    start: int
    used: int = 0
    told: int = 0

    @property
    def left(self) -> int:
        return len(self.tokens) - self.used

    def compare(self, gained: Sequence[int]) -> bool:
        """Compare with the row's tokens. Return whether all new ones of these are as proposed."""
        new = gained[self.start + self.used :]
        if list(self.tokens[self.used : self.used + len(new)]) == new:
            self.used += len(new)
            return True
        for token in new:
            if not self.left or token != self.tokens[self.used]:
                break
            self.used += 1
        return False

    def trials(self, row_id: str, length: int, *, wrong: bool = False) -> list[DraftTrial]:
        """Return the trials of `length` tokens that are over. The one under way is, too, where the next token is
        `wrong`."""
        trials = []
        while self.used - self.told >= length:
            trials.append(DraftTrial(row_id, length, length))
            self.told += length
        if wrong and (drafted := min(length, len(self.tokens) - self.told)):
            trials.append(DraftTrial(row_id, drafted, self.used - self.told))
            self.told = self.used
        return trials

    def ended(self, row_id: str) -> list[DraftTrial]:
        """Return the trial under way, which is right so far, as one of the tokens that the row has gained."""
        accepted, self.told = self.used - self.told, self.used
        return [DraftTrial(row_id, accepted, accepted)] if accepted else []
