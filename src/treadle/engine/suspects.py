"""Search for the culprit of engine deaths among the sequences that were in flight.

A *suspect* may have been in a step when the engine died (`in_flight_table`); sequences that only waited are not
suspects. In a *trial* the next engine gets the suspects one at a time, likeliest first. Each must gain `margin` tokens
beyond the point it had reached before the next one joins it. Nothing else is sent during a trial.

Conclusions from a death by crash or hang (not `Cause.KILLED`, see below):

- First death: all sequences in flight become candidates, and a trial follows. If candidates or cleared sequences die
  again without a trial running, all sequences in flight become candidates again, as new ones may be among them, and the
  margin grows (MARGINS), as the culprit acts late.
- Death during a trial: candidates that were not in flight are cleared, and continue at once on the next engine, where
  the sequence that had joined last is tried first. A candidate that passes beside others after the second death is
  cleared.
- A candidate is guilty if it was alone in flight at the second or a later death, or if it is the only candidate left
  after SOLO_AFTER_DEATHS deaths. The latter finds a sequence that kills the engine only beside others.
- After SOLO_AFTER_DEATHS deaths without a verdict (two sequences that kill the engine only together), candidates are
  tried alone, each to its end or for the longest margin.

SIGKILL or SIGSTOP from outside comes from an operator or the system, and makes no sequence guilty. After the first one
all sequences continue at once. After another one within CALM_S seconds a trial follows: a sequence that was alone in
flight at MAX_SOLO_KILLS kills is ended (`proven` is false), but equal requests are not refused later.

A suspect whose client has left is tried all the same: otherwise a client that repeatedly sends a harmful request and
disconnects would never be found. It is cancelled once it has passed.

Pure: takes ids, returns verdicts. Times are in seconds of the caller's clock.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from .deaths import Cause

MARGINS = (2, 64, 1024)  # tokens beyond the point reached at death
SOLO_AFTER_DEATHS = 3
MAX_SOLO_KILLS = 3
CALM_S = 60.0


@dataclass(frozen=True)
class Verdict:
    """Sequence `id` caused the last `deaths` deaths. `proven`: equal requests must be refused."""

    id: str
    deaths: int
    proven: bool


class Suspects:
    """The current search. A new one starts after a verdict, or when all candidates have ended."""

    def __init__(self) -> None:
        self.current: str | None = None
        self.cleared: set[str] = set()
        """Former candidates of this search that were cleared."""
        self._candidates: list[str] = []
        self._queue: deque[str] = deque()
        self._deaths = 0  # in this search, without kills from outside
        self._deaths_seen = 0  # of `_deaths`, since the candidates were last replaced
        self._round = 0  # repeated deaths without a trial running
        self._kills = 0
        self._killed_at = float("-inf")
        self._solo_kills: Counter[str] = Counter()

    @property
    def on_trial(self) -> bool:
        """Whether a trial is running, or due on the next engine."""
        return self.current is not None or bool(self._queue)

    def is_suspect(self, id_: str) -> bool:
        """Whether its trial is running or due, after a death that was not caused from outside."""
        return self._deaths > 0 and (id_ == self.current or id_ in self._queue)

    @property
    def is_solo(self) -> bool:
        """Whether candidates are tried alone, without cleared sequences beside them."""
        return self._deaths_seen >= SOLO_AFTER_DEATHS

    @property
    def margin(self) -> int:
        """Tokens that a suspect must gain in its trial."""
        return MARGINS[-1] if self.is_solo else MARGINS[min(self._round, len(MARGINS) - 1)]

    # Events ---------------------------------------------------------------------------------------------------------

    def died(self, cause: Cause, in_flight: Sequence[str], now: float) -> Verdict | None:
        """Record a death with `in_flight` in its steps, likeliest culprit first. Returns a verdict once a culprit is
        found."""
        tried, trial = self.current, self.on_trial
        self.current = None
        if cause is Cause.KILLED:
            return self._killed(in_flight, tried, trial, now)
        if not in_flight:
            self._repeat_trial(tried, trial)
            return None
        self._deaths += 1
        if trial:
            self._narrow(in_flight)
        else:
            self._start_search(in_flight)
        if (guilty := self._guilty(in_flight)) is not None:
            verdict = Verdict(guilty, self._deaths, proven=True)
            self._reset()
            return verdict
        self._queue_candidates(tried)
        return None

    def passed(self, *, beside: bool) -> None:
        """Record that the current suspect passed its trial. `beside`: other sequences were in flight."""
        assert self.current is not None
        if beside and self._deaths_seen > 1:
            self._candidates.remove(self.current)
            self.cleared.add(self.current)
        self.current = None

    def ended(self, id_: str) -> None:
        """Remove a sequence that has ended."""
        if self.current == id_:
            self.current = None
        if id_ in self._candidates:
            self._candidates.remove(id_)
        if id_ in self._queue:
            self._queue.remove(id_)
        self.cleared.discard(id_)
        if not self._candidates:
            self._reset()

    def next_suspect(self) -> str | None:
        """Return the next suspect to try; None when the trial is over."""
        self.current = self._queue.popleft() if self._queue else None
        return self.current

    # Inside ----------------------------------------------------------------------------------------------------------

    def _start_search(self, in_flight: Sequence[str]) -> None:
        """Start or restart a search after a death without a trial running."""
        crowd_again = any(id_ in self._candidates or id_ in self.cleared for id_ in in_flight)
        self._round = self._round + 1 if crowd_again else 0
        self._deaths = self._deaths if crowd_again else 1
        self._restart(in_flight)

    def _narrow(self, in_flight: Sequence[str]) -> None:
        left = [id_ for id_ in self._candidates if id_ in in_flight]
        if not left:  # all candidates are innocent
            self.cleared |= set(self._candidates)
            self._restart(in_flight)
            return
        self.cleared |= set(self._candidates) - set(left)
        self._candidates = left
        self._deaths_seen += 1

    def _restart(self, in_flight: Sequence[str]) -> None:
        self._candidates = list(in_flight)
        self.cleared -= set(in_flight)
        self._deaths_seen = 1

    def _guilty(self, in_flight: Sequence[str]) -> str | None:
        alone = len(in_flight) == 1 and self._deaths_seen > 1
        if len(self._candidates) == 1 and (alone or self._deaths_seen >= SOLO_AFTER_DEATHS):
            return self._candidates[0]
        return None

    def _killed(self, in_flight: Sequence[str], tried: str | None, trial: bool, now: float) -> Verdict | None:
        self._kills = self._kills + 1 if now - self._killed_at <= CALM_S else 1
        self._killed_at = now
        if tried is not None and list(in_flight) == [tried]:
            self._solo_kills[tried] += 1
            if self._solo_kills[tried] >= MAX_SOLO_KILLS:
                self._reset()
                return Verdict(tried, deaths=0, proven=False)
        if not trial and self._kills > 1 and in_flight:
            self._restart(in_flight)
            self._deaths_seen, trial = 0, True
        self._repeat_trial(tried, trial)
        return None

    def _repeat_trial(self, tried: str | None, trial: bool) -> None:
        """Repeat the trial, if there was one: this death is inconclusive."""
        if trial:
            self._queue_candidates(tried)

    def _queue_candidates(self, tried: str | None) -> None:
        first = [tried] if tried in self._candidates and tried is not None else []
        self._queue = deque([*first, *(id_ for id_ in self._candidates if id_ not in first)])

    def _reset(self) -> None:
        self._candidates.clear()
        self._queue.clear()
        self.cleared.clear()
        self._solo_kills.clear()
        self._deaths = self._deaths_seen = self._round = 0
