"""Verification of draft tokens: rows that sample several tokens in a step.

A row feeds its last token and drafts behind it, and samples a token at each of these positions, by the position's own
random number. A draft is accepted where the sampled token equals it; the first that differs is the last one gained. So
the tokens are those of plain decoding. Such a step is the only one in flight: nothing is built on its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from msgspec.structs import replace

from ..core.messages import TokenLogprob
from ..core.plan import MAX_SCORED_TOKENS, DecodeRow, DraftTrial, RowTokens, StepPlan
from ..core.statistics import DrafterStatistics
from .device.staging import Put, direct
from .drafting.drafter import Drafter, NewStates, Offer
from .forward.segments import RowSegment
from .guarded_drafter import GuardedDrafter
from .kv.backend import KvBackend
from .sampling.logprobs import Logprobs
from .sampling.row_drafts import RowDrafts, fitting, stops
from .sampling.sampler import SamplingRow
from .step import RunningRow, Step

NO_DRAFTER = "no drafter was asked for"


class Picks(NamedTuple):
    """The tokens that a step with drafts samples, all of a row side by side: sampling states, positions among generated
    tokens, and rows of the step's logits."""

    rows: list[SamplingRow]
    positions: list[int]
    places: list[int]

    def logits(self, step: Step, some: Sequence[int] | None = None, put: Put = direct) -> Any:
        """Return the logits of all, or of `some`."""
        logits, places = step.computed.logits, self.places
        assert logits is not None
        if some is not None:
            places = [places[i] for i in some]
        if places == list(range(logits.shape[0])):
            return logits
        return logits[put(np.array(places, np.int32))[0]]


def picks_of(step: Step) -> Picks:
    """Return what the step samples."""
    found = Picks([], [], [])
    for decode in step.decodes:
        drafts = step.drafts.get(decode.id)
        states = [step.rows[decode.id].sampling] if drafts is None else drafts.states
        first, count = step.computed.places[decode.id]
        found.rows.extend(states)
        found.positions.extend(range(decode.position, decode.position + len(states)))
        found.places.extend(range(first + count - len(states), first + count))
    return found


@dataclass(slots=True, eq=False)
class Kept:
    """What a row gains of its picks, the first of which is at index `first`: settled `tokens`, and the indices among
    them of those that were `replaced`."""

    decode: DecodeRow
    row: RunningRow
    drafts: RowDrafts
    first: int
    tokens: list[int]
    replaced: list[int]

    @property
    def ends_drafted(self) -> bool:
        """Whether the last token is an accepted draft: then the row has ended with it."""
        count = len(self.tokens)
        return 0 < count <= len(self.drafts.tokens) and self.drafts.tokens[count - 1] == self.tokens[-1]


class Speculation:
    """Draft tokens of a drafter in steps over `backend`, of which a row verifies up to `draft_tokens`: 0 for the
    `reason`, and without `drafter` then. With `fills` the drafter's proposals are filled up to what is asked for."""

    def __init__(self, drafter: Drafter | None, backend: KvBackend, vocabulary: int) -> None:
        self.reason = backend.no_drafts if drafter is not None else NO_DRAFTER
        self.drafter = None if drafter is None or self.reason else GuardedDrafter(drafter, vocabulary)
        self.draft_tokens = backend.draft_tokens if self.drafter is not None else 0
        self.fills = False
        self._backend = backend

    # Drafts ----------------------------------------------------------------------------------------------------------

    def draft(self, rows: Mapping[str, RunningRow], decodes: Sequence[DecodeRow], least: int) -> dict[str, RowDrafts]:
        """Return the drafts of those of `decodes` that may verify some: so many that there is memory for the logits of
        all. `least` is the least number of forced tokens that are taken at once."""
        asked = [(rows[one.id], one, most) for one in decodes if one.id in rows and (most := self._most(rows, one)) > 0]
        room = MAX_SCORED_TOKENS - len(decodes)
        if not asked or self.drafter is None or room < len(asked):
            return {}
        counts = [most for _, _, most in asked]
        if sum(counts) > room:
            counts = [min(most, room // len(asked)) for most in counts]
        proposed = self.drafter.propose([row for row, _, _ in asked], counts)
        if self.fills:
            proposed = [[*tokens, *[0] * (count - len(tokens))] for tokens, count in zip(proposed, counts, strict=True)]
        found = {
            row.id: fitting(row.sampling, row.request, tokens, decode.position, least)
            for (row, decode, _), tokens in zip(asked, proposed, strict=True)
        }
        return {id_: drafts for id_, drafts in found.items() if drafts.tokens}

    def _most(self, rows: Mapping[str, RunningRow], decode: DecodeRow) -> int:
        row = rows[decode.id]
        if not _may_draft(row):
            return 0
        return min(decode.drafts, self.draft_tokens - row.again, row.request.max_tokens - decode.position - 1)

    def extended(self, segment: RowSegment, row: RunningRow, drafts: RowDrafts | None) -> RowSegment:
        """Return the segment with the tokens before it that are computed again, and a row's drafts behind it."""
        again, row.again = row.again, 0
        start, end = segment.start - again, segment.start + row.skipped
        known, positions = row.tokens[end - again : end], segment.positions
        if positions is not None:
            positions = np.concatenate([np.arange(end - again, end, dtype=np.int32), positions])
        if drafts is None:
            return replace(segment, tokens=(*known, *segment.tokens), start=start, beside=again, positions=positions)
        assert len(segment.tokens) == 1, "no prompt is computed where drafts are verified"
        return replace(
            segment,
            tokens=(*known, *segment.tokens, *drafts.tokens),
            start=start,
            wants=1 + len(drafts.tokens),
            beside=again + len(drafts.tokens),
            drafts=len(drafts.tokens),
        )

    def observes(self, plan: StepPlan) -> bool:
        """Whether the drafter reads hidden states of a step: one that verifies or could have drafts, or that computes
        prompts alone."""
        if self.drafter is None or not self.draft_tokens or not self.drafter.reads_states:
            return False
        alone = bool(plan.prefill) and not plan.decode
        return plan.propose or alone or plan.verifies

    def statistics(self) -> DrafterStatistics:
        """Return what the drafter's cache holds."""
        return DrafterStatistics() if self.drafter is None else self.drafter.statistics()

    # Results ---------------------------------------------------------------------------------------------------------

    def observe(self, step: Step, rows: Mapping[str, RunningRow]) -> None:
        """Give the drafter hidden states of tokens that rows keep, of those of the step's that are still in `rows`."""
        found = []
        for segment in step.segments:
            row, states = step.rows[segment.id], step.computed.hidden.get(segment.id)
            if states is not None and row.request.speculate and rows.get(row.id) is row and row.id not in step.failed:
                count = min(segment.end, row.cached) - segment.start
                found.append(NewStates(row, segment.start, states[:count] if count < states.shape[0] else states))
        if self.drafter is not None and found:
            self.drafter.observe(found)

    def follow(self, rows: list[RunningRow], seconds: float) -> tuple[DraftTrial, ...]:
        """Let the drafter follow `rows`, which gained tokens in a step of `seconds`; the trials that are over."""
        some = [row for row in rows if row.request.speculate]
        if self.drafter is None or not some:
            return ()
        return tuple(self.drafter.follow(some, seconds))

    def offer(self, row: RunningRow) -> Offer:
        """Return the draft tokens that a row could verify next."""
        if self.drafter is None or not _may_draft(row):
            return Offer()
        offer = self.drafter.offer(row)
        return offer._replace(tokens=min(offer.tokens, self.draft_tokens - row.again)) if row.again else offer

    def keep(self, step: Step, kept: Sequence[Kept]) -> None:
        """Cut the rows' caches to the tokens that they keep, and let others reuse what was computed."""
        known = {one.row.id: one for one in kept}
        committed = []
        for segment in step.segments:
            one = known.get(segment.id)
            segment = segment if one is None else self._cut(segment, one)
            if segment.tokens:
                committed.append(segment)
        self._backend.commit(committed)

    def _cut(self, segment: RowSegment, kept: Kept) -> RowSegment:
        """Cut a row's cache; return what is to be committed of its segment."""
        row = kept.row
        row.cached = segment.end - segment.drafts + len(kept.tokens) - 1
        left = self._backend.retract(row, row.cached)
        row.again = row.cached - left
        return replace(segment, tokens=segment.tokens[: left - segment.start])


def _may_draft(row: RunningRow) -> bool:
    """Whether drafts of a row may be verified in its next step."""
    constraint = row.sampling.constraint
    return row.request.speculate and not (constraint is not None and constraint.searching)


class Verified:
    """The sampled tokens of a step with drafts, read, with their log-probabilities by index."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._picks = picks_of(step)
        self._tokens: list[int] = []
        self._logprobs: dict[int, TokenLogprob] = {}
        if step.groups:
            (group,) = step.groups
            self._tokens, redrawn = group.drawn.resolve()
            self._logprobs = self._scored(range(len(self._tokens)), self._tokens) if redrawn else group.logprobs.read()
        self.kept: list[Kept] = []

    def settle(self) -> Iterator[tuple[Kept, str]]:
        """Append to each row the tokens that it gains, and yield it with why it can't go on; empty if it can."""
        first = 0
        for decode in self._step.decodes:
            row = self._step.rows[decode.id]
            drafts = self._step.drafts.get(decode.id) or RowDrafts([], [row.sampling])
            kept = Kept(decode, row, drafts, first, [], [])
            self.kept.append(kept)
            yield kept, _settle(kept, self._tokens[first : first + len(drafts.states)])
            first += len(drafts.states)

    def correct_logprobs(self) -> None:
        """Compute log-probabilities of tokens that constraints put in the place of others."""
        replaced = {one.first + i: one.tokens[i] for one in self.kept for i in one.replaced}
        if replaced:
            self._logprobs |= self._scored(list(replaced), list(replaced.values()))

    def _scored(self, some: Sequence[int], tokens: Sequence[int]) -> dict[int, TokenLogprob]:
        logits, rows = self._picks.logits(self._step, some), [self._picks.rows[i] for i in some]
        scored = Logprobs(logits, mx.array(list(tokens), mx.int32), rows).read()
        return {some[i]: logprob for i, logprob in scored.items()}

    def with_nan(self) -> list[str]:
        """Return the ids of rows that gain a token with NaN as its logit."""
        gained = [(one.first + i, token, one.row.id) for one in self.kept for i, token in enumerate(one.tokens)]
        if not gained:
            return []
        logits = self._picks.logits(self._step, [index for index, _, _ in gained])
        chosen = mx.take_along_axis(logits, mx.array([token for _, token, _ in gained], mx.int32)[:, None], axis=-1)
        wrong = np.array(mx.isnan(chosen)[:, 0])
        return [id_ for (_, _, id_), is_wrong in zip(gained, wrong, strict=True) if is_wrong]

    def gained(self, offer: Callable[[RunningRow], Offer] | None) -> Iterator[RowTokens]:
        """Yield the tokens that each row gains, with those that are forced behind them, and what is on `offer`."""
        for one in self.kept:
            row = one.row
            if row.id in self._step.failed:
                continue
            forced, offered = self._step.forced.get(row.id, ()), Offer() if offer is None else offer(row)
            picks = range(one.first, one.first + len(one.tokens))
            yield RowTokens(
                row.id,
                (*one.tokens, *forced),
                tuple(self._logprobs[i] for i in picks if i in self._logprobs),
                row.sampling.ended,
                len(forced),
                len(one.drafts.tokens),
                ready=offered.tokens,
                match=offered.match,
                ends_drafted=one.ends_drafted,
            )


def _settle(kept: Kept, sampled: Sequence[int]) -> str:
    """Take over the tokens that were `sampled` up to the first one that is no accepted draft. Return why the row can't
    go on; empty if it can."""
    row, drafts, position = kept.row, kept.drafts, kept.decode.position
    for place, token in enumerate(sampled):
        settled = _settled(row.sampling, drafts.states[place], token)
        if settled != token:
            kept.replaced.append(place)
        kept.tokens.append(settled)
        row.tokens.append(settled)
        failure = row.sampling.accept(settled)
        accepted = place < len(drafts.tokens) and settled == drafts.tokens[place]
        if failure or row.sampling.ended or not accepted or stops(row.request, settled, position + place):
            return failure
    return ""


def _settled(row: SamplingRow, state: SamplingRow, token: int) -> int:
    """Return the token to take in place of `token`, which was drawn by `state`: a row's own, or a fork of it."""
    if row.constraint is None:
        return token
    if state.constraint is not None and state.constraint.failure:
        row.constraint.fail(state.constraint.failure)
    return row.constraint.settle(token)
