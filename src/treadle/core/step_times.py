"""Seconds of decode steps and of prefill chunks, learned from measured steps.

A backend measures prompts and decoding sequences apart, or computes both in one pass. In such a mixed step, decoding is
taken to last as long as it lately did without prompts, and the prompts the rest. Before a decode step has been
measured, or where mixed steps disprove it, decoding takes its part of the tokens.

Forced tokens teach nothing: they are short chunks that come again and again, and what is known of long ones would be
forgotten.

While a step is computed the host prepares the next one. Where that takes longer, as with prompts it may, the step in
computation is the one that ends later. Such a decode step says nothing about decoding. The delay is the same for any
number of prompt tokens: it is learned by itself, as a part of the chunk's cost.

MLX hands over only so much that is not computed yet, and waits for the device with the rest of a step that takes it
long: the step before that ends later, too, and the more so the longer it takes. So times of steps with chunks in a row
are not of their own tokens, and the fitted cost of a token may be far too low. It is taken to be half of what long
chunks by themselves showed at the start, at least.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass

from .capabilities import StepCost
from .chunk_cost import LEAST_S, ChunkCost
from .chunk_limits import Work

FORGET = 0.7  # weight of the past against each new measurement
SLOWER = 1.5  # decode steps, the most that one step counts as: more may be chance
FASTER = 0.8  # decode steps: a shorter step counts, even if prompts were prepared in it
LEAST_OF_KNOWN = 0.5  # of what a token of long chunks by themselves costs: beside others the weights are read anyway
DISPROOFS = 3  # mixed steps in a row that were no longer than a decode step


@dataclass(slots=True, eq=False)
class Charge:
    """The prompts of a planned step, or its other `work`, until it is observed or voided.

    `tokens`, of which `forced` ones are of no prompt, are computed beside `decoding` sequences. The part `on_credit` of
    them is paid from the credit, for which `expected_s` are reserved. `cost_s` are the seconds they took: the delay of
    the step before, once that has ended, and then those of their own step.
    """

    tokens: int = 0
    decoding: int = 0
    on_credit: float = 1.0
    expected_s: float = 0.0
    cost_s: float = 0.0
    forced: int = 0
    work: Work = Work.PROMPTS


class StepTimes:
    """Learned seconds of decode steps and of chunks of each kind of work, some of which by themselves are `known`.

    `decode_s` are those of a decode step, 0 while unknown; `delay_s` those by which a chunk delays the step before it.
    """

    def __init__(self, known: Mapping[Work, Sequence[StepCost]] | None = None) -> None:
        self.decode_s = self.delay_s = 0.0
        self._measured = False  # decode_s, by a step without prompts: else it is an estimate
        self._disproofs = 0
        chunks = {work: (known or {}).get(work, ()) for work in Work}
        kinds = [(work, beside) for work in Work for beside in (False, True)]
        self._costs = {(work, beside): ChunkCost(_least_s(chunks[work])) for work, beside in kinds}
        for work, some in chunks.items():
            for chunk in some:
                self._costs[work, False].observe(chunk.tokens, chunk.seconds)

    def chunk_cost(self, *, beside: bool, work: Work = Work.PROMPTS) -> ChunkCost:
        """The cost of chunks of `work` `beside` decoding sequences or without; of the other kind where none was
        measured."""
        cost = self._costs[work, beside]
        return cost if cost.known else self._costs[work, not beside]

    def observe(
        self,
        charge: Charge,
        *,
        prefill_s: float,
        decode_s: float,
        mixed_s: float = 0.0,
        following: Charge | None = None,
    ) -> tuple[float, float]:
        """Learn from a measured step, in whose time `following` was prepared, and complete the charges' costs.

        Return its seconds of prompts and of decoding, `mixed_s` split between both.
        """
        if mixed_s > 0:
            prefill_s, decode_s = self._split(charge, mixed_s)
        delayed = following is not None and following.tokens > 0
        if charge.tokens:
            delay_s = min(prefill_s, self.delay_s) if delayed else 0.0
            self._observe_chunk(charge, prefill_s - delay_s)
            if decode_s > 0 and not mixed_s:
                self._measure(decode_s)
        else:
            delay_s = self._observe_decode(decode_s, delayed) if decode_s > 0 else 0.0
        if following is not None:
            following.cost_s = delay_s
        return prefill_s, decode_s

    def _split(self, charge: Charge, mixed_s: float) -> tuple[float, float]:
        if self._measured and charge.tokens > charge.forced:
            self._disproofs = self._disproofs + 1 if mixed_s <= self.decode_s else 0
            self._measured = self._disproofs < DISPROOFS
        if self._measured:
            decode_s = min(mixed_s, self.decode_s)
        else:
            decode_s = mixed_s * charge.decoding / (charge.decoding + charge.tokens)
            self._estimate(decode_s)
        return mixed_s - decode_s, decode_s

    def _observe_decode(self, decode_s: float, delayed: bool) -> float:
        """Learn from a step without prompts, perhaps `delayed` by those of the next. Return the delay. Negative delays
        are noise; they count, so that the mean has no bias."""
        if delayed and self._disproofs == DISPROOFS:
            self._estimate(decode_s)  # an upper bound, no measurement
        elif delayed and self._measured and decode_s > FASTER * self.decode_s:
            delay_s = decode_s - self.decode_s
            self.delay_s = max(0.0, _mean(self.delay_s, min(delay_s, self.delay_s + self.decode_s)))
            return delay_s
        else:
            self._measure(decode_s)
        return 0.0

    def _estimate(self, decode_s: float) -> None:
        self.decode_s = _mean(self.decode_s or decode_s, decode_s)

    def _measure(self, decode_s: float) -> None:
        past_s = self.decode_s if self._measured else decode_s
        self.decode_s = _mean(past_s, min(decode_s, SLOWER * past_s))
        self._measured, self._disproofs = True, 0

    def _observe_chunk(self, charge: Charge, own_s: float) -> None:
        charge.cost_s = max(0.0, charge.cost_s + own_s)
        if (tokens := charge.tokens - charge.forced) > 0:
            self._learn(charge.work, tokens, charge.cost_s * tokens / charge.tokens, beside=charge.decoding > 0)

    def _learn(self, work: Work, tokens: int, cost_s: float, *, beside: bool) -> None:
        cost = self._costs[work, beside]
        if cost_s > 0 and not cost.known:
            self._costs[work, beside] = cost = copy(self._costs[work, not beside])
        if cost_s > 0 or cost.known:
            cost.observe(tokens, cost_s)


def _least_s(chunks: Sequence[StepCost]) -> float:
    """The least seconds of one more token, as the two longest of `chunks` show them, the shortest first."""
    if len(chunks) < 2:
        return LEAST_S
    short, long = chunks[-2:]
    return max(LEAST_S, LEAST_OF_KNOWN * (long.seconds - short.seconds) / (long.tokens - short.tokens))


def _mean(past: float, new: float) -> float:
    return FORGET * past + (1 - FORGET) * new
