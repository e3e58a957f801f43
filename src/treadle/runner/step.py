"""A step of the runner between its start and its end: its rows, their segments, and what is sampled."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from ..core.messages import Submit, TokenLogprob
from ..core.plan import DecodeRow, PrefillChunk, RowFailure, RowTokens, RowVector
from ..errors import InvalidGrammar
from .device.staging import Put, direct
from .forward.segments import ForwardOutput, KvSequence, RowSegment
from .pooling import RowPool
from .sampling.logprobs import Logprobs, PromptScores
from .sampling.row_drafts import RowDrafts
from .sampling.sampler import Draw, SamplingRow
from .vision.row_images import KeyedTokens, RowImages

_LONG = 64
NOT_FINITE = "the model's logits for this request are NaN: its weights do not suit this prompt"
NOT_FINITE_VECTOR = "the model's hidden states for this input are not finite: its weights do not suit this prompt"


@dataclass(slots=True, eq=False)
class RunningRow(KvSequence):
    """A live sequence: the one object for it in the runner, from its admission to its release.

    Its caches hold `cached` tokens, with those of steps that are not finished yet; the last `again` of these are
    computed again by its next segment. `pool` collects its hidden states, where it is pooled, and `images` are those of
    its prompt. Of that `skipped` tokens are left out of the caches: what is behind the prompt has a smaller index there
    than in `tokens`. One that is `unscored` could not be scored.
    """

    tokens: list[int]
    request: Submit
    sampling: SamplingRow
    cached: int
    pool: RowPool | None = None
    again: int = 0
    images: RowImages | None = None
    skipped: int = 0
    unscored: bool = False

    @property
    def keys(self) -> Sequence[int]:
        return self.tokens if self.images is None else KeyedTokens(self.tokens, self.images.keys)


@dataclass(slots=True, eq=False)
class SampledGroup:
    """Rows of a step that are sampled together; `places` are their indices in the step's `decodes`."""

    places: Sequence[int]
    drawn: Draw
    logprobs: Logprobs


@dataclass(slots=True, eq=False)
class Step:
    """A step: `rows` compute `segments`, and those in `decodes` sample a token. `failed` has the reasons of rows that
    can't, `ungrammatical` are those of them whose grammar can't; those in `evicted` have lost their cached prefix.

    Rows are sampled in `groups`, all together in most steps. Those at the places in `deferred` wait for the tokens of
    the step before: all, or those that are drawn again. A row that is in two groups was: the later one counts. Rows
    in `superseded` gain no token here, as the step before has forced it; if they are drawn, that is dropped. `forced`
    are the tokens that constraints force behind those of this step, by id. The rows of the segments in `pooled` are
    pooled, and `vectors` are those of prompts that are complete. Rows with `drafts` verify these (`verification`). With
    `propose` the step's result says what they could verify next, and with `observed` the drafter reads hidden states.

    Layers of the images `encoded`, by their hashes, are the arrays in `encoding`.
    `scoring` is what the scorer does in it, if anything.
    """

    began: float
    segments: list[RowSegment]
    rows: dict[str, RunningRow]
    decodes: list[DecodeRow]
    failed: dict[str, str]
    ungrammatical: set[str] = field(default_factory=set)
    evicted: set[str] = field(default_factory=set)
    computed: ForwardOutput = field(default_factory=ForwardOutput)
    groups: list[SampledGroup] = field(default_factory=list)
    deferred: list[int] = field(default_factory=list)
    superseded: set[str] = field(default_factory=set)
    forced: dict[str, list[int]] = field(default_factory=dict)
    scores: dict[str, PromptScores] = field(default_factory=dict)
    pooled: list[RowSegment] = field(default_factory=list)
    vectors: dict[str, Any] = field(default_factory=dict)
    drafts: dict[str, RowDrafts] = field(default_factory=dict)
    propose: bool = False
    observed: bool = False
    encoded: list[bytes] = field(default_factory=list)
    encoding: list[Any] = field(default_factory=list)
    scoring: Any = None

    def failures(self) -> tuple[RowFailure, ...]:
        """Return the rows that can't go on."""
        return tuple(
            RowFailure(id_, message, InvalidGrammar.code) if id_ in self.ungrammatical else RowFailure(id_, message)
            for id_, message in self.failed.items()
        )

    def times(self, seconds: float) -> dict[str, float]:
        """Return the fields of a StepResult that say where the step's `seconds` went."""
        if (prefill_s := self.computed.prefill_s) is not None:
            return {"prefill_s": prefill_s, "decode_s": seconds - prefill_s if self.decodes else 0.0}
        decoding = sum(segment.picks and len(segment.tokens) == 1 + segment.beside for segment in self.segments)
        if decoding == len(self.segments) and not self.encoded and self.scoring is None:
            return {"decode_s": seconds if decoding else 0.0}
        return {"mixed_s" if decoding else "prefill_s": seconds}

    def drop(self, ids: Collection[str]) -> None:
        """Remove rows from the step."""
        if ids:
            self.segments = [segment for segment in self.segments if segment.id not in ids]
            self.decodes = [decode for decode in self.decodes if decode.id not in ids]
            self.rows = {id_: row for id_, row in self.rows.items() if id_ not in ids}
            self.pooled = [segment for segment in self.pooled if segment.id not in ids]

    def supersede(self, rows: Collection[RunningRow]) -> None:
        """Sample nothing for `rows`, as far as they are in the step: their tokens are forced already."""
        self.superseded |= {row.id for row in rows if self.rows.get(row.id) is row}
        if self.superseded:
            self.deferred = [place for place in self.deferred if self.decodes[place].id not in self.superseded]

    @property
    def places(self) -> Sequence[int]:
        """The indices of `decodes` that gain a token."""
        if not self.superseded:
            return range(len(self.decodes))
        return [place for place, decode in enumerate(self.decodes) if decode.id not in self.superseded]

    @property
    def sampling(self) -> list[SamplingRow]:
        """The sampling parameters of each of `decodes`."""
        return [self.rows[decode.id].sampling for decode in self.decodes]

    def sampled(self, put: Put = direct) -> Any | None:
        """The sampled tokens of all rows (int32) on the device, in the order of `decodes`, and maybe zeros behind them;
        None if there are none. No row may be deferred any more. The token of a row in `superseded` is any."""
        assert not self.deferred
        if self._in_one_group:
            return self.groups[0].drawn.filled
        if not self.groups:
            return None
        last = {place: i for i, place in enumerate(place for group in self.groups for place in group.places)}
        order = np.array([last.get(place, 0) for place in range(len(self.decodes))], np.int32)
        return mx.concatenate([group.drawn.tokens for group in self.groups])[put(order)[0]]

    @property
    def awaited(self) -> Any:
        """Arrays that are evaluated with the last of the step's."""
        return self.groups[-1].drawn.tokens if self.groups else self.computed.arrays

    @property
    def _in_one_group(self) -> bool:
        return len(self.groups) == 1 and len(self.groups[0].places) == len(self.decodes)

    def logits_of(self, decodes: Sequence[DecodeRow], put: Put = direct) -> Any:
        """Return logits (R, V) of the last token of each of `decodes`."""
        logits, rows = self.computed.logits, [self.computed.places[decode.id] for decode in decodes]
        last = [first + count - 1 for first, count in rows]
        assert logits is not None
        return logits if last == list(range(logits.shape[0])) else logits[put(np.array(last, np.int32))[0]]

    def prompt_scores(self, put: Put = direct) -> dict[str, PromptScores]:
        """Return log-probabilities of prompt tokens, by id, for the sequences that ask for them."""
        scores = {}
        for segment in self.segments:
            request = self.rows[segment.id].request
            if request.prompt_logprobs is not None and segment.id in self.computed.places:
                first, count = self.computed.places[segment.id]
                targets = request.prompt[segment.start + 1 : segment.start + 1 + count]
                if targets:
                    logits = self.computed.logits[first : first + len(targets)]  # type: ignore[index]
                    scores[segment.id] = PromptScores(logits, targets, request.prompt_logprobs, put)
        return scores

    def pool(self) -> None:
        """Pool the hidden states that the pass gave. They are evaluated with it."""
        for segment in self.pooled:
            row = self.rows[segment.id]
            if row.pool is not None and row.id not in self.failed:
                states = self.computed.hidden.get(row.id)
                vector, array = row.pool.add(segment.start, segment.end, states)
                self.computed.arrays += [] if array is None else [array]
                if vector is not None:
                    self.vectors[row.id] = vector

    def read_vectors(self) -> Iterator[RowVector]:
        """Wait for the vectors, and yield them. A row whose vector is not finite fails."""
        for id_, vector in self.vectors.items():
            numbers = np.array(vector, np.float32)
            if np.isfinite(numbers).all():
                yield RowVector(id_, numbers.tobytes())
            else:
                self.failed[id_] = NOT_FINITE_VECTOR

    def rows_with_nan(self, tokens: Sequence[int]) -> list[str]:
        """Return the ids of rows whose token in `tokens` has NaN as its logit."""
        logits = mx.take_along_axis(self.logits_of(self.decodes), mx.array(list(tokens), mx.int32)[:, None], axis=-1)
        wrong = np.array(mx.isnan(logits)[:, 0])
        return [decode.id for decode, is_wrong in zip(self.decodes, wrong, strict=True) if is_wrong]

    def fail_with_nan(self, ids: Sequence[str]) -> None:
        """Fail rows with NaN among their logits, for that reason alone."""
        self.failed.update(dict.fromkeys(ids, NOT_FINITE))
        self.ungrammatical.difference_update(ids)

    def read(self) -> tuple[list[int], dict[int, TokenLogprob], bool]:
        """Wait for the sampled tokens. Return them, log-probabilities by index, and whether any token differs from what
        the device has, as it was drawn again. The token of a row in `superseded` is any, or -1."""
        tokens, any_redrawn = [-1] * len(self.decodes), False
        found: dict[int, TokenLogprob] = {}
        for group in self.groups:
            own, redrawn = group.drawn.resolve()
            logprobs = group.logprobs
            if redrawn:
                any_redrawn = True
                decodes = [self.decodes[place] for place in group.places]
                rows = [self.rows[decode.id].sampling for decode in decodes]
                logprobs = Logprobs(self.logits_of(decodes), mx.array(own, mx.int32), rows)
            if self._in_one_group:
                return own, logprobs.read(), redrawn
            for place, token in zip(group.places, own, strict=True):
                tokens[place] = token
            found |= {group.places[i]: logprob for i, logprob in logprobs.read().items()}
        return tokens, found, any_redrawn

    def settle(self, tokens: list[int], found: dict[int, TokenLogprob]) -> bool:
        """Replace those of `tokens` that constraints do not take, with their log-probabilities in `found`. Return
        whether there are any."""
        rows, settled = self.sampling, list(tokens)
        for place in self.places:
            constraint = rows[place].constraint
            if constraint is not None:
                settled[place] = constraint.settle(tokens[place])
        places = [place for place, token in enumerate(settled) if token != tokens[place]]
        if places:
            tokens[:] = settled
            decodes = [self.decodes[place] for place in places]
            replaced = mx.array([settled[place] for place in places], mx.int32)
            logprobs = Logprobs(self.logits_of(decodes), replaced, [rows[place] for place in places])
            found |= {places[i]: logprob for i, logprob in logprobs.read().items()}
        return bool(places)

    def gained(
        self,
        tokens: Sequence[int],
        found: Mapping[int, TokenLogprob],
        offer: Callable[[RunningRow], tuple[int, int]] | None,
    ) -> Iterator[RowTokens]:
        """Yield the tokens that each row gains: its own of `tokens`, with its log-probabilities in `found`, and those
        that are forced behind it. What is on `offer`, `RowTokens.ready` and `match`, could be verified next."""
        for place, decode in enumerate(self.decodes):
            if decode.id in self.failed:
                continue
            if decode.id in self.superseded:
                yield RowTokens(decode.id, ())
                continue
            forced = self.forced.get(decode.id, ())
            logprobs = (found[place],) if place in found else ()
            row = self.rows[decode.id]
            gained, next_ = (tokens[place], *forced), () if offer is None else offer(row)
            yield RowTokens(decode.id, gained, logprobs, row.sampling.ended, len(forced), 0, *next_)

    def correct(self, tokens: Sequence[int]) -> None:
        """Replace the device's tokens by `tokens`, some of which were drawn again."""
        drawn = Draw(mx.array(list(tokens), mx.int32))
        self.groups = [SampledGroup(range(len(tokens)), drawn, Logprobs(None, None, ()))]


def segment_of(
    row: RunningRow, chunk: PrefillChunk | None, decode: DecodeRow | None, before: Mapping[str, int]
) -> RowSegment:
    """Return the tokens that `row` computes: a chunk, the token that a decode row feeds, or both in a row. `before` are
    the indices of the tokens that the step before samples: the token to feed may be one of them."""
    start, known, previous, wants = row.cached, row.tokens, -1, 0
    end = start
    if chunk is not None:
        assert chunk.start == start, f"a chunk at {chunk.start}, and {start} tokens are in the cache"
        end += chunk.count
    if decode is not None:
        end, wants = end + 1, 1
        assert len(row.request.prompt) - row.skipped + decode.position == end, "the prompt must be in the cache"
        if end + row.skipped > len(known):
            previous = before[row.id]
    if chunk is not None and chunk.positions:
        return _sparse_segment(row, chunk, decode, previous)
    first, last = start + row.skipped, end + row.skipped
    if end - start == 1:
        tokens: Sequence[int] = (known[first] if previous < 0 else 0,)
    else:
        tokens = known[first:last] if previous < 0 else (*known[first:], 0)
    if row.request.prompt_logprobs is not None and start < len(row.request.prompt) - 1:
        wants = len(tokens)
    return RowSegment(row, tokens, start, wants, decode is not None, previous)


def _sparse_segment(row: RunningRow, chunk: PrefillChunk, decode: DecodeRow | None, previous: int) -> RowSegment:
    """Return the tokens of a chunk at positions of its own, and the one that a decode row feeds behind it."""
    places = chunk.positions if decode is None else (*chunk.positions, chunk.positions[-1] + 1)
    known, wants = row.tokens, int(decode is not None)
    tokens = [known[place] for place in (places[:-1] if previous >= 0 else places)] + [0] * (previous >= 0)
    positions = np.array(places, np.int32)
    return RowSegment(row, tokens, row.cached, wants, decode is not None, previous, positions=positions)


def check_tokens(tokens: Sequence[int], vocabulary: int) -> None:
    """Raise ValueError for no tokens, or ids outside of the vocabulary: some devices read those from beyond the
    embedding table."""
    if not tokens:
        raise ValueError("the prompt is empty")
    low, high = _ends(tokens)
    if low < 0 or high >= vocabulary:
        wrong = low if low < 0 else high
        raise ValueError(f"token id {wrong} is outside the model's vocabulary of {vocabulary}")


def _ends(tokens: Sequence[int]) -> tuple[int, int]:
    """Return the smallest and the largest of `tokens`; for a long prompt ten times as fast as Python."""
    if len(tokens) > _LONG:
        with suppress(OverflowError):
            numbers = np.frombuffer(array("q", tokens), np.int64)
            return int(numbers.min()), int(numbers.max())
    return min(tokens), max(tokens)
