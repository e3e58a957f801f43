"""One sequence as the scheduler sees it."""

from __future__ import annotations

from dataclasses import dataclass, field

from .messages import Finish, FinishReason, Submit, TokenLogprob
from .states import Event, State, advance


@dataclass(slots=True, eq=False)
class Sequence:
    """A sequence from its arrival to its end. Times are in seconds of the owner's clock."""

    request: Submit
    order: int
    arrived: float  # in the queue: at first, or when it was preempted
    state: State = State.WAITING
    told: bool = False  # that it is admitted
    tokens: list[int] = field(default_factory=list)
    cached: int = 0  # tokens of prompt + generated in the runner's cache once the steps in flight are finished
    ahead: int = 0  # steps in flight that pick a token for it
    decoded: int = 0  # the last step that does
    kept: int = 0  # of `cached`, what the steps that were applied have brought: others may reuse it
    reused: int = 0  # of `cached`, what the prefix cache held when it joined
    reuse_told: bool = False  # when it joined first
    scored: int = 0  # prompt tokens whose log-probabilities came since it joined
    scores_told: int = 0
    turn: int = 0  # when it last got prefill time, or came: the longest ago is served first
    joined: bool = False  # the runner has it
    suspect: bool = False  # was in a step that raised, and has not been cleared since
    lead: Sequence | None = None  # who computes what it waits for, before it joins
    awaits: int = 0  # the tokens that the lead has to keep
    twin: Sequence | None = None  # who runs and begins alike, before it joins
    common: int = 0  # the tokens that both begin with

    @classmethod
    def of(cls, request: Submit, *, order: int, now: float) -> Sequence:
        """A sequence that arrives; a resumed one as a preempted one that waits."""
        return cls(
            request=request,
            order=order,
            arrived=now,
            tokens=list(request.generated),
            scores_told=request.scored,
        )

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def live(self) -> bool:
        return self.state is not State.DONE

    @property
    def rank(self) -> tuple[int, int]:
        """Whose claim to memory is better: the lower. It never changes, so the best one always gets on."""
        return self.request.priority, self.order

    @property
    def reserved(self) -> int:
        """The tokens it can come to hold."""
        return len(self.request.prompt) + self.request.max_tokens

    @property
    def known(self) -> int:
        """Tokens of prompt and completion so far."""
        return len(self.request.prompt) + len(self.tokens)

    @property
    def prefill_left(self) -> int:
        """Tokens to put into the cache before the last one can be fed as a decode row."""
        return self.known + self.ahead - 1 - self.cached

    @property
    def position(self) -> int:
        """Of the token that the next decode row picks."""
        return len(self.tokens) + self.ahead

    @property
    def decodes(self) -> bool:
        """Whether all but its last token is in the cache, and it wants more than what is in flight."""
        return self.prefill_left == 0 and self.position < self.request.max_tokens

    def decodes_after(self, step: int) -> bool:
        """Whether it can in the step after `step`: a token that is not known has to come from just that one."""
        position = len(self.tokens) + self.ahead  # as `decodes`, for every row of every step
        return (
            len(self.request.prompt) + position - 1 == self.cached
            and position < self.request.max_tokens
            and (not self.ahead or self.decoded == step)
        )

    @property
    def last_token(self) -> int | None:
        """What a decode row feeds; None while a step in flight picks it."""
        if self.ahead:
            return None
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

    def score(self, logprobs: tuple[TokenLogprob, ...]) -> tuple[TokenLogprob, ...]:
        """Those of `logprobs`, the next of its prompt, that were not told before it was rewound or preempted."""
        new = logprobs[max(0, self.scores_told - self.scored) :]
        self.scored += len(logprobs)
        self.scores_told += len(new)
        return new

    def rewind(self) -> None:
        """Forget the cache, keep the tokens."""
        self.on(Event.REWIND)
        self._forget()

    def preempt(self, now: float) -> None:
        """Forget the cache, keep the tokens, and wait."""
        self.on(Event.PREEMPT)
        self._forget()
        self.arrived = now

    def _forget(self) -> None:
        self.cached = self.kept = self.reused = self.ahead = self.scored = 0
        self.joined = False
