"""Speculative decoding in a scheduler: the draft tokens of its plans, and what is learned from their results.

The tokens that drafts follow must be known, and so must be what became of drafts before anything follows those. So a
step that verifies drafts is planned with nothing in flight, and nothing is planned until it is applied; the seconds
that this takes longer are part of its measured cost. Steps that compute prompts verify nothing.

To look for drafts costs the host time for each sequence. Where steps verify it is a part of their measured cost, too.
Else drafts are looked for in two steps that follow each other, since the first draft is sampled by the second one, and
then in none for so long that it takes PROPOSING_SHARE of the time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from .draft_budget import NOTHING_MEASURED, DraftBudget
from .inflight_step import InFlightStep
from .plan import StepPlan
from .preemption import DecodeDemand
from .sequence import Sequence
from .statistics import SpeculationStatistics

PROPOSING_SHARE = 0.005
_LOOKS = 2  # steps
_FIRST_LOOKS = 16  # at sequences, by a server that knows nothing: there is no pause between these
_PROPOSING_TIMES = 3  # what drafts cost beside the time in which they are counted: to follow, and to choose them
_CHOOSING_ROWS = 2  # choosing costs as much as so many sequences more, however many there are
_SHOWN_EVERY = 16  # outcomes: chances are made anew so often
_SHOWN_PLACES = 4
_SHOWN_MATCHES = (2, 4, 8, 16, 32)


@dataclass(slots=True)
class _TimedPlan:
    """A plan that only decodes, until the next one shows how long it took. `steady`: plain steps have followed each
    other as they go on."""

    began: float
    rows: int
    verifies: bool
    steady: bool
    drafted: int = 0


@dataclass(frozen=True, slots=True)
class _Chances:
    """Chances that statistics show, after so many `outcomes`."""

    outcomes: int = -_SHOWN_EVERY
    by_place: tuple[float, ...] = ()
    by_match: tuple[tuple[int, float], ...] = ()


class Speculation:
    """Draft tokens of plans, with `budget`; none without one. `lookahead` steps may be in flight beside the oldest;
    those that verify drafts may be followed, too, with `resolved`."""

    def __init__(self, budget: DraftBudget | None, *, lookahead: int, resolved: bool) -> None:
        self._budget = budget
        self._lookahead = lookahead
        self._resolved = resolved
        self._timed: _TimedPlan | None = None
        self._chosen = False  # the last choice was drafts
        self._offered = False  # the last step that was applied has looked for drafts
        self._looks = 0  # plans to come that look for drafts
        self._paused = 0  # plans behind them that don't
        self._pause = 0  # the next time
        self._look_s = 0.0  # the last time, for each sequence
        self._first_looks = _FIRST_LOOKS
        self._steps = self._rows = self._drafted = self._accepted = self._gained = 0
        self._chances = _Chances()

    def blocks(self, in_flight: Iterable[InFlightStep]) -> bool:
        """Whether nothing can be planned before the steps in flight are applied, as they may reject drafts."""
        return not self._resolved and any(step.plan.verifies for step in in_flight)

    def choose(
        self, running: Collection[Sequence], demand: DecodeDemand, *, in_flight: bool
    ) -> Mapping[Sequence, int] | None:
        """Return how many draft tokens to verify of each sequence; None for as many as the runner takes. With a step
        `in_flight` that is to be applied first, if there are any."""
        if self._budget is None:
            return None
        self._chosen = False
        if len(demand.sequences) < len(running) or (self._pause and not self._offered):
            return {}
        drafts = self._budget.choose(demand.sequences, in_flight=in_flight)
        self._chosen = bool(drafts)
        return drafts

    def proposes(self, plan: StepPlan) -> bool:
        """Whether drafts are to be looked for in the step of a plan."""
        rows = len(plan.decode)
        if self._budget is None or not rows:
            return False
        verifies = self._verifies(plan)
        if self._paused and not (self._looks or verifies):
            self._paused -= 1
            return False
        if not self._budget.proposes(rows):
            return False
        if self._looks or verifies:
            self._looks = max(0, self._looks - 1)
        else:
            self._looks, self._paused = _LOOKS - 1, self._pause
        return True

    def looked(self, plan: StepPlan, seconds: float) -> None:
        """Learn that the step of `plan` spent `seconds` on looking for drafts, if it did. The quicker one of two
        counts: the host may have been held up in the other."""
        self._offered = plan.propose
        if self._budget is not None and seconds:
            rows = len(plan.decode)
            each_s, before_s = seconds / rows, self._look_s
            self._look_s = each_s
            paid_s = PROPOSING_SHARE * self._budget.costs.plain_s(rows)
            times, looked_s = _LOOKS * _PROPOSING_TIMES, (rows + _CHOOSING_ROWS) * min(each_s, before_s)
            self._first_looks = max(0, self._first_looks - rows)
            pauses = not (self._budget.verifies or self._first_looks)
            self._pause = int(times * looked_s / paid_s) if pauses else 0

    def planned(self, plan: StepPlan, now: float, *, follows: bool) -> None:
        """Learn how long the plan before took, as `plan` has been made."""
        before, self._timed = self._timed, None
        if self._budget is None or plan.prefill or plan.admit or plan.score or plan.encode:
            return
        verifies = self._verifies(plan)
        self._steps += verifies
        follows_plain = before is not None and not before.verifies and (follows or not self._lookahead)
        self._timed = _TimedPlan(now, len(plan.decode), verifies, follows_plain)
        if before is not None and before.verifies:
            self._budget.observe_verifying(before.rows, before.drafted, now - before.began)
        elif before is not None and before.steady and follows_plain:
            self._budget.observe_plain(before.rows, now - before.began)

    def _verifies(self, plan: StepPlan) -> bool:
        """Whether a plan made for the last choice verifies drafts: most don't, without a look at their rows."""
        return self._chosen and plan.verifies

    def verified(self, seq: Sequence, match: int, drafted: int, accepted: int, *, gain: int, ended: bool) -> None:
        """Learn what became of the `drafted` tokens, behind `match` matching ones, that a step verified, and how many
        tokens it gained by them. Where the sequence has `ended`, those behind its end were not rejected."""
        self._rows += 1
        self._drafted += drafted
        self._accepted += accepted
        self._gained += gain
        if self._timed is not None:
            self._timed.drafted += drafted
        if self._budget is not None:
            self._budget.observe_gain(gain)
        self.tried(seq, match, accepted if ended else drafted, accepted)

    def missed(self, seq: Sequence, match: int) -> None:
        """Learn that a step verified none of the drafts that it had room for, as none was proposed or a grammar allowed
        none: no more is gained by such drafts than by wrong ones."""
        self.tried(seq, match, 1, 0)

    def tried(self, seq: Sequence, match: int, drafted: int, accepted: int) -> None:
        """Learn what became of `drafted` draft tokens behind `match` matching ones."""
        if self._budget is not None and drafted:
            self._budget.observe(seq, match, drafted, accepted)

    def statistics(self, *, busy: bool = False) -> SpeculationStatistics:
        """Return a snapshot. In a `busy` engine, which makes one for each step, chances may be some outcomes old."""
        if self._budget is None:
            return SpeculationStatistics(reason=NOTHING_MEASURED)
        if self._budget.outcomes - self._chances.outcomes >= (_SHOWN_EVERY if busy else 1):
            self._chances = _chances_of(self._budget)
        return SpeculationStatistics(
            steps=self._steps,
            rows=self._rows,
            drafted=self._drafted,
            accepted=self._accepted,
            gained=self._gained,
            on=not self._budget.reason,
            reason=self._budget.reason,
            chances=self._chances.by_place,
            match_chances=self._chances.by_match,
        )


def _chances_of(budget: DraftBudget) -> _Chances:
    usual = budget.usual
    by_place = tuple(round(usual.of(0).chance(place), 3) for place in range(_SHOWN_PLACES))
    by_match = tuple((match, round(usual.of(match).chance(0), 3)) for match in _SHOWN_MATCHES)
    return _Chances(budget.outcomes, by_place, by_match)
