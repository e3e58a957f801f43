"""Search for the sequence that takes the engine down, among all that were in flight when it died.

A *suspect* may have been in a step when the engine died (`roster`); a sequence that only waited is none. On the next
engine suspects are sent one at a time, the likeliest first, and each must get past the point that it had reached, by
`margin` tokens, before the next joins it: a *trial*. Nothing else is sent while a trial lasts.

What each death tells (crash and hang; `Cause.KILLED` tells nothing, see below):

- First death of a crowd: all in flight are candidates, and a trial follows. Where they die again with no trial on, all
  in flight are candidates anew, as newcomers may be among them, and the margin grows (MARGINS), for what acts late.
- Death within a trial: candidates that were not in flight are cleared, and go on at once on the next engine. The one
  that had just joined is tried first there. A candidate that passes beside others after the second death is cleared.
- Guilty is a candidate that was alone in flight at the second death or a later one, or the only candidate left after
  MOST_DEATHS deaths: one that dies only beside others is found so.
- After MOST_DEATHS deaths without a verdict (two sequences that die only together) candidates are tried wholly alone,
  each to its end or for the longest margin.

SIGKILL or SIGSTOP from outside is an operator's or the system's doing, so it never makes a sequence guilty. After the
first one everything goes on at once; after another one within CALM_S a trial finds out what to spare the others from: a
sequence that was alone in flight at MOST_SOLO_KILLS kills is given up (`proven` is false), and its like is not refused
later.

A suspect whose client has left is tried all the same: a client that sends a poison and hangs up, again and again, would
else never be found. Once it has passed it is taken back.

Pure: ids come in, verdicts go out. Times are in seconds of the caller's clock.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from .deaths import Cause

MARGINS = (2, 64, 1024)  # tokens beyond the point of death
MOST_DEATHS = 3
MOST_SOLO_KILLS = 3
CALM_S = 60.0


@dataclass(frozen=True)
class Verdict:
    """Sequence `id` is at fault for the last `deaths` deaths; `proven`: so its like must be refused."""

    id: str
    deaths: int
    proven: bool


class Suspects:
    """One search after another."""

    def __init__(self) -> None:
        self.trying: str | None = None
        self.cleared: set[str] = set()
        """Candidates of this search that are no longer under suspicion."""
        self._candidates: list[str] = []
        self._queue: deque[str] = deque()
        self._deaths = 0  # of this search, without kills
        self._seen = 0  # of those, since the candidates were last taken anew
        self._round = 0  # of crowds that died again with no trial on
        self._kills = 0
        self._killed_at = float("-inf")
        self._solo_kills: Counter[str] = Counter()

    @property
    def on_trial(self) -> bool:
        """Whether a trial is on, or due on the next engine."""
        return self.trying is not None or bool(self._queue)

    def accuses(self, id_: str) -> bool:
        """Whether its trial is on or due, after a death that was not from outside."""
        return self._deaths > 0 and (id_ == self.trying or id_ in self._queue)

    @property
    def alone(self) -> bool:
        """Whether candidates are tried wholly alone: not even cleared ones beside them."""
        return self._seen >= MOST_DEATHS

    @property
    def margin(self) -> int:
        """Tokens that a suspect must gain in its trial."""
        return MARGINS[-1] if self.alone else MARGINS[min(self._round, len(MARGINS) - 1)]

    # What happens --------------------------------------------------------------------------------------------------

    def died(self, cause: Cause, in_flight: Sequence[str], now: float) -> Verdict | None:
        """The engine died with `in_flight` in its steps, the likeliest culprit first; who is at fault, once that is
        clear."""
        tried, trial = self.trying, self.on_trial
        self.trying = None
        if cause is Cause.KILLED:
            return self._killed(in_flight, tried, trial, now)
        if not in_flight:
            self._retry(tried, trial)
            return None
        self._deaths += 1
        if trial:
            self._narrow(in_flight)
        else:
            self._take(in_flight)
        if (guilty := self._guilty(in_flight)) is not None:
            verdict = Verdict(guilty, self._deaths, proven=True)
            self._close()
            return verdict
        self._order(tried)
        return None

    def passed(self, *, beside: bool) -> None:
        """The one on trial got past its point, with others in flight `beside` it or without."""
        assert self.trying is not None
        if beside and self._seen > 1:
            self._candidates.remove(self.trying)
            self.cleared.add(self.trying)
        self.trying = None

    def ended(self, id_: str) -> None:
        """A sequence has ended, however: it can't be guilty any more."""
        if self.trying == id_:
            self.trying = None
        if id_ in self._candidates:
            self._candidates.remove(id_)
        if id_ in self._queue:
            self._queue.remove(id_)
        self.cleared.discard(id_)
        if not self._candidates:
            self._close()

    def next(self) -> str | None:
        """Who is tried now; None when the trial is over."""
        self.trying = self._queue.popleft() if self._queue else None
        return self.trying

    # Inside ----------------------------------------------------------------------------------------------------------

    def _take(self, in_flight: Sequence[str]) -> None:
        """A crowd died with no trial on."""
        crowd_again = any(id_ in self._candidates or id_ in self.cleared for id_ in in_flight)
        self._round = self._round + 1 if crowd_again else 0
        self._deaths = self._deaths if crowd_again else 1
        self._restart(in_flight)

    def _narrow(self, in_flight: Sequence[str]) -> None:
        left = [id_ for id_ in self._candidates if id_ in in_flight]
        if not left:  # it was none of them
            self.cleared |= set(self._candidates)
            self._restart(in_flight)
            return
        self.cleared |= set(self._candidates) - set(left)
        self._candidates = left
        self._seen += 1

    def _restart(self, in_flight: Sequence[str]) -> None:
        self._candidates = list(in_flight)
        self.cleared -= set(in_flight)
        self._seen = 1

    def _guilty(self, in_flight: Sequence[str]) -> str | None:
        alone = len(in_flight) == 1 and self._seen > 1
        if len(self._candidates) == 1 and (alone or self._seen >= MOST_DEATHS):
            return self._candidates[0]
        return None

    def _killed(self, in_flight: Sequence[str], tried: str | None, trial: bool, now: float) -> Verdict | None:
        self._kills = self._kills + 1 if now - self._killed_at <= CALM_S else 1
        self._killed_at = now
        if tried is not None and list(in_flight) == [tried]:
            self._solo_kills[tried] += 1
            if self._solo_kills[tried] >= MOST_SOLO_KILLS:
                self._close()
                return Verdict(tried, deaths=0, proven=False)
        if not trial and self._kills > 1 and in_flight:
            self._restart(in_flight)
            self._seen, trial = 0, True
        self._retry(tried, trial)
        return None

    def _retry(self, tried: str | None, trial: bool) -> None:
        """Nothing was learned: the same trial again, if there was one."""
        if trial:
            self._order(tried)

    def _order(self, tried: str | None) -> None:
        first = [tried] if tried in self._candidates and tried is not None else []
        self._queue = deque([*first, *(id_ for id_ in self._candidates if id_ not in first)])

    def _close(self) -> None:
        self._candidates.clear()
        self._queue.clear()
        self.cleared.clear()
        self._solo_kills.clear()
        self._deaths = self._seen = self._round = 0
