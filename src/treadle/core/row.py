"""One sequence as the scheduler sees it."""

from __future__ import annotations

from dataclasses import dataclass, field

from .messages import Finish, FinishReason, Submit
from .states import Event, State, advance


@dataclass(slots=True, eq=False)
class Row:
    """A sequence from its arrival to its end. Times are in seconds of the owner's clock."""

    request: Submit
    order: int
    arrived: float
    state: State = State.WAITING
    admitted: float = 0.0
    tokens: list[int] = field(default_factory=list)
    cached: int = 0  # tokens of prompt + generated that the runner's cache holds
    turn: int = 0  # when it last got prefill time, or came: the longest ago is served first
    joined: bool = False  # the runner has it
    suspect: bool = False  # was in a step that raised, and has not been cleared since

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def live(self) -> bool:
        return self.state is not State.DONE

    @property
    def reserved(self) -> int:
        """The tokens it can come to hold."""
        return len(self.request.prompt) + self.request.max_tokens

    @property
    def prefill_left(self) -> int:
        """Tokens to put into the cache before the last one can be fed as a decode row."""
        return len(self.request.prompt) + len(self.tokens) - 1 - self.cached

    @property
    def last_token(self) -> int:
        return self.tokens[-1] if self.tokens else self.request.prompt[-1]

    def upcoming(self, count: int) -> tuple[int, ...]:
        """The next `count` tokens to prefill."""
        prompt = self.request.prompt
        start, end = self.cached, self.cached + count
        head = prompt[start:end]
        if end <= len(prompt):
            return head
        return head + tuple(self.tokens[max(0, start - len(prompt)) : end - len(prompt)])

    def on(self, event: Event) -> None:
        self.state = advance(self.state, event)

    def take(self, token: int) -> Finish | None:
        """Gain one token; the way it ends the sequence, if it does."""
        self.tokens.append(token)
        if token in self.request.stop_token_ids and len(self.tokens) > self.request.min_tokens:
            return Finish(reason=FinishReason.STOP, stop_token_id=token)
        if len(self.tokens) >= self.request.max_tokens:
            return Finish(reason=FinishReason.LENGTH)
        return None

    def rewind(self) -> None:
        """Forget the cache, keep the tokens."""
        self.on(Event.REWIND)
        self.cached = 0
        self.joined = False
