"""Reasoning of one row: its begin and end in the generated tokens, and its budget."""

from __future__ import annotations

from enum import Enum, auto

from ...core.messages import Thinking


class ReasoningPhase(Enum):
    """Phase of a row's reasoning."""

    AHEAD = auto()  # the next token may begin it
    OPEN = auto()
    OVER = auto()  # or there was none


class Reasoning:
    """Follows the tokens of a row from its first generated one. `opening` are ids of `open_ids` that were generated."""

    def __init__(self, thinking: Thinking) -> None:
        self.close_ids = thinking.close_ids
        self.opening = 0
        self._open_ids = thinking.open_ids
        self._budget = thinking.budget
        self.reopens = thinking.reopens
        self._tokens = 0
        self._closing = 0  # of `close_ids`, how many the last tokens are
        if thinking.opened and thinking.close_ids:
            self.phase = ReasoningPhase.OPEN
        else:
            self.phase = ReasoningPhase.AHEAD if thinking.open_ids and thinking.close_ids else ReasoningPhase.OVER

    @property
    def opening_id(self) -> int:
        """The token that begins the reasoning, or continues its beginning."""
        return self._open_ids[self.opening]

    @property
    def tokens_to_open(self) -> int:
        """Tokens of `open_ids` that are missing."""
        return len(self._open_ids) - self.opening

    @property
    def exhausted(self) -> bool:
        """Whether the reasoning is open and has used up its budget."""
        return self.phase is ReasoningPhase.OPEN and self._budget is not None and self._tokens >= self._budget

    @property
    def closing_id(self) -> int:
        """The next token of `close_ids`."""
        return self.close_ids[self._closing]

    def accept(self, token: int) -> None:
        """Take over a generated token."""
        if self.phase is ReasoningPhase.AHEAD:
            self._open(token)
        elif self.phase is ReasoningPhase.OPEN:
            self._close(token)

    def await_more(self, token: int) -> None:
        """Expect more reasoning behind a token that ended a block of it, or that began none."""
        self.opening = int(len(self._open_ids) > 1 and token == self._open_ids[0])
        self._closing = 0
        self.phase = ReasoningPhase.AHEAD

    def _open(self, token: int) -> None:
        if token != self.opening_id:
            self.phase = ReasoningPhase.OVER
            return
        self.opening += 1
        if self.opening == len(self._open_ids):
            self.phase = ReasoningPhase.OPEN

    def _close(self, token: int) -> None:
        self._tokens += 1
        recent = (*self.close_ids[: self._closing], token)
        self._closing = next(n for n in range(len(recent), -1, -1) if recent[len(recent) - n :] == self.close_ids[:n])
        if self._closing == len(self.close_ids):
            self.phase = ReasoningPhase.OVER
