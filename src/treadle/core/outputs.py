"""Outputs of sequences, collected until the next report."""

from __future__ import annotations

from dataclasses import dataclass

from .messages import Finish, Output, TokenLogprob, WaitReason
from .sequence import Sequence


@dataclass(slots=True)
class Pending:
    """Unreported output of one sequence. See `Output`."""

    waits_for: WaitReason | None = None
    admitted: bool = False
    wait_s: float = 0.0
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    drafted: int = 0
    accepted: int = 0
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    prompt_done: int | None = None
    cached_tokens: int | None = None
    scored_tokens: int | None = None
    kept_tokens: int | None = None
    finish: Finish | None = None

    def output(self, id_: str) -> Output:
        """Return it as the message for sequence `id_`."""
        return Output(
            id=id_,
            waits_for=self.waits_for,
            admitted=self.admitted,
            wait_s=self.wait_s,
            tokens=self.tokens,
            logprobs=self.logprobs,
            drafted=self.drafted,
            accepted=self.accepted,
            prompt_logprobs=self.prompt_logprobs,
            prompt_tokens_done=self.prompt_done,
            cached_tokens=self.cached_tokens,
            scored_tokens=self.scored_tokens,
            kept_tokens=self.kept_tokens,
            finish=self.finish,
        )


class Outputs:
    """Unreported outputs by sequence, in the order of their first entry. Not by id, which may be used again at once."""

    def __init__(self) -> None:
        self._pending: dict[Sequence, Pending] = {}

    def of(self, seq: Sequence) -> Pending:
        """Return the pending output of `seq`, a new one if there is none."""
        pending = self._pending.get(seq)
        if pending is None:
            pending = self._pending[seq] = Pending()
        return pending

    def flush(self) -> tuple[Output, ...]:
        """Return everything that is unreported, and forget it."""
        outputs = tuple(pending.output(seq.id) for seq, pending in self._pending.items())
        self._pending = {}
        return outputs

    def __bool__(self) -> bool:
        return bool(self._pending)
