"""Generation: a sequence as its caller sees it. Admitted, then deltas, then exactly one end."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

import msgspec

from ..core.messages import CancelReason, Finish, FinishReason, Output, Submit, TokenLogprob, WaitReason
from ..errors import Busy, InvalidGrammar, ReaderStalled, RequestCancelled, ServerStopping, TreadleError, from_code

MAX_UNREAD_BYTES = 32 << 20
"""Limit of the memory that unread tokens of one sequence take, about."""
TOKEN_BYTES = 40
LOGPROB_BYTES = 80
TOP_BYTES = 116  # each (token id, logprob)
MAX_DELTA_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Delta:
    """Increment since the previous delta.

    `tokens`, each with an entry of `logprobs` if requested. `prompt_logprobs`: of the prompt's tokens from the second
    on. `prompt_tokens_done`: computed prompt tokens. `finish`: on the last delta, STOP or LENGTH; other ends raise.
    """

    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    prompt_tokens_done: int | None = None
    cached_tokens: int | None = None
    finish: Finish | None = None


class Generation:
    """A live sequence on the event loop, with one reader.

    Unread deltas are merged, up to MAX_DELTA_TOKENS in one: the event loop has others to serve while a reader catches
    up. How long a reader may pause is the front's to decide; here the request is cancelled where unread tokens take
    more than MAX_UNREAD_BYTES. A generation outlives the engine that computes it: `resume` returns the request with
    which the next engine continues from `generated`.
    """

    def __init__(
        self, request: Submit, *, kind: str, tag: str, now: float, cancel: Callable[[Generation, CancelReason], None]
    ) -> None:
        self.request = request
        self.kind = kind
        self.tag = tag
        self.submitted = now
        self.started: float | None = None
        self.wait_s = 0.0
        self.waits_for = WaitReason.SLOT  # until it is admitted
        self.last_token: float | None = None
        self.completion_tokens = 0
        self.prompt_tokens_done = 0
        self.cached_tokens = 0
        self.scored_tokens = 0  # of its prompt, where that is prefilled in part
        self.kept_tokens = 0
        self.ended = False
        self.cancelled: CancelReason | None = None
        self.generated = array("I")
        self.drafted = 0  # draft tokens that steps verified
        self.may_have_run = False  # it may have run when an engine died before reporting it
        self.times_sent = 0  # the number of engines it was sent to
        self.resumed_at = 0  # generated tokens when it was last sent
        self._accepted: list[tuple[int, int]] = []  # for each step the place of its accepted drafts, and their number
        self._accepted_count = 0
        self._scored = 0  # prompt log-probabilities received so far
        self._cached_reported = False
        self._cancel = cancel
        self._max_unread = max_unread_tokens(request.logprobs)
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._prompt_logprobs: list[TokenLogprob] = []
        self._has_delta = False
        self._finish: Finish | None = None
        self._error: TreadleError | None = None
        self._wake = asyncio.Event()

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def runs(self) -> bool:
        """Whether it was admitted, or may have run when an engine died."""
        return self.started is not None or self.may_have_run

    @property
    def finish(self) -> Finish | None:
        """Its terminal event from the engine; None if it has not ended, or was failed by the client."""
        return self._finish

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for admission and was not cancelled."""
        return not (self.runs or self.ended) and self.cancelled is None

    @property
    def phase(self) -> str:
        """Phase for status: "waiting", "prefill", "decode" or "done"."""
        if self.ended:
            return "done"
        if self.started is None:
            return "waiting"
        return "decode" if self.completion_tokens else "prefill"

    def cancel(self, reason: CancelReason = CancelReason.CLIENT) -> None:
        """Cancel the sequence. Idempotent, never blocks. Its slot is freed by the engine's terminal event."""
        if self.cancelled is None and not self.ended:
            self.cancelled = reason
            self._cancel(self, reason)

    async def admitted(self) -> None:
        """Wait for admission. Raises the error that ended the sequence before: Busy, EngineUnavailable, ..."""
        while self.started is None and not self.ended:
            await self._next_change()
        if self.started is None and self._error is not None:
            raise self._error

    async def __aiter__(self) -> AsyncGenerator[Delta, None]:
        """Yield deltas up to the one with `finish`. An error is raised after the tokens received before it."""
        while True:
            while not (self._has_delta or self.ended):
                await self._next_change()
            delta = self._take_delta()
            has_more = bool(self._tokens)
            if delta.tokens or self._error is None:
                yield delta
            if has_more:
                await asyncio.sleep(0)
                continue
            if self._error is not None and not self._tokens:
                raise self._error
            if delta.finish is not None:
                return

    def resume(self, left_s: float, *, group_began: bool = False) -> Submit:
        """Return the request for the next engine and count it. A sequence that has not started may wait for `left_s`
        more seconds, or without limit if `group_began`: another sequence of its group has started."""
        self.times_sent += 1
        self.resumed_at = self.completion_tokens
        if self.times_sent == 1:
            return self.request
        return msgspec.structs.replace(
            self.request,
            max_wait_s=left_s,
            generated=tuple(self.generated),
            scored=self._scored,
            resumed=self.runs or group_began,
        )

    # From the client ---------------------------------------------------------------------------------------------

    def push(self, output: Output, now: float) -> None:
        """Add the output of a step."""
        if output.admitted and self.started is None:
            self.started = now
            self.wait_s = output.wait_s
        if output.waits_for is not None:
            self.waits_for = output.waits_for
        if output.prompt_tokens_done is not None:
            self.prompt_tokens_done = output.prompt_tokens_done
        if output.cached_tokens is not None and not self._cached_reported:
            self.cached_tokens, self._cached_reported = output.cached_tokens, True
        if output.scored_tokens is not None and output.kept_tokens is not None:
            self.scored_tokens, self.kept_tokens = output.scored_tokens, output.kept_tokens
        if output.tokens:
            self._tokens.extend(output.tokens)
            self._logprobs.extend(output.logprobs)
        if output.prompt_logprobs:
            self._prompt_logprobs.extend(output.prompt_logprobs)
        self.track(output)
        if output.finish is not None:
            self._finish_with(output.finish)
        elif len(self._tokens) > self._max_unread:
            self.cancel(CancelReason.STALLED)
        self._has_delta = True
        self._wake.set()

    def track(self, output: Output) -> None:
        """Record the output needed to resume the sequence, without passing it to the reader."""
        if output.accepted:
            self._accepted.append((self.completion_tokens, output.accepted))
            self._accepted_count += output.accepted
        self.completion_tokens += len(output.tokens)
        self.generated.extend(output.tokens)
        self.drafted += output.drafted
        self._scored += len(output.prompt_logprobs)

    def accepted_among(self, tokens: int) -> int:
        """Return how many of the first `tokens` generated ones are draft tokens that were accepted."""
        behind = 0
        for place, count in reversed(self._accepted):
            if place + count <= tokens:
                break
            behind += min(count, place + count - tokens)
        return self._accepted_count - behind

    def fail(self, error: TreadleError) -> None:
        """End the sequence with an error of the client's: the engine has ended, or the request is at fault."""
        if not self.ended:
            self.ended = True
            self._error = error
            self._wake.set()

    def set_wait_error(self, error: TreadleError) -> None:
        """Set the error of an expired wait, with its `Retry-After`."""
        self._error = error

    def _finish_with(self, finish: Finish) -> None:
        self.ended = True
        self._finish = finish
        self._error = _error_of(finish)
        if isinstance(self._error, InvalidGrammar) and self.request.constraint is not None:
            self._error.param = self.request.constraint.param or None

    def _take_delta(self) -> Delta:
        tokens, logprobs = self._tokens[:MAX_DELTA_TOKENS], self._logprobs[:MAX_DELTA_TOKENS]
        del self._tokens[:MAX_DELTA_TOKENS], self._logprobs[:MAX_DELTA_TOKENS]
        self._has_delta = bool(self._tokens)
        finish = self._finish if self._error is None and not self._tokens else None
        delta = Delta(
            tokens=tuple(tokens),
            logprobs=tuple(logprobs),
            prompt_logprobs=tuple(self._prompt_logprobs),
            prompt_tokens_done=self.prompt_tokens_done,
            cached_tokens=self.cached_tokens,
            finish=finish,
        )
        self._prompt_logprobs.clear()
        return delta

    async def _next_change(self) -> None:
        self._wake.clear()
        await self._wake.wait()


def max_unread_tokens(logprobs: int | None) -> int:
    """Return how many tokens of a request fit into MAX_UNREAD_BYTES; `logprobs` is the request's."""
    return MAX_UNREAD_BYTES // (TOKEN_BYTES + (0 if logprobs is None else LOGPROB_BYTES + TOP_BYTES * logprobs))


def _error_of(finish: Finish) -> TreadleError | None:
    """Return the caller's error for a terminal event; None for STOP and LENGTH."""
    match finish.reason:
        case FinishReason.STOP | FinishReason.LENGTH:
            return None
        case FinishReason.EXPIRED:
            return Busy("the server is busy: no slot came free within the time a request may wait")
        case FinishReason.CANCELLED if finish.code == CancelReason.STALLED:
            return ReaderStalled(
                "the client reads its answer too slowly: the server keeps no more of it unread; read it faster, or ask "
                "for fewer tokens or log-probabilities"
            )
        case FinishReason.CANCELLED if finish.code == CancelReason.SHUTDOWN:
            return ServerStopping("the server is stopping")
        case FinishReason.CANCELLED:
            return RequestCancelled("the request was cancelled")
        case _:
            return from_code(finish.code, finish.message)
