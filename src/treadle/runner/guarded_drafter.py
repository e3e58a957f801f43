"""Drafter whose errors cost its proposals, and no step."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ..core.plan import DraftTrial
from ..core.statistics import DrafterStatistics
from ..errors import one_line
from .base import RunnerBroken
from .drafting.drafter import DraftedRow, Drafter, NewStates, Offer, state_reader

_log = logging.getLogger(__name__)


class GuardedDrafter:
    """`drafter`, of whose proposals only tokens of the `vocabulary` are taken. After an exception it has proposed
    nothing; the first one is logged. A broken runtime is raised."""

    def __init__(self, drafter: Drafter, vocabulary: int) -> None:
        self.names = drafter.names
        self._reader = state_reader(drafter)
        self.reads_states = self._reader is not None
        self._drafter = drafter
        self._vocabulary = vocabulary
        self._failed = False

    def observe(self, found: Sequence[NewStates]) -> None:
        if self._reader is None:
            return
        try:
            self._reader.observe(found)
        except Exception as error:
            self._tell(error)

    def propose(self, rows: Sequence[DraftedRow], most: Sequence[int]) -> list[Sequence[int]]:
        """Return draft tokens for each row, at most `most` of them."""
        try:
            found = self._drafter.propose(rows, most)
            return [self._known(tokens[:count]) for tokens, count in zip(found, most, strict=True)]
        except Exception as error:
            self._tell(error)
            return [()] * len(rows)

    def follow(self, rows: Sequence[DraftedRow], seconds: float) -> list[DraftTrial]:
        try:
            return self._drafter.follow(rows, seconds)
        except Exception as error:
            self._tell(error)
            return []

    def offer(self, row: DraftedRow) -> Offer:
        """Return what is ready for a row."""
        try:
            ready = self._drafter.ready(row)
            return Offer(ready, self._drafter.match(row)) if ready else Offer()
        except Exception as error:
            self._tell(error)
            return Offer()

    def release(self, row_id: str) -> None:
        try:
            self._drafter.release(row_id)
        except Exception as error:
            self._tell(error)

    def warm_up(self) -> None:
        self._drafter.warm_up()

    def reset(self) -> None:
        self._drafter.reset()

    def statistics(self) -> DrafterStatistics:
        try:
            return self._drafter.statistics()
        except Exception as error:
            self._tell(error)
            return DrafterStatistics()

    def close(self) -> None:
        self._drafter.close()

    def _known(self, tokens: Sequence[int]) -> Sequence[int]:
        """The tokens before the first one that is not in the vocabulary."""
        wrong = (place for place, token in enumerate(tokens) if not 0 <= token < self._vocabulary)
        return tokens[: next(wrong, len(tokens))]

    def _tell(self, error: Exception) -> None:
        """Log the first error; raise that of a broken runtime."""
        if isinstance(error, RunnerBroken):
            raise error
        if not self._failed:
            names = " and ".join(self.names)
            _log.warning("the drafter %s failed, and its drafts are left out: %s", names, one_line(error))
        self._failed = True
