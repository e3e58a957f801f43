"""The prompt tokens that each step may compute, so that decoding sequences and cancels never wait long for a prefill.

1. Chunks beside decoding sequences are paid from a credit. Each decode step adds a share of its own duration to it:
   LEAST_SHARE while no more prompts wait than sequences decode, so that those keep 1 / (1 + LEAST_SHARE) of their rate;
   up to MOST_SHARE where more wait, as at the start of a burst. Then a step takes three decode steps: short waits of
   many are worth a few slow tokens of few.
2. A chunk makes its step no longer than about two decode steps. Where the overhead takes that long by itself, chunks
   are few and large: up to two overheads each. Where more prompts wait than sequences decode, up to three, the more so
   the more of them wait: small chunks would keep all of them waiting for overheads.
3. Steps are planned while others are in flight. The expected cost of a chunk is spent when its step is planned (a
   Charge), and corrected when the step has been measured. Where preparing a chunk delays the step before, that is a
   part of its cost.
4. A prompt that one step can end is computed at once and paid for by nobody, as it delays each decoding sequence only
   once, where a long prompt takes its share in every step. So a staggered burst gets its first tokens as evenly as it
   arrives. All prompts of a step take about MOST_SHARE of a decode step at most, and beside CROWD decoding sequences,
   each of which would wait, about one (P2). Forced tokens, and prompts that are only pooled, are paid from the credit,
   as they come again and again, in long lists; a single token is free, as it costs no more than a sampled one. Prompts
   with images are paid as well, up to the last one: their first tokens have waited for its layers, and even bursts of
   them don't come out evenly. So is the end of a long prompt, of which more was computed than a step could end: a few
   steps are little of its time.
5. Where nothing decodes, a chunk takes `CHUNK_S`, which bounds the wait of a cancel or of a new request, or a few times
   the overhead of a pass, up to `LONGEST_CHUNK_S`: where reading the weights takes a tenth of a second, shorter chunks
   would do little else. Where an overhead alone takes longer than that, on slow or busy machines, the chunk is as long
   again, up to `SLOWEST_CHUNK_S`.
6. A step computes layers of images in place of prompts, where they have their turn. They are paid like chunks, from the
   same credit, and take no longer.

`StepTimes` learns what decode steps and chunks take. The cost of a chunk is `overhead + tokens * per_token`, fitted to
measured steps, separately for chunks with a pass of their own and for those beside decoding sequences, which read the
weights anyway.

Chunks that do not end a prompt are multiples of a quantum. On CUDA a chunk of a new length, or behind a new number of
tokens, costs several times its computing once, where its attention is planned anew: a coarse quantum keeps them few.
Where passes are compiled for each of a few sizes, budgets are of one of those.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from .capabilities import StepCost
from .chunk_cost import ChunkCost
from .chunk_limits import MIN_CHUNK, ChunkLimits, Work
from .step_times import Charge, StepTimes

LEAST_SHARE = 0.35
MOST_SHARE = 2.0
CROWD = 128  # decoding rows
CHUNK_CEILING = 0.75  # decode steps, the most that a chunk at LEAST_SHARE adds to a step
HIGH_CEILING = 0.85  # the same, where much of a chunk is overhead
WORTH_BESIDE = 3.0  # overheads that a chunk beside decoding sequences takes, if it may take so long
MOST_DELAY = 1.5  # decode steps, the most delay that is taken for the same whatever a chunk's length
HIGH_OVERHEAD = 1.5  # an overhead is high where fewer than this fit below the ceiling
OVER_OVERHEAD = 1.15  # overheads that a chunk may take, even above the ceiling
MOST_OVERHEADS = 2.0  # the same, the further one overhead alone is above a decode step
MOST_CREDIT = 1.5  # decode steps, the most credit; more where one chunk may cost more
MOST_CHARGED = 3.0  # decode steps, the most that is paid for one step: a slow pass delays prompts for a few steps
MOST_DEBT = 4.0  # decode steps, the least credit, below zero
MOST_ABOVE_EXPECTED = 1.5  # times the expected cost, what may be paid for a step where that is more than MOST_CHARGED
SMALLER_EACH = 4  # one chunk in this many is half as large


class Shares(NamedTuple):
    """Prompt tokens that a step computes of each prefill, and the part of them that is paid from the credit."""

    tokens: list[int]
    on_credit: float


class PrefillBudget:
    """The prefill budget of each step.

    `max_tokens` limits a step's prompt tokens, whatever their time. Chunk lengths are multiples of `quantum`. Budgets
    are rounded down to one of `sizes`, ascending, but for those below or above all of them.

    `others` are the limits of other kinds of work than prompts: these have costs of their own, and are all paid from
    the credit. `chunks` of each kind by themselves may have been measured before: one alone is left out, as it would
    not tell the overhead.

    `split` plans a step, `split_scoring` one that scores prompts. `charge` spends the expected cost of one that is
    started; its Charge is then either passed to `observe`, in the order of the charges, or to `void`.
    """

    def __init__(
        self,
        max_tokens: int,
        quantum: int = MIN_CHUNK,
        sizes: Sequence[int] = (),
        others: Mapping[Work, ChunkLimits] | None = None,
        chunks: Mapping[Work, Sequence[StepCost]] | None = None,
    ) -> None:
        self.max_tokens = max_tokens
        own = ChunkLimits.of(max_tokens, quantum, sizes)
        self._limits = {Work.PROMPTS: own, **(others or {})}
        self._quantum = own.quantum
        self._times = StepTimes({work: known for work, known in (chunks or {}).items() if len(known) > 1})
        self._credit_s = 0.0
        self._reserved_s = 0.0  # for what is in flight
        self._chunks = 0
        self._filled = False  # the last step that the end of a prompt would fill was filled
        self._share = LEAST_SHARE
        self._crowded = 0.0  # part of the sequences that wait for which none decodes

    # Planning ----------------------------------------------------------------------------------------------------

    def split(
        self,
        remaining: list[int],
        *,
        decoding: int,
        awaiting: int = 0,
        forced: Collection[int] = (),
        computed: Sequence[int] = (),
    ) -> Shares:
        """Prompt tokens that the next step computes of each prefill.

        `remaining` are the tokens left of each, in turn order, and `computed` those that chunks have computed before
        (none where it is empty); those at the places in `forced` are forced tokens, of prompts that are only pooled,
        or of prompts with images. `decoding` sequences decode in the step; `awaiting` more wait for a prefix that these
        compute.
        """
        most, long = self._most_ending(decoding)
        paid = {*forced, *(i for i, count in enumerate(computed) if count > long)}
        ending = [i for i, need in enumerate(remaining) if need <= most and (need == 1 or i not in paid)]
        budget = self.budget(prefilling=max(1, len(remaining) - len(ending)) + awaiting, decoding=decoding)
        if not ending:
            return Shares(share(budget, remaining, self._quantum), 1.0)
        others = [0 if i in ending else need for i, need in enumerate(remaining)]
        beside = self.max_tokens - remaining[ending[0]]
        if beside < self._quantum:  # the first one fills a step: it and the others take turns, so that neither starves
            self._filled = not (self._filled and budget and any(others))
            if not self._filled:
                return Shares(share(budget, others, self._quantum), 1.0)
            budget = 0
        budget = min(budget, max(most // 2, self._quantum), beside)
        shares = share(budget, others, self._quantum)
        on_credit = sum(shares)
        for i in self._fitting(ending, remaining, most - on_credit):
            shares[i] = remaining[i]
        return Shares(shares, on_credit / sum(shares))

    def split_scoring(self, work: Work, remaining: list[int], *, decoding: int) -> list[int]:
        """Units that the next step does of each scoring, of which `remaining` are left, in turn order. Those of a
        look-ahead go to the first ones, as the result comes with the last unit."""
        budget = self.budget(prefilling=len(remaining), decoding=decoding, work=work)
        if work is Work.SCORING:
            return share(budget, remaining, self._limits[work].quantum)
        shares = []
        for need in remaining:
            shares.append(min(need, budget))
            budget -= shares[-1]
        return shares

    def _fitting(self, ending: list[int], remaining: list[int], most: int) -> Iterator[int]:
        """Yield the parts of `ending` that fit into `most` tokens in turn. The first always does: none starves."""
        for i in ending:
            if remaining[i] <= most or i == ending[0]:
                most -= remaining[i]
                yield i

    def _most_ending(self, decoding: int) -> tuple[int, float]:
        """The most tokens of prompts that end in the next step, 0 where nothing decodes; and how many that could be if
        chunks of that length were known."""
        cost, delay_s, decode_s = self._times.chunk_cost(beside=True), self._times.delay_s, self._times.decode_s
        if not decoding or decode_s == 0 or not cost.known:
            return 0, 0.0
        own_s = max(0.0, cost.line()[0] - delay_s)
        longest_s = max(_most_share(decoding) * decode_s, OVER_OVERHEAD * own_s)
        return min(cost.tokens(delay_s + longest_s), self.max_tokens), cost.on_the_line(delay_s + longest_s)

    def budget(self, *, prefilling: int, decoding: int, work: Work = Work.PROMPTS) -> int:
        """Prompt tokens, or units of other `work`, that the next step may compute for `prefilling` sequences beside
        `decoding` ones; 0 where the credit is less than their cost."""
        cost, limits = self._times.chunk_cost(beside=decoding > 0, work=work), self._limits[work]
        if not cost.known:
            return limits.first
        if not decoding or self._times.decode_s == 0:
            return limits.clamp(cost.tokens_alone())
        self._share = min(_most_share(decoding), LEAST_SHARE * max(1.0, prefilling / decoding))
        self._crowded = max(0.0, 1.0 - decoding / prefilling)
        chunk = self._chunk(cost, limits)
        price = min(cost.seconds(chunk), self._ceiling_s)
        return chunk if self._credit_s - self._reserved_s >= price * 0.999 else 0

    def _chunk(self, cost: ChunkCost, limits: ChunkLimits) -> int:
        """The tokens of a chunk beside decoding sequences: worth one step's credit, or WORTH_BESIDE overheads where
        that is not too long. Some chunks are half as large, every other one until sizes have differed: equal ones do
        not show the overhead."""
        overhead, _ = cost.line()
        worth_s = max(self._share * self._times.decode_s, WORTH_BESIDE * overhead)
        chunk = limits.clamp(cost.tokens(min(worth_s, self._longest_s(overhead))))
        smaller = self._chunks % (SMALLER_EACH if cost.told_apart else 2) == 0
        return limits.whole(max(1, chunk // 2)) if smaller and limits.quantum <= MIN_CHUNK else chunk

    def _longest_s(self, overhead: float) -> float:
        """The most seconds that a chunk may cost: the delay of the step before, which is the same for any number of
        tokens, and the most of its own step."""
        decode_s = self._times.decode_s
        delay_s = min(self._times.delay_s, MOST_DELAY * decode_s)
        own = max(0.0, overhead - delay_s)
        high = min(HIGH_CEILING * decode_s, HIGH_OVERHEAD * overhead)
        beyond = min(MOST_OVERHEADS * own, own + MOST_OVERHEADS * (own - decode_s))
        usual = delay_s + max(self._ceiling_s, high, OVER_OVERHEAD * own, beyond)
        return max(usual, self._crowded * WORTH_BESIDE * overhead)

    @property
    def _ceiling_s(self) -> float:
        return max(CHUNK_CEILING, self._share) * self._times.decode_s

    # Paying ------------------------------------------------------------------------------------------------------

    def charge(
        self, tokens: int, *, decoding: int, on_credit: float = 1.0, forced: int = 0, work: Work = Work.PROMPTS
    ) -> Charge:
        """Spend the expected cost of a step that is in flight from now on: it computes `tokens` tokens in chunks, of
        which `forced` ones are of no prompt, beside `decoding` sequences, the part `on_credit` paid from the credit."""
        cost, expected_s = self._times.chunk_cost(beside=True, work=work), 0.0
        if tokens and decoding and cost.known:
            expected_s = cost.seconds(tokens) * on_credit
        self._reserved_s += expected_s
        self._chunks += tokens > forced
        return Charge(tokens, decoding, on_credit, expected_s, forced=forced, work=work)

    def void(self, charge: Charge) -> None:
        """Give back the cost of a step that was not computed."""
        self._reserved_s -= charge.expected_s

    def observe(
        self,
        charge: Charge,
        *,
        prefill_s: float,
        decode_s: float,
        mixed_s: float = 0.0,
        following: Charge | None = None,
    ) -> tuple[float, float]:
        """Learn from the oldest step in flight, in whose time `following` was prepared, and pay for its prompts.

        Return the seconds of its prompts and of decoding, `mixed_s` split between both.
        """
        self.void(charge)
        prefill_s, decode_s = self._times.observe(
            charge, prefill_s=prefill_s, decode_s=decode_s, mixed_s=mixed_s, following=following
        )
        step_s = self._times.decode_s
        most = max(MOST_CREDIT, self._share) * step_s
        if charge.decoding and decode_s > 0:
            paid_s = min(
                charge.cost_s * charge.on_credit, max(MOST_CHARGED * step_s, MOST_ABOVE_EXPECTED * charge.expected_s)
            )
            self._credit_s = max(-MOST_DEBT * step_s, min(self._credit_s + self._share * step_s - paid_s, most))
        else:
            self._credit_s = most  # nothing decoded, so nothing waited
        return prefill_s, decode_s


def _most_share(decoding: int) -> float:
    return min(MOST_SHARE, max(1.0, CROWD / decoding))


def share(budget: int, remaining: list[int], quantum: int = MIN_CHUNK) -> list[int]:
    """Split `budget` tokens among prefills with `remaining` tokens each, in turn order.

    Each gets an equal part, or `quantum` tokens in turn where that is less, and the tokens that short prompts leave go
    to the others. So a short prompt overtakes a long one, and a long one never starves, as the caller puts the last
    served behind. No part that does not end its prompt is smaller than `quantum`, if others get more: a pass over the
    model for a few tokens costs as much as one for many. A `quantum` above MIN_CHUNK is coarse: each part that does not
    end its prompt is a multiple of it.
    """
    shares = [0] * len(remaining)
    left, least, coarse = budget, quantum, quantum > MIN_CHUNK
    while left > 0:
        open_ = [i for i, need in enumerate(remaining) if need > shares[i]]
        if coarse:
            open_ = [i for i in open_ if min(remaining[i] - shares[i], quantum) <= left]
        if not open_:
            break
        part = max(least, left // len(open_))
        if coarse:
            part = max(quantum, part - part % quantum)
        for i in open_:
            extra = min(part, remaining[i] - shares[i], left)
            if coarse and extra < remaining[i] - shares[i]:
                extra -= extra % quantum
            shares[i] += extra
            left -= extra
        least = 1
    return shares if coarse else _without_remainder(shares, remaining, quantum)


def _without_remainder(shares: list[int], remaining: list[int], quantum: int) -> list[int]:
    """`shares` with the part below `quantum` given to the first prefills that can use it; at most the last is one."""
    small = [i for i, got in enumerate(shares) if 0 < got < min(quantum, remaining[i])]
    if not small or sum(map(bool, shares)) == 1:
        return shares
    remainder, shares[small[0]] = shares[small[0]], 0
    for i, need in enumerate(remaining):
        extra = min(remainder, need - shares[i]) if shares[i] else 0
        shares[i] += extra
        remainder -= extra
    return shares
