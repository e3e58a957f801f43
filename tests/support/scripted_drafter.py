"""Drafter that knows what rows will generate, and is wrong as often as a test wants."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from treadle.core.plan import DraftTrial
from treadle.core.statistics import DrafterStatistics
from treadle.runner.drafting.drafter import DraftedRow


class ScriptedDrafter:
    """Proposes the `answers` of rows, by id, each token of which is right with the probability `acceptance`. `verified`
    rows have tokens that it proposed, and `released` have been forgotten. If it `compares`, it tells of steps that
    verify nothing whether the first draft would have been right, as a look-up does."""

    names = ("scripted",)

    def __init__(
        self,
        answers: Mapping[str, Sequence[int]],
        acceptance: float = 1.0,
        seed: int | str = 0,
        *,
        compares: bool = False,
    ) -> None:
        self.answers = answers
        self.acceptance = acceptance
        self.proposed = self.matches = 0
        self.released: set[str] = set()
        self.followed: list[tuple[str, int]] = []
        self.trials: list[DraftTrial] = []
        self._dice = random.Random(seed)
        self._compares = compares
        self._expected: dict[str, tuple[int, int]] = {}

    def propose(self, rows: Sequence[DraftedRow], most: Sequence[int]) -> list[Sequence[int]]:
        found: list[Sequence[int]] = []
        for row, count in zip(rows, most, strict=True):
            assert count > 0
            assert row.request.speculate
            self._expected.pop(row.id, None)
            found.append([self._maybe(token) for token in self._rest(row)[:count]])
            self.proposed += len(found[-1])
        return found

    def follow(self, rows: Sequence[DraftedRow], seconds: float) -> list[DraftTrial]:
        self.followed += [(row.id, len(row.tokens)) for row in rows]
        trials, self.trials = self.trials, []
        if self._compares:
            trials += [one for row in rows for one in self._compared(row)]
        return trials

    def _compared(self, row: DraftedRow) -> list[DraftTrial]:
        """Return the outcome of the token that was expected of a row, and expect another one."""
        place, token = self._expected.pop(row.id, (len(row.tokens), 0))
        if rest := self._rest(row):
            self._expected[row.id] = len(row.tokens), self._maybe(rest[0])
        return [DraftTrial(row.id, 1, int(row.tokens[place] == token))] if place < len(row.tokens) else []

    def ready(self, row: DraftedRow) -> int:
        return len(self._rest(row))

    def match(self, row: DraftedRow) -> int:
        return self.matches

    def release(self, row_id: str) -> None:
        self.released.add(row_id)

    def warm_up(self) -> None:
        pass

    def reset(self) -> None:
        pass

    def statistics(self) -> DrafterStatistics:
        return DrafterStatistics()

    def close(self) -> None:
        pass

    def _rest(self, row: DraftedRow) -> Sequence[int]:
        return self.answers.get(row.id, ())[len(row.tokens) - len(row.request.prompt) :]

    def _maybe(self, token: int) -> int:
        return token if self._dice.random() < self.acceptance else token ^ 1
