"""What is to be told of each row in the next report."""

from __future__ import annotations

from dataclasses import dataclass

from .messages import Finish, Output, TokenLogprob
from .sequence import Sequence


@dataclass(slots=True)
class Pending:
    """News of one row. See `Output`."""

    admitted: bool = False
    wait_s: float = 0.0
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    prompt_done: int | None = None
    cached: int | None = None
    finish: Finish | None = None

    def output(self, id_: str) -> Output:
        return Output(
            id=id_,
            admitted=self.admitted,
            wait_s=self.wait_s,
            tokens=self.tokens,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            prompt_tokens_done=self.prompt_done,
            cached_tokens=self.cached,
            finish=self.finish,
        )


class Outputs:
    """News by row, in the order in which rows came up. Rows, not ids: an id may come again at once."""

    def __init__(self) -> None:
        self._pending: dict[Sequence, Pending] = {}

    def of(self, row: Sequence) -> Pending:
        pending = self._pending.get(row)
        if pending is None:
            pending = self._pending[row] = Pending()
        return pending

    def flush(self) -> tuple[Output, ...]:
        """Everything there is to tell since the last call."""
        outputs = tuple(pending.output(row.id) for row, pending in self._pending.items())
        self._pending = {}
        return outputs

    def __bool__(self) -> bool:
        return bool(self._pending)
