"""Empty implementations of the runner protocol's optional part, for runners of tests."""

from __future__ import annotations

from collections.abc import Callable

from treadle.core.grammar_state import READY, GrammarStatus
from treadle.core.messages import BlockEvent, Constraint, Submit
from treadle.core.statistics import RunnerStatistics


class Inert:
    """Runner without a warm-up, grammars, a scorer, statistics, block events or resources."""

    def warm_up(self) -> None:
        return

    def grammar_state(self, constraint: Constraint) -> GrammarStatus:
        return READY

    def has_features(self, hash_: bytes) -> bool:
        return False

    def match_scored(self, request: Submit) -> int:
        raise AssertionError("it has no scorer")

    def notify_grammars(self, changed: Callable[[], None]) -> None:
        return

    def trim_memory(self) -> None:
        return

    def statistics(self) -> RunnerStatistics:
        return RunnerStatistics()

    def watch_blocks(self, salt: str, on: bool) -> None:
        return

    def block_events(self) -> tuple[BlockEvent, ...]:
        return ()

    def close(self) -> None:
        return
