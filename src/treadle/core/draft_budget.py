"""Draft tokens of a step: as many as raise the tokens per second, down to none.

The most probable draft tokens of all sequences are taken first. Their number is the one that gives the most tokens per
second by the expected cost of the step, and plain decoding remains where none gives clearly more. So there is no
threshold of batch size or acceptance, and nothing is verified that does not pay.

What is not done is not measured: costs and chances of the way that is off may have changed since. A share of the time
pays for trials: steps that verify a few drafts while steps are plain, and a few plain steps while they verify. A trial
goes on while there is credit, as its end costs a plain step that nothing was prepared for, however long it was. A run
of steps that has gained by drafts lately may lose some of that before it ends. A server that knows nothing has an
advance.

Where plain steps are prepared ahead, each run of steps that verify ends with one that was not, and may begin with one
that waited for nothing: drafts whose first token turns out to be wrong are none. So a step that verifies counts for its
part of a run, as long as runs have been lately.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf
from operator import itemgetter

from .acceptance import MatchedAcceptance
from .plan import MAX_SCORED_TOKENS
from .sequence import Sequence
from .verify_costs import VerifyCosts

GAIN = 1.02  # tokens per second over those of plain decoding, from which on drafts are verified
TRIAL_SHARE = 0.005  # of the time
TRIAL_TOKENS = 4
FIRST_CREDIT_STEPS = 2.25  # for the trials of a server that knows nothing: under 2 % of 128 steps, and owed
RUN_CREDIT_STEPS = 5.0  # that a run may lose of what it has gained
PLAIN_TRIAL_STEPS = 4  # the first of them waits for the step before
FIRST_ENDS = 0.125  # of steps that verify are the last of their run, before anything is known
FORGET = 0.9  # weight of the past against each new step
DOUBTFUL_TRIALS = 4.0  # times the credit that a trial costs, for one that could not pay by what is known
NOTHING_READY = "no tokens are proposed"
NOTHING_MEASURED = "what drafts cost could not be measured in the warm-up"
NO_ROOM = "the step has no room for more tokens"
NOTHING_KNOWN = "it is not known yet whether proposed tokens are right"
_MOST_CREDIT_S = 1.0  # or what two trials cost that could not pay by what is known
_MOST_DEBT_STEPS = 20.0  # more is forgiven: it would end all trials for as long as it has grown
_LEAST_COST = 0.1  # of a plain step: what a trial counts where it is no slower


@dataclass(slots=True)
class _Run:
    """Steps that verify, one behind the other: the seconds `lost_s` that they took longer than plain ones would for the
    same tokens; less than none where they gained. `rows` and `drafts` are those of the last one, if its outcome is not
    counted yet, which is `accepted` tokens so far."""

    lost_s: float = 0.0
    rows: int = 0
    drafts: int = 0
    accepted: int = 0

    def count(self, costs: VerifyCosts) -> None:
        """Count the outcome of the last step, by the seconds that are expected of it: its own are measured later."""
        if self.rows:
            plain_s = costs.plain_s(self.rows)
            lost_s = slower_s(costs, self.rows, self.drafts) - plain_s * self.accepted / self.rows
            self.lost_s = max(-RUN_CREDIT_STEPS * plain_s, self.lost_s + lost_s)
        self.rows = self.drafts = self.accepted = 0


@dataclass(slots=True)
class DraftBudget:
    """Choice of the draft tokens of each step, at most `most` of a sequence, and what it is learned from.

    `usual` are the chances over all sequences, from so many `outcomes`: a server that knows few verifies few drafts.
    `verifies` says whether the last choice was drafts, and no trial, and `reason` why it was none; empty if it was not.
    """

    costs: VerifyCosts
    most: int
    usual: MatchedAcceptance = field(default_factory=MatchedAcceptance)
    outcomes: int = 0
    reason: str = NOTHING_READY
    verifies: bool = False
    _credit_s: float = 0.0
    _plain_credit_s: float = 0.0  # for a trial of plain steps, since the last one
    _owed_s: float | None = None  # of the first credit, which is earned before any other; None before it is given
    _run: _Run = field(default_factory=_Run)
    _ratios: dict[int, dict[int, float]] = field(default_factory=dict)
    _least_scales: dict[int, float] = field(default_factory=dict)  # of costs, by rows, at which drafts can pay
    _plain_left: int = PLAIN_TRIAL_STEPS  # steps of a trial; a server begins with one
    _ends: float = FIRST_ENDS
    _waits: bool = False  # the last choice, with a step in flight, waits for that
    _runs: bool = False  # the last choice is verified
    _trial: bool = False  # the last choice was one
    _doubted: bool = False  # one was made that could not pay by what was known

    def could_gain(self, rows: int) -> bool:
        """Whether drafts would pay in steps of `rows` sequences if all of them were accepted. Cheap: asked for each
        plan."""
        least = self._least_scales.get(rows)
        if least is None:
            gains = {count: 1 + count / rows for count in self._sized(rows)}
            paying = (GAIN / gain / self._sized(rows)[count] for count, gain in gains.items() if gain >= GAIN)
            least = self._least_scales[rows] = min(paying, default=inf)
        return self.costs.scale >= least

    def proposes(self, rows: int) -> bool:
        """Whether drafts are worth having where `rows` sequences decode."""
        if self._may_gain(rows):
            return True
        self.reason = f"{rows} sequences would gain nothing, whatever is accepted"
        return False

    def choose(self, seqs: Collection[Sequence], *, in_flight: bool) -> dict[Sequence, int]:
        """Return how many draft tokens to verify of each of `seqs`, all that decode; without those that have none.

        `in_flight`: a step in flight samples another token of each. The first draft is this token then, and is not to
        be verified any more: the choice is what could be done once that step is finished.
        """
        verified, waited, tried, ran = self.verifies, self._waits, self._trial, self._runs
        self._trial = False
        self._run.count(self.costs)
        drafts = self._choose(seqs, in_flight=in_flight)
        self._waits, self._runs = in_flight and bool(drafts), bool(drafts) and not in_flight
        if self._runs:
            self._run.rows, self._run.drafts = len(seqs), sum(drafts.values())
            self._doubted = self._doubted or not self.could_gain(len(seqs))
        elif (ran or waited) and not self._waits:
            self._end_run(len(seqs))
        if not in_flight and not self._plain_left and (verified or (waited and not tried)):
            self._observe_end(not self.verifies)
        return drafts

    def _end_run(self, rows: int) -> None:
        """Pay what a run has lost, and the plain step behind it, which waited."""
        left_s = self._credit_s - max(0.0, self._run.lost_s + self.costs.refill_s(rows))
        self._credit_s = max(left_s, -_MOST_DEBT_STEPS * self.costs.plain_s(rows))
        self._run = _Run()

    def _choose(self, seqs: Collection[Sequence], *, in_flight: bool) -> dict[Sequence, int]:
        offers = {seq: chances for seq in seqs if seq.ready and (chances := self._chances(seq, in_flight))}
        if not offers:
            self.verifies = False
            if seqs:
                self.reason = NOTHING_READY
            return {}
        if self._plain_left:
            self._plain_left -= 1
            return {}
        rows = len(seqs)
        if (room := MAX_SCORED_TOKENS - rows) < TRIAL_TOKENS:
            self.verifies, self.reason = False, NO_ROOM
            return {}
        self._advance(rows)
        if (bound := self._bound(rows, max(chances[0] for chances in offers.values()), self._ends)) < GAIN:
            return self._refused(rows, bound, offers)
        drafts = [(chance, -place, seq) for seq, chances in offers.items() for place, chance in enumerate(chances)]
        drafts.sort(key=itemgetter(0, 1), reverse=True)
        del drafts[room:]
        gain, count = self._best(rows, [chance for chance, _, _ in drafts])
        if gain < GAIN:
            return self._refused(rows, gain, offers)
        if not (self.outcomes or any(seq.match for seq in offers)):
            return self._refused(rows, gain, offers, NOTHING_KNOWN)
        self.reason = ""
        if self.verifies and self._tries_plain(rows, gain):
            return {}
        self.verifies = not in_flight
        return Counter(seq for _, _, seq in drafts[: min(count, self.most * (1 + self.outcomes))])

    def observe(self, seq: Sequence, match: int, drafted: int, accepted: int) -> None:
        """Learn that of `drafted` draft tokens of `seq`, behind `match` matching ones, the first `accepted` were right,
        and the next one, if any, was not."""
        if seq.acceptance is None:
            seq.acceptance = MatchedAcceptance(self.usual)
        self.outcomes += 1
        seq.acceptance.of(match).observe(drafted, accepted)
        self.usual.of(match).observe(drafted, accepted)

    def observe_gain(self, tokens: int) -> None:
        """Learn that the step that verifies has gained `tokens` of a sequence by its drafts."""
        self._run.accepted += tokens

    def observe_plain(self, rows: int, seconds: float) -> None:
        """Learn from a plain step of `rows` sequences that followed another."""
        self._earn(rows, seconds)
        self._plain_credit_s = 0.0
        self._ends += TRIAL_SHARE * (FIRST_ENDS - self._ends)
        self.costs.observe_plain(rows, seconds)

    def observe_verifying(self, rows: int, drafts: int, seconds: float) -> None:
        """Learn from a step of `rows` sequences that verified `drafts` tokens in all."""
        self._plain_credit_s += TRIAL_SHARE * seconds
        self.costs.observe_verifying(rows, drafts, seconds)

    def _observe_end(self, ended: bool) -> None:
        self._ends = FORGET * self._ends + (1 - FORGET) * ended

    def _advance(self, rows: int) -> None:
        """Give the first credit, once."""
        if self._owed_s is None:
            self._owed_s = FIRST_CREDIT_STEPS * self.costs.plain_s(rows)
            self._credit_s += self._owed_s

    def _earn(self, rows: int, seconds: float) -> None:
        earned_s = TRIAL_SHARE * seconds
        if self._owed_s:
            paid_s = min(self._owed_s, earned_s)
            self._owed_s, earned_s = self._owed_s - paid_s, earned_s - paid_s
        self._credit_s += earned_s
        if self._credit_s > _MOST_CREDIT_S:
            self._credit_s = min(max(_MOST_CREDIT_S, 2 * self._doubtful_s(rows)), self._credit_s)

    def _chances(self, seq: Sequence, in_flight: bool) -> list[float]:
        """Return for each draft of `seq` that can be verified the chance that it is accepted. A step `in_flight`
        samples the first of those that were looked up; others are computed behind its token."""
        sampled = int(in_flight and seq.match > 0)
        count = min(seq.ready, min(self.most, seq.draftable_tokens) + sampled)
        return (seq.acceptance or self.usual).of(seq.match).reached(count)[sampled:]

    def _bound(self, rows: int, chance: float, ends: float) -> float:
        """Return the tokens per second over those of plain steps, at most, if `chance` is the best of all drafts, and
        the part `ends` of steps is the last of its run."""
        speed = self._speed(rows, ends)
        return max((1 + chance * count / rows) * speed(ratio) for count, ratio in self._sized(rows).items())

    def _best(self, rows: int, chances: Ordered[float]) -> tuple[float, int]:
        """Return the most tokens per second over those of plain steps, and how many of the drafts give it."""
        accepted, speed = list(accumulate(chances)), self._speed(rows, self._ends)
        counts = [(count, ratio) for count, ratio in self._sized(rows).items() if count < len(accepted)]
        counts.append((len(accepted), self.costs.ratio(rows, len(accepted))))
        return max(((1 + accepted[count - 1] / rows) * speed(ratio), count) for count, ratio in counts)

    def _speed(self, rows: int, ends: float) -> Callable[[float], float]:
        """Return what makes of a ratio of costs the steps that verify in the time of a plain one: less than one,
        whatever was measured, as they compute more."""
        scale, end = self.costs.scale, ends * self.costs.refill_s(rows) / self.costs.plain_s(rows)
        return lambda ratio: 1 / (max(1.0, 1 / (scale * ratio)) + end)

    def _sized(self, rows: int) -> dict[int, float]:
        """Return the ratios of costs by numbers of drafts, up to those of all sequences."""
        found = self._ratios.get(rows)
        if found is None:
            found = {count: self.costs.ratio(rows, count) for count in _sizes(self.most * rows)}
            self._ratios[rows] = found
        return found

    def _refused(
        self, rows: int, gain: float, offers: dict[Sequence, list[float]], reason: str = ""
    ) -> dict[Sequence, int]:
        """Return the drafts of a trial, as the others don't pay, or for another `reason`."""
        self.verifies = False
        self.reason = reason or f"{rows} sequences would have {gain:.2f} times the tokens per second"
        return self._try_drafts(rows, offers)

    def _try_drafts(self, rows: int, offers: dict[Sequence, list[float]]) -> dict[Sequence, int]:
        """Return a few drafts of the sequences whose last ones are the oldest, where there is credit for them and more
        drafts could pay, or what is known of their costs may be out of date. A run that goes on pays for its end but
        once."""
        left_s = self._credit_s - self._run.lost_s - self.costs.refill_s(rows)
        count = TRIAL_TOKENS if slower_s(self.costs, rows, TRIAL_TOKENS) <= left_s else 1
        if slower_s(self.costs, rows, count) > left_s or not self._may_gain(rows):
            return {}
        self._trial = True
        oldest = sorted(offers, key=lambda seq: seq.last_verified)[:count]
        drafts = sorted((place, i) for i, seq in enumerate(oldest) for place in range(len(offers[seq])))
        return Counter(oldest[i] for _, i in drafts[:count])

    def _may_gain(self, rows: int) -> bool:
        """Whether drafts could pay, or there is credit for a trial of some that could not by what is known: only trials
        correct that, and a busy machine may have made it look so, in the warm-up, too."""
        if self.could_gain(rows):
            return True
        self._advance(rows)
        return self._credit_s - max(0.0, self._run.lost_s) >= self._doubtful_s(rows)

    def _doubtful_s(self, rows: int) -> float:
        """Return the credit for a trial that could not pay by what is known: a first one needs no more than others."""
        return (DOUBTFUL_TRIALS if self._doubted else 1.0) * (slower_s(self.costs, rows, 1) + self.costs.refill_s(rows))

    def _tries_plain(self, rows: int, gain: float) -> bool:
        """Begin a few plain steps, where there is credit for what they take longer."""
        cost_s = PLAIN_TRIAL_STEPS * self.costs.plain_s(rows) * (1 - 1 / gain)
        if cost_s + self.costs.refill_s(rows) > self._plain_credit_s:
            return False
        self._plain_credit_s = 0.0
        self.verifies = False
        self._plain_left = PLAIN_TRIAL_STEPS - 1
        return True


def slower_s(costs: VerifyCosts, rows: int, drafts: int) -> float:
    """Return the expected seconds that a step of `rows` sequences with `drafts` takes longer than a plain one."""
    plain_s = costs.plain_s(rows)
    return max(costs.verifying_s(rows, drafts) - plain_s, _LEAST_COST * plain_s)


def _sizes(most: int) -> Iterator[int]:
    """Yield numbers of draft tokens up to `most`, the last one, each about a third more than the one before."""
    size = 1
    while size < most:
        yield size
        size += max(1, size // 3)
    yield most
