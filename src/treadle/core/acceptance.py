"""Chances that draft tokens are accepted, learned from what became of earlier ones."""

from __future__ import annotations

FORGET = 0.9  # weight of the past against each new outcome
FIRST = 0.5  # before anything is known: a few outcomes outweigh it
FIRST_MATCHED = (0.1, 0.1, 0.2, 0.4, 0.7, 0.95)
"""The same for drafts behind 1, 2 and more, 4, 8, 16, and 32 and more matching tokens: below what was measured on code
and prose, as plain steps try such drafts for free."""


class Acceptance:
    """Chances of draft tokens by their place behind the last token, each on the condition that those before it are
    accepted. `usual` are the chances of other sequences, which count as one outcome each while few are known: as they
    were before the first own outcome, which is one of theirs as well. Without these `first` is the chance of the first
    place, and each other place is expected to be like the one before."""

    __slots__ = ("_first", "_hits", "_outcomes", "_priors", "_reached", "_usual")

    def __init__(self, usual: Acceptance | None = None, first: float = FIRST) -> None:
        self._usual = usual
        self._first = first
        self._hits: list[float] = []
        self._priors: list[float] = []
        self._outcomes: list[float] = []
        self._reached: list[float] = []

    def chance(self, place: int) -> float:
        """Return the chance of the draft token at `place`, from 0."""
        if place < len(self._hits):
            return (self._hits[place] + self._prior(place)) / (self._outcomes[place] + 1)
        return self._prior(place)

    def _prior(self, place: int) -> float:
        if self._usual is not None:
            return self._priors[place] if place < len(self._priors) else self._usual.chance(place)
        return self.chance(place - 1) if place else self._first

    def reached(self, count: int) -> list[float]:
        """Return for each of `count` draft tokens the chance that it and all before it are accepted. What others have
        had since this sequence's last outcome does not count."""
        reached = self._reached
        while len(reached) < count:
            reached.append((reached[-1] if reached else 1.0) * self.chance(len(reached)))
        return reached[:count]

    def observe(self, drafted: int, accepted: int) -> None:
        """Learn that of `drafted` draft tokens the first `accepted` were right, and the next one, if any, was not."""
        self._reached = []
        while len(self._hits) < min(drafted, accepted + 1):
            if self._usual is not None:
                self._priors.append(self._usual.chance(len(self._priors)))
            self._hits.append(0.0)
            self._outcomes.append(0.0)
        for place in range(min(drafted, accepted + 1)):
            self._hits[place] = FORGET * self._hits[place] + (place < accepted)
            self._outcomes[place] = FORGET * self._outcomes[place] + 1


class MatchedAcceptance:
    """Chances of draft tokens by the length of the match behind which they were found, in powers of two; those that
    were not looked up have a match of 0. `usual` are the chances of other sequences."""

    __slots__ = ("_by_match", "_usual")

    def __init__(self, usual: MatchedAcceptance | None = None) -> None:
        self._usual = usual
        self._by_match: dict[int, Acceptance] = {}

    def of(self, match: int) -> Acceptance:
        """Return the chances behind `match` tokens."""
        size = min(match.bit_length(), len(FIRST_MATCHED))
        found = self._by_match.get(size)
        if found is None:
            usual = None if self._usual is None else self._usual.of(match)
            found = Acceptance(usual, FIRST_MATCHED[size - 1] if size else FIRST)
            self._by_match[size] = found
        return found
