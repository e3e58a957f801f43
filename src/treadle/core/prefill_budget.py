"""The prompt tokens that each step may compute, so that decoding sequences and cancels never wait long for a prefill.

1. Chunks beside decoding sequences are paid from a credit. Each decode step adds a share of its own duration to it:
   LEAST_SHARE while no more prompts wait than sequences decode, so that those keep 1 / (1 + LEAST_SHARE) of their rate;
   up to MOST_SHARE where more wait, as at the start of a burst. Then a step takes at most three decode steps: short
   waits of many are worth a few slow tokens of few.
2. A chunk makes its step no longer than about two decode steps. Where the overhead takes that long by itself, chunks
   are few and large: up to two overheads each.
3. Steps are planned while others are in flight. The expected cost of a chunk is spent when its step is started (a
   Charge), and corrected when the step has been measured. While a step is computed the host prepares the next one;
   where that takes longer, the step before a chunk is the one that it delays. That part of a chunk's cost is learned
   by itself, as it is the same for any number of tokens.
4. A prompt that one step can end is computed at once and paid for by nobody, as it delays each decoding sequence only
   once, where a long prompt takes its share in every step. So a staggered burst gets its first tokens as evenly as it
   arrives. All prompts of a step take about MOST_SHARE of a decode step at most, and beside CROWD decoding sequences,
   each of which would wait, about one (P2).
5. Where nothing decodes, a chunk takes `CHUNK_S`, which bounds the wait of a cancel or of a new request, or a few times
   the overhead of a pass, up to `LONGEST_CHUNK_S`: where reading the weights takes a tenth of a second, shorter chunks
   would do little else.

The cost of a chunk is `overhead + tokens * per_token`, fitted to measured steps, separately for chunks with a pass of
their own and for those beside decoding sequences, which read the weights anyway.

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
CHUNK_CEILING = 0.75  # decode steps, the most that a chunk at LEAST_SHARE adds to a step
HIGH_CEILING = 0.85  # the same, where much of a chunk is overhead
MIN_CHUNK = 16
FIRST_CHUNK = 64
WORTH_BESIDE = 3.0  # overheads that a chunk beside decoding sequences takes, if it may take so long
HIGH_OVERHEAD = 1.5  # an overhead is high where fewer than this fit below the ceiling
OVER_OVERHEAD = 1.15  # overheads that a chunk may take, even above the ceiling
MOST_OVERHEADS = 2.0  # the same, the further one overhead alone is above a decode step
MOST_CREDIT = 1.5  # decode steps, the most credit; more where one chunk may cost more
MOST_CHARGED = 3.0  # decode steps, the most that is paid for one step: a slow pass delays prompts for a few steps
MOST_DEBT = 4.0  # decode steps, the least credit, below zero
MOST_ABOVE_EXPECTED = 1.5  # times the expected cost, what may be paid for a step where that is more than MOST_CHARGED
SMALLER_EACH = 4  # one chunk in this many is half as large
SLOWER = 1.5  # decode steps, the most that one step counts as: more may be chance
FASTER = 0.8  # decode steps: a shorter step counts, even if prompts were prepared in it
FORGET_EARLY = 0.7  # weight of the past against each new delay of the step before a chunk


@dataclass(slots=True, eq=False)
class Charge:
    """The expected cost of a planned step's prompts, and the part of it by which they delay the step before."""

    tokens: int = 0
    beside: bool = False  # whether rows decode beside them
    on_credit: float = 1.0  # part of the tokens that is paid from the credit
    expected_s: float = 0.0
    early_s: float = 0.0


class PrefillBudget:
    """The prefill budget of each step.

    `max_tokens` limits a step's prompt tokens, whatever their time. Chunk lengths are multiples of `quantum`. Budgets
    are rounded down to one of `sizes`, ascending, but for those below or above all of them.

    `split` plans a step. `charge` spends the expected cost of the step that was split last; it is then either passed to
    `observe`, in the order of the charges, or to `void`.
    """

    def __init__(self, max_tokens: int, quantum: int = MIN_CHUNK, sizes: Sequence[int] = ()) -> None:
        self.max_tokens = max_tokens
        self._sizes = sizes
        self._quantum = min(max(quantum, MIN_CHUNK), max_tokens)
        self._costs = {False: ChunkCost(), True: ChunkCost()}  # by whether rows decoded beside the chunk
        self._early_s: float | None = None  # by which a chunk delays the step before it
        self._decode_s = 0.0
        self._credit_s = 0.0
        self._reserved_s = 0.0  # for what is in flight
        self._chunks = 0
        self._share = LEAST_SHARE
        self._on_credit = 1.0  # as in a Charge, of the last split
        self._beside = False

    # Planning ----------------------------------------------------------------------------------------------------

    def split(self, remaining: list[int], *, decoding: int, awaiting: int = 0) -> list[int]:
        """Prompt tokens that the next step computes of each prefill.

        `remaining` are the tokens left of each, in turn order. `decoding` sequences decode in the step; `awaiting` more
        wait for a prefix that these compute.
        """
        self._on_credit = 1.0
        self._beside = decoding > 0
        most = self._most_ending(decoding)
        ending = [i for i, need in enumerate(remaining) if need <= most]
        budget = self.budget(prefilling=max(1, len(remaining) - len(ending)) + awaiting, decoding=decoding)
        if not ending:
            return share(budget, remaining, self._quantum)
        long = [0 if need <= most else need for need in remaining]
        beside = self.max_tokens - remaining[ending[0]]
        if budget and any(long) and beside < self._quantum:  # the first one fills a step: the long ones go before it
            return share(budget, long, self._quantum)
        budget = min(budget, max(most // 2, self._quantum), beside)
        shares = share(budget, long, self._quantum)
        on_credit = sum(shares)
        for i in self._fitting(ending, remaining, most - on_credit):
            shares[i] = remaining[i]
        self._on_credit = on_credit / sum(shares)
        return shares

    def _fitting(self, ending: list[int], remaining: list[int], most: int) -> Iterator[int]:
        """Yield the parts of `ending` that fit into `most` tokens in turn. The first always does: none starves."""
        for i in ending:
            if remaining[i] <= most or i == ending[0]:
                most -= remaining[i]
                yield i

    def _most_ending(self, decoding: int) -> int:
        """The most tokens of prompts that end in the next step; 0 where nothing decodes."""
        if not decoding or self._decode_s == 0 or not self._cost.known:
            return 0
        early_s = self._early_s or 0.0
        own_s = max(0.0, self._cost.line()[0] - early_s)
        longest_s = max(_most_share(decoding) * self._decode_s, OVER_OVERHEAD * own_s)
        return min(self._cost.tokens(early_s + longest_s), self.max_tokens)

    def budget(self, *, prefilling: int, decoding: int) -> int:
        """Prompt tokens that the next step may compute for `prefilling` sequences beside `decoding` ones; 0 where the
        credit is less than their cost."""
        self._beside = decoding > 0
        if not self._cost.known:
            return min(self.max_tokens, max(FIRST_CHUNK, self._quantum))
        if not decoding or self._decode_s == 0:
            return self._clamp(self._cost.tokens_alone())
        self._share = min(_most_share(decoding), LEAST_SHARE * max(1.0, prefilling / decoding))
        chunk = self._chunk()
        price = min(self._cost.seconds(chunk), self._ceiling_s)
        return chunk if self._credit_s - self._reserved_s >= price * 0.999 else 0

    @property
    def _cost(self) -> ChunkCost:
        """The cost of chunks of the next one's kind, or of the other kind where none of it was measured."""
        cost = self._costs[self._beside]
        return cost if cost.known else self._costs[not self._beside]

    def _chunk(self) -> int:
        """The tokens of a chunk beside decoding sequences: worth one step's credit, or WORTH_BESIDE overheads where
        that is not too long. Some chunks are half as large, as equal sizes do not show the overhead."""
        overhead, _ = self._cost.line()
        worth_s = max(self._share * self._decode_s, WORTH_BESIDE * overhead)
        chunk = self._clamp(self._cost.tokens(min(worth_s, self._longest_s(overhead))))
        smaller = not self._cost.told_apart or self._chunks % SMALLER_EACH == 0
        return self._whole(max(1, chunk // 2)) if smaller and self._quantum <= MIN_CHUNK else chunk

    def _longest_s(self, overhead: float) -> float:
        """The most seconds that a chunk may cost: the delay of the step before, which is the same for any number of
        tokens, and the most of its own step."""
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

    def charge(self, tokens: int, *, beside: bool) -> Charge:
        """Spend the expected cost of the step that was split last: it computes `tokens` prompt tokens, `beside`
        decoding sequences or not, and is in flight from now on."""
        cost = self._costs[beside]
        expected_s = cost.seconds(tokens) * self._on_credit if tokens and beside and cost.known else 0.0
        self._reserved_s += expected_s
        self._chunks += tokens > 0
        return Charge(tokens, beside, self._on_credit, expected_s)

    def void(self, charge: Charge) -> None:
        """Give back the cost of a step that was not computed."""
        self._reserved_s -= charge.expected_s

    def observe(self, charge: Charge, *, prefill_s: float, decode_s: float, following: Charge | None = None) -> None:
        """Learn from the oldest step in flight how long each part of it took. `following` was prepared in that time:
        where preparing prompts takes long, this is the step that waits."""
        self.void(charge)
        if following is not None and following.tokens and charge.tokens:
            following.early_s = min(prefill_s, self._early_s or 0.0)
            prefill_s -= following.early_s
        elif following is not None and following.tokens and decode_s > FASTER * self._decode_s > 0:
            following.early_s = decode_s - self._decode_s
            decode_s = self._decode_s
            self._prepared(following.early_s)
        if decode_s > 0:
            past_s = self._decode_s or decode_s
            decode_s = min(decode_s, SLOWER * past_s)
            self._decode_s = 0.7 * past_s + 0.3 * decode_s
            self._credit_s += self._share * decode_s
        if charge.tokens:
            self._pay(charge, prefill_s)
        most = max(MOST_CREDIT, self._share) * self._decode_s
        if charge.beside and decode_s > 0:
            self._credit_s = max(-MOST_DEBT * self._decode_s, min(self._credit_s, most))
        else:
            self._credit_s = most  # nothing decoded, so nothing waited

    def _prepared(self, early_s: float) -> None:
        """Learn that a chunk delayed the step before it by `early_s`. Negative delays are noise; they count, so that
        the mean has no bias."""
        past_s = early_s if self._early_s is None else self._early_s
        early_s = min(early_s, past_s + self._decode_s)
        self._early_s = max(0.0, FORGET_EARLY * past_s + (1 - FORGET_EARLY) * early_s)

    def _pay(self, charge: Charge, own_s: float) -> None:
        """Take the cost of a step's chunks from the credit, limited so that one slow step makes no large debt, and
        learn from it."""
        seconds = max(0.0, charge.early_s + own_s)
        self._credit_s -= min(
            seconds * charge.on_credit, max(MOST_CHARGED * self._decode_s, MOST_ABOVE_EXPECTED * charge.expected_s)
        )
        cost = self._costs[charge.beside]
        if seconds > 0 and not cost.known:
            self._costs[charge.beside] = cost = copy(self._costs[not charge.beside])
        if seconds > 0 or cost.known:
            cost.observe(charge.tokens, seconds)


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
