"""Drafter that knows what rows will generate, and is wrong as often as a test wants."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from treadle.core.plan import DraftTrial
from treadle.core.statistics import DrafterStatistics
from treadle.runner.drafting.drafter import DraftedRow


class ScriptedDrafter:
    """Proposes the `answers` of rows, by id, each token of which is right with the probability `acceptance`. `verified`
    rows have tokens that it proposed, and `released` have been forgotten."""

    names = ("scripted",)

    def __init__(self, answers: Mapping[str, Sequence[int]], acceptance: float = 1.0, seed: int = 0) -> None:
        self.answers = answers
        self.acceptance = acceptance
        self.proposed = self.matches = 0
        self.released: set[str] = set()
        self.followed: list[tuple[str, int]] = []
        self.trials: list[DraftTrial] = []
        self._dice = random.Random(seed)

    def propose(self, rows: Sequence[DraftedRow], most: Sequence[int]) -> list[Sequence[int]]:
        found: list[Sequence[int]] = []
        for row, count in zip(rows, most, strict=True):
            assert count > 0
            assert row.request.speculate
            found.append([self._maybe(token) for token in self._rest(row)[:count]])
            self.proposed += len(found[-1])
        return found

    def follow(self, rows: Sequence[DraftedRow], seconds: float) -> list[DraftTrial]:
        self.followed += [(row.id, len(row.tokens)) for row in rows]
        trials, self.trials = self.trials, []
        return trials

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
