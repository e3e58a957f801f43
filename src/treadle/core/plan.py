"""What the scheduler asks of a runner in one step, and what the runner answers."""

from __future__ import annotations

import msgspec

from .messages import Submit, TokenLogprob


class PrefillChunk(msgspec.Struct, frozen=True):
    """Put `tokens` into the cache of row `id`, whose cache holds `start` tokens so far."""

    id: str
    start: int
    tokens: tuple[int, ...]


class DecodeRow(msgspec.Struct, frozen=True):
    """Feed `token` to row `id` and pick the token at `position` (0 is the first generated one)."""

    id: str
    token: int
    position: int


class Admit(msgspec.Struct, frozen=True):
    """A row that joins. `history` are tokens generated before it was last released."""

    request: Submit
    history: tuple[int, ...] = ()


class StepPlan(msgspec.Struct, frozen=True):
    """One step's work, in the order a runner does it.

    1. `release`: forget these rows. They appear in nothing below.
    2. `admit`: rows that join, with everything about how they sample. A row that was released may be admitted again;
       `history` then holds tokens it has already generated (they follow the prompt).
    3. `prefill`: at most one chunk a row.
    4. `decode`: every row whose prompt is complete, also one whose last chunk is in `prefill`, unless it is held back.
    """

    step: int
    release: tuple[str, ...] = ()
    admit: tuple[Admit, ...] = ()
    prefill: tuple[PrefillChunk, ...] = ()
    decode: tuple[DecodeRow, ...] = ()

    @property
    def empty(self) -> bool:
        return not (self.release or self.admit or self.prefill or self.decode)


class RowTokens(msgspec.Struct, frozen=True):
    """The tokens row `id` gained: one or more, with log-probabilities when its request asks for them."""

    id: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


class RowFailure(msgspec.Struct, frozen=True):
    """Row `id` can't go on and nothing else is touched. The runner has kept nothing of it running."""

    id: str
    message: str


class StepResult(msgspec.Struct, frozen=True):
    """What a step did. `prefill_s` and `decode_s` are wall seconds, for the next plan's prefill budget."""

    rows: tuple[RowTokens, ...] = ()
    failures: tuple[RowFailure, ...] = ()
    prefill_s: float = 0.0
    decode_s: float = 0.0
