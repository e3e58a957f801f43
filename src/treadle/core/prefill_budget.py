"""How many prompt tokens one step may compute, so that decoding rows and cancels never wait long for a prefill.

Prefill time is paid from a credit that every decode step earns: a share of its own duration. The share is LEAST_SHARE
while no more rows prefill than decode, so that running rows keep 1 / (1 + LEAST_SHARE) of their rate beside a long
prompt; where more wait than run, as at the start of a burst, it grows with their ratio up to MOST_SHARE, and a step is
at most three times a plain decode step: short waits for many are worth a few slow tokens of few. Where nothing decodes,
a chunk is bounded by `CHUNK_S`, which bounds how long a cancel or a newcomer waits, or by a few times the overhead of a
pass, up to `LONGEST_CHUNK_S`: where reading the weights alone takes a tenth of a second, shorter chunks would do little
else. A chunk's cost is taken as `overhead + tokens * per_token`, fitted to what the runner measured, apart for chunks
that had a pass of their own and those beside decoding rows, which read the weights anyway.

A chunk makes its step no longer than about twice a decode step. Where the overhead is that much by itself, chunks are
few and large: up to two overheads each, and what they cost is earned before the next.

Steps are planned while others are in flight. What a chunk is expected to cost is spent when its step takes off (a
Bill), and put right when the step has been measured. While a step is computed the host prepares the next one; where
that takes longer, the rows of the step before wait for a chunk, not those of its own step. What chunks cost in advance
is told apart, as it is the same for any number of tokens.

A prompt so short that one step can end it beside the decoding rows is quick: it goes in at once and on no credit, as
each such row is paid for once, while a long prompt takes its share in every step. So a staggered burst gets its first
tokens as evenly as it arrives. Quick and long together take about MOST_SHARE of a decode step at most; beside a CROWD
of rows, each of which would wait, about one (P2).

Chunks that do not end a prompt are multiples of a quantum. On CUDA a chunk of a new length, or behind a new number of
tokens, costs several times its computing once, where its attention is planned anew: a coarse quantum keeps them few.
Where passes are compiled for each of a few sizes, budgets are of one of those.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass

from .chunk_cost import ChunkCost

LEAST_SHARE = 0.35
MOST_SHARE = 2.0
CROWD = 128  # decoding rows
CHUNK_CEILING = 0.75  # of a decode step, the longest that one chunk at LEAST_SHARE holds a step up
HIGH_CEILING = 0.85  # the same, where much of a chunk is overhead
MIN_CHUNK = 16
FIRST_CHUNK = 64
WORTH_BESIDE = 3.0  # a chunk beside decoding rows is worth this many overheads, if it may take so long
HIGH_OVERHEAD = 1.5  # with fewer overheads below the ceiling, that is high
OVER_OVERHEAD = 1.15  # a chunk may cost this many overheads, also where that is over the ceiling
MOST_OVERHEADS = 2.0  # the same, the further one overhead by itself is over a decode step
SAVINGS = 1.5  # in decode steps, the most credit that is kept; more where one chunk may cost more
DEBT = 3.0  # in decode steps, the most that is paid for one step's chunks: a slow pass holds up nobody for long
OWED = 4.0  # the same, of all that is owed
DEBTS = 1.5  # the same, in what was expected, where that is more
SMALLER_EACH = 4  # one chunk in so many is half as large
SLOWER = 1.5  # of what a decode step takes: one that takes more counts for no more, as it may be chance
FASTER = 0.8  # of what a decode step takes: one that takes less is news, whatever is prepared in it
FORGET_EARLY = 0.7  # weight of the past against each new measurement, of what chunks cost before their own step


@dataclass(slots=True, eq=False)
class Charge:
    """What the prompts of a planned step are expected to cost, and what of that the step before it was held up by."""

    tokens: int = 0
    beside: bool = False  # whether rows decode beside them
    on_credit: float = 1.0  # the part of the tokens that is paid from the credit
    expected_s: float = 0.0
    early_s: float = 0.0


class PrefillBudget:
    """Decides each step's prefill budget. `max_tokens` is the most a step may take, whatever the time; `quantum` is
    what chunks are multiples of, and `sizes`, which ascend, what budgets are rounded down to: those that are smaller
    or larger than all of them stay as they are.

    A step is planned by `split`, billed by `bill` when it is certain, and then either `observe`d, in the order of the
    bills, or `void`.
    """

    def __init__(self, max_tokens: int, quantum: int = MIN_CHUNK, sizes: Sequence[int] = ()) -> None:
        self.max_tokens = max_tokens
        self._sizes = sizes
        self._quantum = min(max(quantum, MIN_CHUNK), max_tokens)
        self._costs = {False: ChunkCost(), True: ChunkCost()}  # by whether rows decoded beside the chunk
        self._early_s: float | None = None  # of what chunks beside decoding rows cost, what the step before them does
        self._decode_s = 0.0
        self._credit_s = 0.0
        self._billed_s = 0.0  # for what is in flight
        self._chunks = 0
        self._share = LEAST_SHARE
        self._on_credit = 1.0  # as in a Bill, of the last split
        self._beside = False

    # Planning ----------------------------------------------------------------------------------------------------

    def split(self, remaining: list[int], *, decoding: int, awaiting: int = 0) -> list[int]:
        """Prompt tokens that the next step computes of each prefill, of which `remaining` tokens are left, in turn
        order, beside `decoding` rows that decode; `awaiting` more rows wait for what these compute."""
        self._on_credit = 1.0
        self._beside = decoding > 0
        room = self._room(decoding)
        quick = [i for i, need in enumerate(remaining) if need <= room]
        budget = self.budget(prefilling=max(1, len(remaining) - len(quick)) + awaiting, decoding=decoding)
        if not quick:
            return share(budget, remaining, self._quantum)
        long = [0 if need <= room else need for need in remaining]
        beside = self.max_tokens - remaining[quick[0]]
        if budget and any(long) and beside < self._quantum:  # a quick one that fills a step lets them go first
            return share(budget, long, self._quantum)
        budget = min(budget, max(room // 2, self._quantum), beside)
        shares = share(budget, long, self._quantum)
        on_credit = sum(shares)
        for i in self._fitting(quick, remaining, room - on_credit):
            shares[i] = remaining[i]
        self._on_credit = on_credit / sum(shares)
        return shares

    def _fitting(self, quick: list[int], remaining: list[int], room: int) -> Iterator[int]:
        """Those of `quick` that fit in turn; the first does whatever the long ones took, so that none starves."""
        for i in quick:
            if remaining[i] <= room or i == quick[0]:
                room -= remaining[i]
                yield i

    def _room(self, decoding: int) -> int:
        """The tokens that a step may take for quick prompts; 0 where nobody decodes: there is no one to spare."""
        if not decoding or self._decode_s == 0 or not self._cost.known:
            return 0
        early_s = self._early_s or 0.0
        own_s = max(0.0, self._cost.line()[0] - early_s)
        longest_s = max(_most_share(decoding) * self._decode_s, OVER_OVERHEAD * own_s)
        return min(self._cost.tokens(early_s + longest_s), self.max_tokens)

    def budget(self, *, prefilling: int, decoding: int) -> int:
        """Prompt tokens that the next step may compute for `prefilling` rows beside `decoding` ones; 0 while those are
        still owed time."""
        self._beside = decoding > 0
        if not self._cost.known:
            return min(self.max_tokens, max(FIRST_CHUNK, self._quantum))
        if not decoding or self._decode_s == 0:
            return self._clamp(self._cost.tokens_alone())
        self._share = min(_most_share(decoding), LEAST_SHARE * max(1.0, prefilling / decoding))
        chunk = self._chunk()
        price = min(self._cost.seconds(chunk), self._ceiling_s)
        return chunk if self._credit_s - self._billed_s >= price * 0.999 else 0

    @property
    def _cost(self) -> ChunkCost:
        """What chunks cost as the next one is computed, or as far as that is not known, as others are."""
        cost = self._costs[self._beside]
        return cost if cost.known else self._costs[not self._beside]

    def _chunk(self) -> int:
        """The tokens of a chunk beside decoding rows: for one step's earnings, or as many as are worth the overhead and
        don't hold its step up too long. Some are half as large, as sizes that are alike don't tell the overhead."""
        overhead, _ = self._cost.line()
        worth_s = max(self._share * self._decode_s, WORTH_BESIDE * overhead)
        chunk = self._clamp(self._cost.tokens(min(worth_s, self._longest_s(overhead))))
        smaller = not self._cost.told_apart or self._chunks % SMALLER_EACH == 0
        return self._whole(max(1, chunk // 2)) if smaller and self._quantum <= MIN_CHUNK else chunk

    def _longest_s(self, overhead: float) -> float:
        """The most that a chunk may cost, where one without tokens costs `overhead`: what the step before is held up,
        which no token adds to, and what its own may be."""
        early_s, decode_s = self._early_s or 0.0, self._decode_s
        own = max(0.0, overhead - early_s)
        high = min(HIGH_CEILING * decode_s, HIGH_OVERHEAD * overhead)
        beyond = min(MOST_OVERHEADS * own, own + MOST_OVERHEADS * (own - decode_s))
        return early_s + max(self._ceiling_s, high, OVER_OVERHEAD * own, beyond)

    @property
    def _ceiling_s(self) -> float:
        return max(CHUNK_CEILING, self._share) * self._decode_s

    def _clamp(self, tokens: int) -> int:
        if self._quantum > MIN_CHUNK:
            tokens -= tokens % self._quantum
        return self._whole(min(max(tokens, self._quantum), self.max_tokens))

    def _whole(self, tokens: int) -> int:
        """The largest of the sizes that so many tokens fill."""
        below = bisect_right(self._sizes, tokens)
        return self._sizes[below - 1] if 0 < below < len(self._sizes) else tokens

    # Paying ------------------------------------------------------------------------------------------------------

    def bill(self, tokens: int, *, beside: bool) -> Charge:
        """The step that was split last computes `tokens` of prompts, `beside` decoding rows or not, and is in flight
        from now on: what it is expected to cost is spent."""
        cost = self._costs[beside]
        expected_s = cost.seconds(tokens) * self._on_credit if tokens and beside and cost.known else 0.0
        self._billed_s += expected_s
        self._chunks += tokens > 0
        return Charge(tokens, beside, self._on_credit, expected_s)

    def void(self, bill: Charge) -> None:
        """The step was not computed."""
        self._billed_s -= bill.expected_s

    def observe(self, bill: Charge, *, prefill_s: float, decode_s: float, behind: Charge | None = None) -> None:
        """Learn from a finished step how long each part of it took. `behind` is the one that was prepared in that time:
        where preparing prompts takes long, it is this step's rows that wait."""
        self.void(bill)
        if behind is not None and behind.tokens and bill.tokens:
            behind.early_s = min(prefill_s, self._early_s or 0.0)
            prefill_s -= behind.early_s
        elif behind is not None and behind.tokens and decode_s > FASTER * self._decode_s > 0:
            behind.early_s = decode_s - self._decode_s
            decode_s = self._decode_s
            self._prepared(behind.early_s)
        if decode_s > 0:
            past_s = self._decode_s or decode_s
            decode_s = min(decode_s, SLOWER * past_s)
            self._decode_s = 0.7 * past_s + 0.3 * decode_s
            self._credit_s += self._share * decode_s
        if bill.tokens:
            self._pay(bill, prefill_s)
        most = max(SAVINGS, self._share) * self._decode_s
        if bill.beside and decode_s > 0:
            self._credit_s = max(-OWED * self._decode_s, min(self._credit_s, most))
        else:
            self._credit_s = most  # nobody had to wait for that chunk

    def _prepared(self, early_s: float) -> None:
        """A step of decoding rows was longer by `early_s` as a chunk was prepared in it. By less than nothing, that is
        chance, and counts too."""
        past_s = early_s if self._early_s is None else self._early_s
        early_s = min(early_s, past_s + self._decode_s)
        self._early_s = max(0.0, FORGET_EARLY * past_s + (1 - FORGET_EARLY) * early_s)

    def _pay(self, bill: Charge, own_s: float) -> None:
        """Take what the chunks cost from the credit, but for what is far too much to be so again, and learn from it."""
        seconds = max(0.0, bill.early_s + own_s)
        self._credit_s -= min(seconds * bill.on_credit, max(DEBT * self._decode_s, DEBTS * bill.expected_s))
        cost = self._costs[bill.beside]
        if seconds > 0 and not cost.known:
            self._costs[bill.beside] = cost = copy(self._costs[not bill.beside])
        if seconds > 0 or cost.known:
            cost.observe(bill.tokens, seconds)


def _most_share(decoding: int) -> float:
    return min(MOST_SHARE, max(1.0, CROWD / decoding))


def share(budget: int, remaining: list[int], quantum: int = MIN_CHUNK) -> list[int]:
    """Split `budget` tokens among prefills with `remaining` tokens each, in turn order.

    Everyone gets an equal part (at least `quantum`, first come first served where that is too little for all) and what
    the short ones leave goes to the others: a short prompt overtakes a long one, and a long one never starves,
    as the caller puts those that were served last behind. Nobody gets a part smaller than `quantum` that does not
    finish its prompt, if others get more: a pass over the model for a few tokens costs as much as one for many. A
    `quantum` above MIN_CHUNK is coarse: every part that does not finish its prompt is a multiple of it.
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
    return shares if coarse else _without_crumbs(shares, remaining, quantum)


def _without_crumbs(shares: list[int], remaining: list[int], quantum: int) -> list[int]:
    """`shares` with the part that is too small given to the first who can use it. At most one is: the last served."""
    small = [i for i, got in enumerate(shares) if 0 < got < min(quantum, remaining[i])]
    if not small or sum(map(bool, shares)) == 1:
        return shares
    crumb, shares[small[0]] = shares[small[0]], 0
    for i, need in enumerate(remaining):
        extra = min(crumb, need - shares[i]) if shares[i] else 0
        shares[i] += extra
        crumb -= extra
    return shares
