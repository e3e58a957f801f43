"""A sequence as the scheduler sees it: its tokens, and how many of them are computed."""

from __future__ import annotations

from dataclasses import dataclass, field

from .acceptance import MatchedAcceptance
from .image import keyed
from .messages import Finish, FinishReason, Submit, TokenLogprob, WaitReason
from .plan import RowTokens
from .sparse_prompt import SparsePrompt
from .states import Event, State, advance


@dataclass(slots=True, eq=False)
class Sequence:
    """A sequence from its arrival to its end. Times are in seconds of the owner's clock.

    Its books have two stages. Planned: `num_computed_tokens` are in the cache once all steps in flight are finished,
    and `tokens_in_flight` are sampled by them, if they accept all drafts; both are corrected when a step is applied.
    Settled: `tokens`, and the `committed_tokens` that applied steps have computed, which others may reuse.
    """

    request: Submit
    order: int
    arrived: float  # in the queue: first, or when it was preempted
    state: State = State.WAITING
    waits_for: WaitReason = WaitReason.SLOT  # as reported
    admitted_reported: bool = False
    tokens: list[int] = field(default_factory=list)  # generated
    prompt_tokens: int = field(init=False)  # of its prompt that its cache gets: all that are not left out
    sparse: SparsePrompt | None = None  # of a prompt that is prefilled in part
    num_computed_tokens: int = 0
    committed_tokens: int = 0
    cached_tokens: int = 0  # of these, reused from the prefix cache when it joined
    cached_reported: bool = False  # when it joined first
    tokens_in_flight: int = 0
    superseded: int = 0  # tokens that a step in flight samples, and that are forced already
    last_decode_step: int = 0
    last_prefill_step: int = 0  # or the step of its admission: prompts with the lowest are served first
    scored_tokens: int = 0  # of its prompt, since it joined
    reported_scores: int = 0
    joined: bool = False  # the runner has it
    may_reuse: bool = True  # cached tokens of others
    fed_tokens: int = 1  # the last one, by a decode row; 0 where it is pooled
    suspect: bool = False  # was in a step that raised, and has gained nothing since
    ready: int = 0  # draft tokens behind its last one
    match: int = 0  # matching tokens before them, where they were looked up
    last_verified: int = 0  # step that verified drafts
    acceptance: MatchedAcceptance | None = None  # of its drafts, once any have been tried
    prefix_leader: Sequence | None = None  # computes the prefix that it waits for, before it joins
    awaited_tokens: int = 0  # the length of this prefix
    prefix_peer: Sequence | None = None  # runs and begins with the same tokens, before it joins
    shared_tokens: int = 0  # the number of these tokens
    awaited_images: dict[int, bytes] = field(default_factory=dict)  # hashes of those without features, by their places
    keys: tuple[int, ...] = field(init=False)  # its prompt, with keys of images in place of their tokens

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.request.prompt)
        self.keys = keyed(self.request.prompt, self.request.images)

    @classmethod
    def of(cls, request: Submit, *, order: int, now: float) -> Sequence:
        """Return a sequence that arrives; a resumed one waits like one that was preempted."""
        return cls(
            request=request,
            order=order,
            arrived=now,
            tokens=list(request.generated),
            reported_scores=request.scored,
            may_reuse=not request.computes_whole_prompt,
            fed_tokens=int(request.pooling is None),
        )

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def live(self) -> bool:
        return self.state is not State.DONE

    @property
    def rank(self) -> tuple[int, int]:
        """Its rank for memory; the lowest is the best. It never changes, so the best-ranked sequence always ends."""
        return self.request.priority, self.order

    @property
    def max_num_tokens(self) -> int:
        """Tokens of prompt and completion in its cache at most."""
        return self.prompt_tokens + self.request.max_tokens

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and completion so far, without those that are left out."""
        return self.prompt_tokens + len(self.tokens)

    @property
    def prefill_tokens(self) -> int:
        """Tokens that chunks compute, as of the settled books: all but the last one, which a decode row feeds; all of a
        sequence that is pooled."""
        return self.num_tokens - self.fed_tokens

    @property
    def prefill_left(self) -> int:
        """Tokens to compute before the last one can be fed as a decode row."""
        return self.num_tokens + self.tokens_in_flight - self.fed_tokens - self.num_computed_tokens

    @property
    def computes_images(self) -> bool:
        """Whether some of its images are in the tokens that are left to compute."""
        images = self.request.images
        return bool(images) and images[-1].end > self.num_computed_tokens

    @property
    def prefilled_tokens(self) -> int:
        """Tokens that chunks have computed since it joined; 0 of one that decodes."""
        return 0 if self.state is State.DECODE else self.num_computed_tokens - self.cached_tokens

    @property
    def prefill_ready(self) -> int:
        """Of `prefill_left`, the tokens in front of the first image whose features are not computed."""
        if not self.awaited_images:
            return self.prefill_left
        start = self.request.images[min(self.awaited_images)].start
        return max(0, min(self.prefill_left, start - self.num_computed_tokens))

    @property
    def least_chunk(self) -> int:
        """Tokens of the shortest chunk that splits no image: those of the one that comes next, else one."""
        at = self.num_computed_tokens
        return next((image.end - at for image in self.request.images if image.start <= at < image.end), 1)

    @property
    def position(self) -> int:
        """The position among generated tokens that the next decode row samples, if all drafts are accepted."""
        return len(self.tokens) + self.tokens_in_flight

    @property
    def decodes(self) -> bool:
        """Whether all but its last token is computed, and it needs more tokens than are in flight."""
        return self.prefill_left == 0 and self.position < self.request.max_tokens

    def decodes_after(self, step: int) -> bool:
        """Whether it can decode in the step after `step`: a token in flight must come from `step` itself."""
        position = len(self.tokens) + self.tokens_in_flight  # like `decodes`; called for all sequences in all steps
        return (
            self.prompt_tokens + position - 1 == self.num_computed_tokens
            and position < self.request.max_tokens
            and (not self.tokens_in_flight or self.last_decode_step == step)
        )

    @property
    def scores(self) -> bool:
        """Whether it is not known yet which part of its prompt is kept."""
        return self.sparse is not None and self.sparse.chosen is None

    @property
    def draftable_tokens(self) -> int:
        """Draft tokens that it could gain behind the next one, if all in flight are accepted."""
        return max(0, self.request.max_tokens - self.position - 1)

    def leave_out(self, sparse: SparsePrompt | None) -> None:
        """Prefill what `sparse` keeps of its prompt; all of it without."""
        self.sparse = sparse
        self.prompt_tokens = len(self.request.prompt) - (0 if sparse is None else sparse.skipped)

    def plan_decode(self, step: int, drafts: int) -> None:
        """Book a decode row with `drafts` draft tokens in step number `step`."""
        self.num_computed_tokens += 1 + drafts
        self.tokens_in_flight += 1 + drafts
        self.last_decode_step = step
        if drafts:
            self.last_verified = step

    def settle_decode(self, drafts: int, gained: RowTokens) -> tuple[int, Finish | None]:
        """Settle a decode row that was booked with `drafts` draft tokens. Return how many of the tokens that it gained
        count, as those behind the end do not, and the finish if there is one."""
        tokens, forced, self.ready, self.match = gained.tokens, gained.forced, gained.ready, gained.match
        if self.superseded:
            return self._settle_superseded(tokens)
        sampled = len(tokens) - forced
        rejected = 1 + drafts - sampled
        if not 1 <= sampled <= 1 + gained.drafted <= 1 + drafts:
            raise AssertionError("a sequence gains a token, and one more for each accepted draft")
        self.suspect = False
        self.tokens_in_flight -= 1 + drafts
        self.committed_tokens += sampled
        self.num_computed_tokens -= rejected
        if forced:
            self._supersede()
        for count, token in enumerate(tokens, 1):
            if (finish := self.append(token)) is not None:
                cut = gained.ended and count == len(tokens) and finish.reason is FinishReason.LENGTH
                return count, self.stopped() if cut else finish
        return len(tokens), self.stopped() if gained.ended else None

    def _supersede(self) -> None:
        """The token that the step in flight samples is forced: that step only computes the one that it feeds."""
        if self.tokens_in_flight > 1:
            raise AssertionError("tokens are forced while at most one is in flight")
        self.superseded, self.tokens_in_flight = self.tokens_in_flight, 0

    def _settle_superseded(self, tokens: tuple[int, ...]) -> tuple[int, Finish | None]:
        """Settle a decode row whose token was forced while it was in flight."""
        if tokens:
            raise AssertionError("a token that was forced is not gained again")
        self.superseded = 0
        self.committed_tokens += 1
        return 0, None

    def on(self, event: Event) -> None:
        """Take a transition. Raises IllegalTransition if there is none."""
        self.state = advance(self.state, event)

    def append(self, token: int) -> Finish | None:
        """Append a generated token. Return the finish if it ends the sequence."""
        self.tokens.append(token)
        if token in self.request.stop_token_ids and len(self.tokens) > self.request.min_tokens:
            return self.stopped()
        if len(self.tokens) >= self.request.max_tokens:
            return Finish(reason=FinishReason.LENGTH)
        return None

    def stopped(self) -> Finish:
        """Return the finish of a sequence that its last token ends."""
        token = self.tokens[-1]
        return Finish(reason=FinishReason.STOP, stop_token_id=token if token in self.request.stop_token_ids else None)

    def unreported_scores(self, logprobs: tuple[TokenLogprob, ...]) -> tuple[TokenLogprob, ...]:
        """Return those of `logprobs`, the next of its prompt, that were not reported before a rewind."""
        new = logprobs[max(0, self.reported_scores - self.scored_tokens) :]
        self.scored_tokens += len(logprobs)
        self.reported_scores += len(new)
        return new

    def rewind(self) -> None:
        """Drop its cache and keep its tokens."""
        self.on(Event.REWIND)
        self._forget()

    def preempt(self, now: float) -> None:
        """Drop its cache, keep its tokens, and wait."""
        self.on(Event.PREEMPT)
        self._forget()
        self.arrived = now

    def _forget(self) -> None:
        self.num_computed_tokens = self.committed_tokens = self.cached_tokens = 0
        self.tokens_in_flight = self.superseded = self.scored_tokens = self.ready = 0
        self.joined = False
        if self.sparse is not None:
            self.sparse.restart()
