"""What the scheduler asks of a runner in one step, and what the runner answers."""

from __future__ import annotations

import msgspec

from .messages import Submit, TokenLogprob


class PrefillChunk(msgspec.Struct, frozen=True):
    """Put `tokens` into the cache of row `id`, whose cache holds `start` tokens so far. Others wait to go on from the
    row's first tokens, as many as one of `awaited` says, all above `start`: a runner whose `sharing` is MARKED is to
    keep what the row has then, or a little before."""

    id: str
    start: int
    tokens: tuple[int, ...]
    awaited: tuple[int, ...] = ()


class DecodeRow(msgspec.Struct, frozen=True):
    """Feed `token` to row `id` and pick the token at `position` (0 is the first generated one).

    `token` is None where the step started just before picks it and is not finished yet: the runner has it, nobody else
    does.
    """

    id: str
    token: int | None
    position: int


class Admit(msgspec.Struct, frozen=True):
    """A row that joins. `history` are tokens generated before it was last released; `cached` is how many tokens of
    prompt and history the runner holds for it already (what `Runner.reuse` said)."""

    request: Submit
    history: tuple[int, ...] = ()
    cached: int = 0


class StepPlan(msgspec.Struct, frozen=True):
    """One step's work, in the order a runner does it.

    1. `release`: forget these rows, also where steps in flight compute for them; what those say of them is dropped.
    2. `admit`: rows that join, with everything about how they sample. A row that was released may be admitted again;
       `history` then holds tokens it has already generated (they follow the prompt).
    3. `prefill`: at most one chunk a row.
    4. `decode`: every row whose prompt is complete, also one whose last chunk is in `prefill`, unless it is held back.
       A row whose `max_tokens` is 0 never decodes.
    """

    step: int
    release: tuple[str, ...] = ()
    admit: tuple[Admit, ...] = ()
    prefill: tuple[PrefillChunk, ...] = ()
    decode: tuple[DecodeRow, ...] = ()

    @property
    def idle(self) -> bool:
        """Whether it asks the runner for nothing but to forget rows."""
        return not (self.admit or self.prefill or self.decode)


class RowTokens(msgspec.Struct, frozen=True):
    """The tokens row `id` gained: one or more, with log-probabilities when its request asks for them. Every decode row
    of a plan gains or fails; more than one token only from a runner without lookahead."""

    id: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


class RowFailure(msgspec.Struct, frozen=True):
    """Row `id` can't go on and nothing else is touched. The runner has kept nothing of it running."""

    id: str
    message: str


class RowScores(msgspec.Struct, frozen=True):
    """Log-probabilities of row `id`'s prompt tokens that this step computed, in order; the first prompt token has
    none, as nothing comes before it. A row that is admitted again says them again from the start."""

    id: str
    logprobs: tuple[TokenLogprob, ...]


class StepResult(msgspec.Struct, frozen=True):
    """What a step did. `prefill_s` and `decode_s` are wall seconds, for the next plan's prefill budget."""

    rows: tuple[RowTokens, ...] = ()
    scores: tuple[RowScores, ...] = ()
    failures: tuple[RowFailure, ...] = ()
    prefill_s: float = 0.0
    decode_s: float = 0.0
