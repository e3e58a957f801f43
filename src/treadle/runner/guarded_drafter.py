"""Drafter whose errors cost its proposals, and no step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from ..core.plan import DraftTrial
from ..errors import one_line
from .base import RunnerBroken
from .drafting.drafter import DraftedRow, Drafter

_log = logging.getLogger(__name__)

Answer = TypeVar("Answer")


class GuardedDrafter:
    """`drafter`, of whose proposals only tokens of the `vocabulary` are taken. After an exception it has proposed
    nothing; the first one is logged. A broken runtime is raised."""

    def __init__(self, drafter: Drafter, vocabulary: int) -> None:
        self.name = drafter.name
        self._drafter = drafter
        self._vocabulary = vocabulary
        self._failed = False

    def propose(self, rows: Sequence[DraftedRow], most: Sequence[int]) -> list[Sequence[int]]:
        """Return draft tokens for each row, at most `most` of them."""
        nothing: list[Sequence[int]] = [()] * len(rows)
        found = self._asked(lambda: self._drafter.propose(rows, most), nothing)
        return [self._known(tokens[:count]) for tokens, count in zip(found, most, strict=True)]

    def follow(self, rows: Sequence[DraftedRow], seconds: float) -> list[DraftTrial]:
        return self._asked(lambda: self._drafter.follow(rows, seconds), [])

    def ready(self, row: DraftedRow) -> int:
        return self._asked(lambda: self._drafter.ready(row), 0)

    def release(self, row_id: str) -> None:
        self._asked(lambda: self._drafter.release(row_id), None)

    def _known(self, tokens: Sequence[int]) -> Sequence[int]:
        """The tokens before the first one that is not in the vocabulary."""
        wrong = (place for place, token in enumerate(tokens) if not 0 <= token < self._vocabulary)
        return tokens[: next(wrong, len(tokens))]

    def _asked(self, ask: Callable[[], Answer], otherwise: Answer) -> Answer:
        try:
            return ask()
        except RunnerBroken:
            raise
        except Exception as error:
            if not self._failed:
                _log.warning("the drafter %s failed, and its drafts are left out: %s", self.name, one_line(error))
            self._failed = True
            return otherwise
