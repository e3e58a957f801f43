"""Live view of a run. It shares a process with the load generator, so it must cost next to nothing: a sample only
updates counters, and the table is drawn from them a few times a second."""

from __future__ import annotations

import bisect
import time
from collections import Counter
from collections.abc import Callable
from types import TracebackType

from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from . import formatting
from .measures import quantile
from .samples import Round, Sample

REFRESHES_PER_S = 3
HEADINGS = ("", "round", "done", "answers", "TTFT p50", "tok/s", "time")
NEVER = float("inf")


class _RoundTally:
    """Counters of one round. The token rate covers requests that have ended, until the end of the last of them."""

    def __init__(self, workload: str, target: str, number: int, total: int, began: float) -> None:
        self.workload = workload
        self.target = formatting.printable(target, 40)
        self.number = number
        self.total = total
        self.began = began
        self.took_s: float | None = None
        self._outcomes = Counter[str]()
        self._ttft_s: list[float] = []
        self._tokens = 0
        self._from_s, self._until_s = NEVER, 0.0

    def add(self, sample: Sample) -> None:
        self._outcomes[sample.outcome] += 1
        if sample.ttft_s is not None:
            bisect.insort(self._ttft_s, sample.ttft_s)
        self._tokens += sample.tokens
        self._from_s = min(self._from_s, sample.sent_s)
        self._until_s = max(self._until_s, sample.sent_s + sample.end_s)

    def cells(self, now: float) -> list[str]:
        """Return the cells under HEADINGS."""
        outcomes = dict(self._outcomes)
        ran_s = self._until_s - self._from_s
        return [
            self.target,
            f"{self.number}",
            f"{sum(outcomes.values()):,}/{self.total:,}",
            ", ".join(f"{count:,} {outcome}" for outcome, count in sorted(outcomes.items())) or "–",
            formatting.value(quantile(self._ttft_s, 0.5) if self._ttft_s else None, "s"),
            formatting.digits(self._tokens / ran_s) if ran_s > 0 else "–",
            f"{now - self.began if self.took_s is None else self.took_s:,.0f} s",
        ]


class LiveTable:
    """Implementation of `run.Watcher`. On a terminal, a table of the workload that runs, with the last round of each
    target; elsewhere, a line for each round that has ended. A context manager; the table goes away with it."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._began = clock()
        self._tallies: dict[str, _RoundTally] = {}
        self._tally: _RoundTally | None = None
        self._live: Live | None = None
        if console.is_terminal:
            self._live = Live(
                console=console, get_renderable=self._draw, refresh_per_second=REFRESHES_PER_S, transient=True
            )

    def __enter__(self) -> LiveTable:
        if self._live is not None:
            self._live.start(refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def begin(self, workload: str, target: str, round_: int, total: int) -> None:
        """Start a round of `total` requests."""
        current = {name: tally for name, tally in self._tallies.items() if tally.workload == workload}
        self._tally = _RoundTally(workload, target, round_, total, self._clock())
        self._tallies = current | {target: self._tally}

    def sample(self, sample: Sample) -> None:
        """Count an ended request of that round."""
        if self._tally is not None:
            self._tally.add(sample)

    def end(self, round_: Round) -> None:
        """End that round."""
        tally = self._tally
        if tally is None:
            return
        tally.took_s = round_.wall_s
        if self._live is None:
            self._console.print(Text(_line(tally, round_)), soft_wrap=True)

    def _draw(self) -> RenderableType:
        """Draw the table; called from a thread of its own, while rounds go on."""
        tallies, now = list(self._tallies.values()), self._clock()
        if not tallies:
            return Text(f"getting the targets ready: {now - self._began:,.0f} s")
        table = Table(title=Text(formatting.printable(tallies[0].workload, 60)), title_justify="left", show_edge=False)
        for i, heading in enumerate(HEADINGS):
            table.add_column(heading, justify="right" if i in (1, 2, 4, 5, 6) else "left", no_wrap=True)
        for tally in tallies:
            table.add_row(*map(Text, tally.cells(now)), style="bold" if tally.took_s is None else "")
        return table


def _line(tally: _RoundTally, round_: Round) -> str:
    target, number, done, answers, ttft, rate, duration = tally.cells(tally.began)
    crash = f"; it ended: {formatting.printable(round_.crash, 160)}" if round_.crash else ""
    label = f"{formatting.printable(tally.workload, 60)}, {target}, round {number}"
    return f"{label}: {done} ({answers}), TTFT p50 {ttft}, {rate} tok/s, {duration}{crash}"
