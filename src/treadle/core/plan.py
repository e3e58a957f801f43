"""Plans of steps, which the scheduler makes, and their results, which a runner returns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property

import msgspec

from .messages import Submit, TokenLogprob

MAX_SCORED_TOKENS = 512
"""Most prompt tokens with log-probabilities in a step: each needs a row of logits as long as the vocabulary."""


class PrefillChunk(msgspec.Struct, frozen=True):
    """Compute `count` tokens of sequence `id`, whose cache holds `start` tokens: of its prompt, or of those generated
    before it was released or forced by its constraint. Other sequences go on from it after
    `checkpoints` tokens, all above `start`: a runner whose `sharing` is MARKED keeps its state there, or a little
    before.

    `positions` are those of its tokens in prompt and history, ascending, where parts of the prompt are left out; empty
    where they are those from `start` on."""

    id: str
    start: int
    count: int
    checkpoints: tuple[int, ...] = ()
    positions: tuple[int, ...] = ()


class ScoreChunk(msgspec.Struct, frozen=True):
    """Do `count` units of scoring the prompt of sequence `id`, `start` of which are done: tokens of the prompt but for
    its last one, which the scorer computes, and behind those the look-ahead (`sparse_prompt.LOOK_AHEAD_UNITS`). A chunk
    has units of one kind. The first one starts with tokens that the scorer has cached (`Runner.match_scored`)."""

    id: str
    start: int
    count: int


class Encode(msgspec.Struct, frozen=True):
    """Compute `count` layers of the vision tower, behind the first `start` ones, for the image at place `image` of
    sequence `id`. A `start` of 0 begins anew. With the last layer its features are kept, by its hash, for all sequences
    that have it."""

    id: str
    image: int
    start: int
    count: int


class DecodeRow(msgspec.Struct, frozen=True):
    """Feed the last token of sequence `id`, and up to `drafts` draft tokens behind it. Sample the token at `position`
    (0: the first generated one), and those behind accepted drafts.

    The step started just before, not finished yet, may be the one that samples the token to feed. If that step may
    reject drafts, `position` is an upper bound: the runner knows the true one. Blocks for all drafts are allocated. If
    that step forces a token at `position`, this row gains none (`RowTokens`).
    """

    id: str
    position: int
    drafts: int = 0


class Admit(msgspec.Struct, frozen=True):
    """A sequence that joins. `history` are tokens generated before it was last released. It starts with the first
    `cached_tokens` tokens of prompt and history from the prefix cache, where `Runner.match_prefix` found them.

    Of the prompt `skipped` tokens are left out: what is kept is the first `cached_tokens` and some of those behind
    them, which is known when they are scored, or is a part of the plans that prefill them. Then the cache has tokens of
    the prompt in their order, but not by their positions. Only the first `reusable` tokens, which are kept without
    gaps, may be cached ones (-1: any).
    """

    request: Submit
    history: tuple[int, ...] = ()
    cached_tokens: int = 0
    skipped: int = 0
    reusable: int = -1


class StepPlan(msgspec.Struct, frozen=True, dict=True):
    """The work of one step, in the order in which a runner does it. It names tokens by position: the runner has them.

    1. `admit`: sequences that join. One that was released may be admitted again, with `history`.
    2. `encode`: layers of images, each image at most once. Chunks of the next steps use their features.
    3. `prefill`: at most one chunk of a sequence, which has the features of the images that it comes to; or `score`: at
       most one chunk of a prompt that is scored.
    4. `decode`: sequences whose prompt is complete, also by a last chunk in `prefill`. One that lacks memory may be
       left out. A sequence with `max_tokens` 0 never decodes; with `pooling` its chunks compute the last token, too.

    With `propose` the result says how many draft tokens each decoding sequence could verify next (`RowTokens.ready`).
    """

    step: int
    admit: tuple[Admit, ...] = ()
    prefill: tuple[PrefillChunk, ...] = ()
    decode: tuple[DecodeRow, ...] = ()
    score: tuple[ScoreChunk, ...] = ()
    propose: bool = False
    encode: tuple[Encode, ...] = ()

    @property
    def sequence_ids(self) -> Iterable[str]:
        """The id of each sequence in the plan, once."""
        admitted = (admit.request.id for admit in self.admit)
        chunks = (item.id for items in (self.encode, self.prefill, self.score, self.decode) for item in items)
        return dict.fromkeys((*admitted, *chunks))

    @property
    def computed(self) -> Iterator[tuple[str, int]]:
        """The id of each sequence that joins or has a chunk, with the number of its tokens that are computed then."""
        yield from ((admit.request.id, admit.cached_tokens) for admit in self.admit)
        yield from ((chunk.id, chunk.start + chunk.count) for chunk in self.prefill)

    @cached_property
    def verifies(self) -> bool:
        """Whether it verifies draft tokens."""
        return any(decode.drafts for decode in self.decode)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to compute."""
        return not (self.admit or self.encode or self.prefill or self.decode or self.score)


class RowTokens(msgspec.Struct, frozen=True):
    """Tokens that sequence `id` gained, one and one more for each accepted draft, with log-probabilities if its request
    asks for them. Each decode row of a plan gains or fails. Blocks of rejected drafts are free by now. With `ended` the
    last token completed its constraint, and the sequence stops.

    The last `forced` of the tokens were not sampled: its constraint allows no others. They are not computed, and no
    blocks are allocated for them: the next plan feeds them, the last one as a decode row and those before it as a
    chunk. A row of the step in flight meanwhile, of which there is one at most, is to sample a token that is forced
    already: it computes the token that it feeds, and gains none.

    `drafted` draft tokens were verified; with `ends_drafted` the last sampled token is an accepted one, too, as the
    sequence ends there. `ready` ones could be in the next step, if that feeds the last of `tokens`;
    they stand behind `match` tokens that match, where they were looked up.
    """

    id: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    ended: bool = False
    forced: int = 0
    drafted: int = 0
    ready: int = 0
    match: int = 0
    ends_drafted: bool = False


class DraftTrial(msgspec.Struct, frozen=True):
    """Outcome of draft tokens that no step verified: of `drafted` ones that were proposed for sequence `id`, behind
    `match` matching tokens, the first `accepted` are what was sampled. The next one is not, where `drafted` is more."""

    id: str
    drafted: int
    accepted: int
    match: int = 0


class RowFailure(msgspec.Struct, frozen=True):
    """Sequence `id` can't go on; no other is touched. The runner no longer runs it. `code` is the error's."""

    id: str
    message: str
    code: str = "engine_step_failed"


class RowScores(msgspec.Struct, frozen=True):
    """Log-probabilities of the prompt tokens of sequence `id` that this step computed, in order. The first prompt token
    has none. A sequence that is admitted again repeats them from the start."""

    id: str
    logprobs: tuple[TokenLogprob, ...]


class RowVector(msgspec.Struct, frozen=True):
    """The pooled hidden states of sequence `id`, whose last chunk this step computed: float32 in the machine's byte
    order."""

    id: str
    data: bytes


class RowKept(msgspec.Struct, frozen=True):
    """Outcome of scoring the prompt of sequence `id`: the `positions` of the tokens that are kept behind its cached
    prefix, ascending; as many as its Admit says. Or the `failure`: then the whole prompt is prefilled."""

    id: str
    positions: tuple[int, ...] = ()
    failure: str = ""


class StepResult(msgspec.Struct, frozen=True):
    """Result of a step. `prefill_s` and `decode_s` are wall seconds of prompts and of decoding, each where it was
    measured by itself; `mixed_s` are those of prompts and decoding rows together.

    `proposing_s` of them were spent on the tokens of rows with the drafts that are ready for them, if it was asked for
    these.

    `evicted` are sequences whose cached tokens, or those of the scorer, could not be taken over. Nothing was computed
    for them; they are admitted again without.
    """

    rows: tuple[RowTokens, ...] = ()
    scores: tuple[RowScores, ...] = ()
    vectors: tuple[RowVector, ...] = ()
    trials: tuple[DraftTrial, ...] = ()
    kept: tuple[RowKept, ...] = ()
    failures: tuple[RowFailure, ...] = ()
    evicted: tuple[str, ...] = ()
    prefill_s: float = 0.0
    decode_s: float = 0.0
    mixed_s: float = 0.0
    proposing_s: float = 0.0
