"""Empty implementations of the runner protocol's optional part, for runners of tests."""

from __future__ import annotations

from treadle.core.messages import RunnerStatistics


class Inert:
    """Runner without a warm-up, statistics or resources."""

    def warm_up(self) -> None:
        return

    def trim_memory(self) -> None:
        return

    def statistics(self) -> RunnerStatistics:
        return RunnerStatistics()

    def close(self) -> None:
        return
