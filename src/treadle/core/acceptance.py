"""Chances that draft tokens are accepted, learned from what became of earlier ones."""

from __future__ import annotations

FORGET = 0.9  # weight of the past against each new outcome
FIRST = 0.8  # before anything is known: high enough to be tried, and a few outcomes outweigh it


class Acceptance:
    """Chances of draft tokens by their place behind the last token, each on the condition that those before it are
    accepted. `usual` are the chances of other sequences, which count as one outcome each while few are known."""

    __slots__ = ("_hits", "_outcomes", "_reached", "_usual")

    def __init__(self, usual: Acceptance | None = None) -> None:
        self._usual = usual
        self._hits: list[float] = []
        self._outcomes: list[float] = []
        self._reached: list[float] = []

    def chance(self, place: int) -> float:
        """Return the chance of the draft token at `place`, from 0."""
        usual = FIRST if self._usual is None else self._usual.chance(place)
        if place >= len(self._hits):
            return usual
        return (self._hits[place] + usual) / (self._outcomes[place] + 1)

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
            self._hits.append(0.0)
            self._outcomes.append(0.0)
        for place in range(min(drafted, accepted + 1)):
            self._hits[place] = FORGET * self._hits[place] + (place < accepted)
            self._outcomes[place] = FORGET * self._outcomes[place] + 1
