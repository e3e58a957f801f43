"""Draft tokens of a step: as many as raise the tokens per second, down to none.

The most probable draft tokens of all sequences are taken first. Their number is the one that gives the most tokens per
second by the expected cost of the step, and plain decoding remains where none gives clearly more. So there is no
threshold of batch size or acceptance, and nothing is verified that does not pay.

What is not done is not measured: costs and chances of the way that is off may have changed since. A share of the time
pays for trials: a step that verifies the drafts of one sequence while steps are plain, and a few plain steps while they
verify.

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

from .acceptance import MatchedAcceptance
from .sequence import Sequence
from .verify_costs import VerifyCosts

GAIN = 1.02  # tokens per second over those of plain decoding, from which on drafts are verified
TRIAL_SHARE = 0.005  # of the time
TRIAL_TOKENS = 4
FIRST_CREDIT_STEPS = 0.5  # of one sequence, for the first trial of a server that knows nothing
PLAIN_TRIAL_STEPS = 4  # the first of them waits for the step before
FIRST_ENDS = 0.125  # of steps that verify are the last of their run, before anything is known
FORGET = 0.9  # weight of the past against each new step
NOTHING_READY = "no tokens are proposed"
_MOST_CREDIT_S = 1.0
_LEAST_COST = 0.1  # of a plain step: what a trial counts where it is no slower


@dataclass(slots=True)
class DraftBudget:
    """Choice of the draft tokens of each step, at most `most` of a sequence, and what it is learned from.

    `usual` are the chances over all sequences, `verifies` says whether the last choice was drafts, and no trial, and
    `reason` why it was none; empty if it was not.
    """

    costs: VerifyCosts
    most: int
    usual: MatchedAcceptance = field(default_factory=MatchedAcceptance)
    reason: str = NOTHING_READY
    verifies: bool = False
    _credit_s: float = 0.0
    _tried_s: float = 0.0  # what was paid for the trial in flight
    _ratios: dict[int, dict[int, float]] = field(default_factory=dict)
    _least_scales: dict[int, float] = field(default_factory=dict)  # of costs, by rows, at which drafts can pay
    _plain_left: int = PLAIN_TRIAL_STEPS  # steps of a trial; a server begins with one
    _ends: float = FIRST_ENDS
    _outcomes: int = 0  # that were observed: a server that knows few verifies few drafts
    _waits: bool = False  # the last choice, with a step in flight, waits for that
    _trial: bool = False  # the last choice was one

    def __post_init__(self) -> None:
        self._credit_s = FIRST_CREDIT_STEPS * self.costs.plain_s(1)

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
        if self.could_gain(rows):
            return True
        self.reason = f"{rows} sequences would gain nothing, whatever is accepted"
        return False

    def choose(self, seqs: Collection[Sequence], *, in_flight: bool) -> dict[Sequence, int]:
        """Return how many draft tokens to verify of each of `seqs`, all that decode; without those that have none.

        `in_flight`: a step in flight samples another token of each. The first draft is this token then, and is not to
        be verified any more: the choice is what could be done once that step is finished.
        """
        verified, waited, tried = self.verifies, self._waits, self._trial
        self._trial = False
        drafts = self._choose(seqs, in_flight=in_flight)
        self._waits = in_flight and bool(drafts)
        if waited and tried and not drafts:
            self._credit_s -= self.costs.refill_s(len(seqs))
        elif not in_flight and not self._plain_left and (verified or (waited and not tried)):
            self._observe_end(not self.verifies)
        return drafts

    def _choose(self, seqs: Collection[Sequence], *, in_flight: bool) -> dict[Sequence, int]:
        offers = {seq: chances for seq in seqs if seq.ready and (chances := self._chances(seq, in_flight))}
        if not offers:
            self.verifies = False
            self.reason = NOTHING_READY
            return {}
        if self._plain_left:
            self._plain_left -= 1
            return {}
        rows = len(seqs)
        if (bound := self._bound(rows, max(chances[0] for chances in offers.values()), self._ends)) < GAIN:
            return self._refused(rows, bound, offers, in_flight)
        drafts = [(chance, -place, seq) for seq, chances in offers.items() for place, chance in enumerate(chances)]
        drafts.sort(key=lambda draft: draft[:2], reverse=True)
        gain, count = self._best(rows, [chance for chance, _, _ in drafts])
        if gain < GAIN:
            return self._refused(rows, gain, offers, in_flight)
        self.reason = ""
        if self.verifies and self._tries_plain(rows, gain):
            return {}
        self.verifies = not in_flight
        return Counter(seq for _, _, seq in drafts[: min(count, self.most * (1 + self._outcomes))])

    def observe(self, seq: Sequence, match: int, drafted: int, accepted: int) -> None:
        """Learn that of `drafted` draft tokens of `seq`, behind `match` matching ones, the first `accepted` were right,
        and the next one, if any, was not."""
        if seq.acceptance is None:
            seq.acceptance = MatchedAcceptance(self.usual)
        self._outcomes += 1
        seq.acceptance.of(match).observe(drafted, accepted)
        self.usual.of(match).observe(drafted, accepted)

    def observe_plain(self, rows: int, seconds: float) -> None:
        """Learn from a plain step of `rows` sequences that followed another."""
        self._earn(seconds)
        self._ends += TRIAL_SHARE * (FIRST_ENDS - self._ends)
        self.costs.observe_plain(rows, seconds)

    def observe_verifying(self, rows: int, drafts: int, seconds: float) -> None:
        """Learn from a step of `rows` sequences that verified `drafts` tokens in all."""
        self._earn(seconds)
        if self._tried_s:
            self._credit_s += self._tried_s - _slower_s(seconds, self.costs.plain_s(rows))
            self._tried_s = 0.0
        self.costs.observe_verifying(rows, drafts, seconds)

    def _observe_end(self, ended: bool) -> None:
        self._ends = FORGET * self._ends + (1 - FORGET) * ended

    def _earn(self, seconds: float) -> None:
        self._credit_s = min(_MOST_CREDIT_S, self._credit_s + TRIAL_SHARE * seconds)

    def _chances(self, seq: Sequence, in_flight: bool) -> list[float]:
        """Return for each draft of `seq` that can be verified the chance that it is accepted."""
        count = min(seq.ready, self.most + in_flight)
        return (seq.acceptance or self.usual).of(seq.match).reached(count)[in_flight:]

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
        self, rows: int, gain: float, offers: dict[Sequence, list[float]], in_flight: bool
    ) -> dict[Sequence, int]:
        """Return the drafts of a trial, as the others don't pay."""
        self.verifies = False
        self.reason = f"{rows} sequences would have {gain:.2f} times the tokens per second"
        return self._try_drafts(rows, offers, in_flight)

    def _try_drafts(self, rows: int, offers: dict[Sequence, list[float]], in_flight: bool) -> dict[Sequence, int]:
        """Return a few drafts of the sequence whose last ones are the oldest, where there is credit for it and more
        drafts could pay."""
        seq = min(offers, key=lambda seq: seq.last_verified)
        count = min(TRIAL_TOKENS, len(offers[seq]))
        cost_s = self._trial_s(rows, count)
        if cost_s > self._credit_s:
            count, cost_s = 1, self._trial_s(rows, 1)
        if cost_s > self._credit_s or not self.could_gain(rows):
            return {}
        self._trial = True
        if not in_flight:
            self._credit_s -= cost_s
            self._tried_s = cost_s
        return {seq: count}

    def _trial_s(self, rows: int, count: int) -> float:
        """Return the expected seconds that a trial of `count` drafts takes longer than a plain step."""
        plain_s = self.costs.plain_s(rows)
        return min(_slower_s(self.costs.verifying_s(rows, count), plain_s), plain_s)

    def _tries_plain(self, rows: int, gain: float) -> bool:
        """Begin a few plain steps, where there is credit for what they take longer."""
        cost_s = PLAIN_TRIAL_STEPS * self.costs.plain_s(rows) * (1 - 1 / gain)
        if cost_s > self._credit_s:
            return False
        self._credit_s -= cost_s
        self.verifies = False
        self._plain_left = PLAIN_TRIAL_STEPS - 1
        return True


def _slower_s(verifying_s: float, plain_s: float) -> float:
    """The seconds that a trial of drafts takes longer."""
    return max(verifying_s - plain_s, _LEAST_COST * plain_s)


def _sizes(most: int) -> Iterator[int]:
    """Yield numbers of draft tokens up to `most`, the last one, each about a third more than the one before."""
    size = 1
    while size < most:
        yield size
        size += max(1, size // 3)
    yield most
