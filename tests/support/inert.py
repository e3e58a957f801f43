"""The part of the runner protocol in which a runner of the tests has nothing to do."""

from __future__ import annotations

from treadle.core.messages import RunnerStatistics


class Inert:
    """Nothing to warm up, to put away, to count or to close."""

    def warm_up(self) -> None:
        return

    def trim_memory(self) -> None:
        return

    def statistics(self) -> RunnerStatistics:
        return RunnerStatistics()

    def close(self) -> None:
        return
