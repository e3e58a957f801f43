"""How many prompt tokens one step may compute, so that decoding rows and cancels never wait long for a prefill.

Prefill time is paid from a credit that every decode step earns: a share of its own duration. The share is LEAST_SHARE
while no more rows prefill than decode, so that running rows keep 1 / (1 + LEAST_SHARE) of their rate beside a long
prompt; where more wait than run, as at the start of a burst, it grows with their ratio up to MOST_SHARE, and a step is
at most three times a plain decode step: short waits for many are worth a few slow tokens of few. Where nothing decodes,
a chunk is bounded by `CHUNK_S`, which bounds how long a cancel or a newcomer waits, or by a few times the overhead of a
pass, up to `LONGEST_CHUNK_S`: where reading the weights alone takes a tenth of a second, shorter chunks would do little
else. A chunk's cost is taken as `overhead + tokens * per_token`, fitted to what the runner measured, apart for chunks
that had a pass of their own and those beside decoding rows, which read the weights anyway. Where the overhead alone is
about a decode step, a chunk takes as many tokens as hardly cost more than it, and what it costs beyond its credit is
paid back before the next.

A prompt so short that one step can end it beside the decoding rows is quick: it goes in at once and on no credit, as
each such row is paid for once, while a long prompt takes its share in every step. So a staggered burst gets its first
tokens as evenly as it arrives. Quick and long together take no more than MOST_SHARE of a decode step.

Chunks that do not end a prompt are multiples of a quantum. On CUDA a chunk of a new length, or behind a new number of
tokens, costs several times its computing once, as its attention is planned anew: a coarse quantum keeps them few.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy

LEAST_SHARE = 0.4
MOST_SHARE = 2.0
CHUNK_CEILING = 0.75  # of a decode step, for one chunk at LEAST_SHARE
CHUNK_S = 0.2
LONGEST_CHUNK_S = 0.6
WORTH_OVERHEADS = 4.0  # a chunk that nobody decodes beside takes as long as this many overheads
MIN_CHUNK = 16
FIRST_CHUNK = 64
OVER_OVERHEAD = 1.15  # a chunk may cost this many overheads, also where that is over the ceiling
SAVINGS = 1.5  # in decode steps, the most credit that is kept; more where one chunk may cost more
DEBT = 3.0  # in decode steps, the most that is paid back: one slow pass does not hold prefill up for long
FORGET = 0.9  # weight of the past against each new measurement
FORGET_FAST = 0.3  # the same, where the past said several times too much
MOST_OVERHEAD = 0.95  # of the mean chunk: no token is free
OUTLIER = 4.0  # a measurement counts for at most this much of what was expected


class ChunkCost:
    """Seconds of a prefill chunk as an affine function of its tokens: least squares with a fading memory."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self._overhead = 0.0
        self._tried = 0.0
        self.told_apart = False  # sizes have differed enough to tell the overhead from the tokens

    def observe(self, tokens: int, seconds: float) -> None:
        keep = FORGET
        if self.known:
            expected = max(self.seconds(tokens), self._y / self._weight)
            seconds = min(seconds, OUTLIER * expected)
            if OUTLIER * seconds < self.seconds(tokens):
                keep = FORGET_FAST
        self._tried = max(float(tokens), self._tried * FORGET)
        self._weight = self._weight * keep + 1
        self._x = self._x * keep + tokens
        self._y = self._y * keep + seconds
        self._xx = self._xx * keep + tokens * tokens
        self._xy = self._xy * keep + tokens * seconds
        self._fit()

    @property
    def known(self) -> bool:
        return self._y > 0

    def _fit(self) -> None:
        """Sizes that hardly differ tell nothing of the overhead: it stays what it was found to be."""
        spread = self._weight * self._xx - self._x * self._x
        if spread > 0.01 * self._xx * self._weight:
            self.told_apart = True
            per_token = (self._weight * self._xy - self._x * self._y) / spread
            if per_token > 0:
                self._overhead = max(0.0, (self._y - per_token * self._x) / self._weight)

    def line(self) -> tuple[float, float]:
        """(overhead in seconds, seconds per token): the first not negative, the second positive."""
        mean = self._y / self._weight
        overhead = min(self._overhead, MOST_OVERHEAD * mean)
        return overhead, (mean - overhead) * self._weight / self._x

    def seconds(self, tokens: int) -> float:
        overhead, per_token = self.line()
        return overhead + per_token * tokens

    def tokens_alone(self) -> int:
        """How many tokens a chunk should have that nobody decodes beside. While all sizes were alike, another one."""
        overhead, _ = self.line()
        tokens = self.tokens(max(CHUNK_S, min(LONGEST_CHUNK_S, WORTH_OVERHEADS * overhead)))
        return tokens if self.told_apart else max(tokens, int(2 * self._tried))

    def tokens(self, seconds: float) -> int:
        """How many tokens `seconds` pay for; at most twice as many as were tried of late, as the line may mislead."""
        overhead, per_token = self.line()
        return int(min(max(0.0, seconds - overhead) / per_token, 2 * self._tried))


class PrefillPace:
    """Decides each step's prefill budget. `max_tokens` is the most a step may take, whatever the time; `quantum` is
    what chunks are multiples of."""

    def __init__(self, max_tokens: int, quantum: int = MIN_CHUNK) -> None:
        self.max_tokens = max_tokens
        self._quantum = min(max(quantum, MIN_CHUNK), max_tokens)
        self._costs = {False: ChunkCost(), True: ChunkCost()}  # by whether rows decoded beside the chunk
        self._decode_s = 0.0
        self._credit_s = 0.0
        self._share = LEAST_SHARE
        self._beside = False
        self._on_credit = 1.0  # the part of the step's prompt tokens that is paid from the credit

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
        budget = min(budget, max(room // 2, self._quantum), self.max_tokens - remaining[quick[0]])
        shares = share(budget, [0 if need <= room else need for need in remaining], self._quantum)
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
        overhead, _ = self._cost.line()
        return min(self._cost.tokens(max(MOST_SHARE * self._decode_s, OVER_OVERHEAD * overhead)), self.max_tokens)

    def budget(self, *, prefilling: int, decoding: int) -> int:
        """Prompt tokens that the next step may compute for `prefilling` rows beside `decoding` ones; 0 while those are
        still owed time."""
        self._beside = decoding > 0
        if not self._cost.known:
            return min(self.max_tokens, max(FIRST_CHUNK, self._quantum))
        if not decoding or self._decode_s == 0:
            return self._clamp(self._cost.tokens_alone())
        self._share = min(MOST_SHARE, LEAST_SHARE * max(1.0, prefilling / decoding))
        chunk = self._clamp(self._cost.tokens(self._target_s()))
        price = min(self._cost.seconds(chunk), self._ceiling_s)
        return chunk if self._credit_s >= price * 0.999 else 0

    @property
    def _cost(self) -> ChunkCost:
        """What chunks cost as the next one is computed, or as far as that is not known, as others are."""
        cost = self._costs[self._beside]
        return cost if cost.known else self._costs[not self._beside]

    def observe(self, *, prefill_tokens: int, prefill_s: float, decode_s: float, beside: bool | None = None) -> None:
        """Learn from a finished step: what it computed and how long each part took, and whether rows decoded beside the
        chunks (None: as the last budget was made for)."""
        if prefill_tokens and prefill_s > 0:
            own = self._beside if beside is None else beside
            if not self._costs[own].known:
                self._costs[own] = copy(self._costs[not own])
            self._costs[own].observe(prefill_tokens, prefill_s)
            self._credit_s -= prefill_s * self._on_credit
        if decode_s > 0:
            self._decode_s = decode_s if self._decode_s == 0 else 0.7 * self._decode_s + 0.3 * decode_s
            self._credit_s += self._share * decode_s
        most = max(SAVINGS, self._share) * self._decode_s
        if self._beside and decode_s > 0:
            self._credit_s = max(min(self._credit_s, most), -DEBT * self._decode_s)
        else:
            self._credit_s = most  # nobody had to wait for that chunk

    def _target_s(self) -> float:
        """A chunk's time beside decoding rows: one step's earnings, or more where the overhead would eat them."""
        overhead, _ = self._cost.line()
        return max(min(max(self._share * self._decode_s, 3 * overhead), self._ceiling_s), OVER_OVERHEAD * overhead)

    @property
    def _ceiling_s(self) -> float:
        return max(CHUNK_CEILING, self._share) * self._decode_s

    def _clamp(self, tokens: int) -> int:
        if self._quantum > MIN_CHUNK:
            tokens -= tokens % self._quantum
        return min(max(tokens, self._quantum), self.max_tokens)


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
