"""A proposal of draft tokens, and the comparison with the tokens that a row gains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...core.plan import DraftTrial


@dataclass(slots=True)
class Proposal:
    """Proposed `tokens` of a row, from position `start` of its own tokens on, behind `context` matching ones. The row
    has gained the first `used` of them, and trials tell of the first `told`."""

    tokens: Sequence[int]
    start: int
    context: int = 0
    used: int = 0
    told: int = 0

    @property
    def left(self) -> int:
        return len(self.tokens) - self.used

    @property
    def match(self) -> int:
        """The matching tokens before those that are left."""
        return self.context + self.used

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
            trials.append(self._trial(row_id, length, length))
        if wrong and (drafted := min(length, len(self.tokens) - self.told)):
            trials.append(self._trial(row_id, drafted, self.used - self.told))
        return trials

    def ended(self, row_id: str) -> list[DraftTrial]:
        """Return the trial under way, which is right so far, as one of the tokens that the row has gained."""
        accepted = self.used - self.told
        return [self._trial(row_id, accepted, accepted)] if accepted else []

    def _trial(self, row_id: str, drafted: int, accepted: int) -> DraftTrial:
        match = self.context + self.told
        self.told += accepted
        return DraftTrial(row_id, drafted, accepted, match)
