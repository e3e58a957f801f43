"""One sequence as its caller sees it: admitted, then deltas, then exactly one end."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

import msgspec

from ..core.messages import CancelReason, Finish, FinishReason, Output, Submit, TokenLogprob
from ..errors import Busy, ReaderStalled, RequestCancelled, ServerStopping, TreadleError, from_code

MAX_UNREAD_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new since the last one: `tokens` (with one of `logprobs` each, when asked for), `prompt_logprobs` of the
    prompt from its second token on, how much of the prompt is computed, and on the last delta how the sequence finished
    (STOP or LENGTH; every other end raises)."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    prompt_tokens_done: int | None = None
    cached_tokens: int | None = None
    finish: Finish | None = None


class Generation:
    """A live sequence. Lives on the event loop; one reader. Deltas that nobody has read yet merge; past
    MAX_UNREAD_TOKENS of them the request is cancelled, as its reader has stalled.

    It outlives the engine that computes it: `resume` says how the next one goes on from `generated`."""

    def __init__(
        self, request: Submit, *, kind: str, tag: str, now: float, cancel: Callable[[Generation, CancelReason], None]
    ) -> None:
        self.request = request
        self.kind = kind
        self.tag = tag
        self.submitted = now
        self.started: float | None = None
        self.wait_s = 0.0
        self.last_token: float | None = None
        self.completion_tokens = 0
        self.prompt_tokens_done = 0
        self.cached_tokens = 0
        self.ended = False
        self.cancelled: CancelReason | None = None
        self.generated = array("I")
        self.begun = False  # it may have run when an engine died, though that had not said so
        self.sent = 0  # to how many engines
        self.resumed_at = 0  # how many tokens it had when it was sent last
        self._scored = 0  # prompt log-probabilities so far
        self._cached_told = False
        self._cancel = cancel
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._prompt_logprobs: list[TokenLogprob] = []
        self._news = False
        self._finish: Finish | None = None
        self._error: TreadleError | None = None
        self._wake = asyncio.Event()

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def runs(self) -> bool:
        """Whether it is known to run, or may have run when an engine died: its wait is over."""
        return self.started is not None or self.begun

    @property
    def finish(self) -> Finish | None:
        """How it ended, where no error from outside ended it."""
        return self._finish

    @property
    def waits(self) -> bool:
        """Whether it does not run yet, and is still wanted."""
        return not (self.runs or self.ended) and self.cancelled is None

    @property
    def phase(self) -> str:
        """waiting, prefill or decode; done once its end is known."""
        if self.ended:
            return "done"
        if self.started is None:
            return "waiting"
        return "decode" if self.completion_tokens else "prefill"

    def cancel(self, reason: CancelReason = CancelReason.CLIENT) -> None:
        """Take it back. Idempotent, never blocks; its place is free once the engine has said so."""
        if self.cancelled is None and not self.ended:
            self.cancelled = reason
            self._cancel(self, reason)

    async def admitted(self) -> None:
        """Returns once it runs. Raises the error that ended it before: Busy, EngineUnavailable, ..."""
        while self.started is None and not self.ended:
            await self._changed()
        if self.started is None and self._error is not None:
            raise self._error

    async def __aiter__(self) -> AsyncGenerator[Delta, None]:
        """Deltas up to the one with `finish`. An error is raised after the tokens that came before it."""
        while True:
            while not (self._news or self.ended):
                await self._changed()
            delta = self._take()
            if delta.tokens or self._error is None:
                yield delta
            if self._error is not None and not self._tokens:
                raise self._error
            if delta.finish is not None:
                return

    def resume(self, left_s: float, *, group_began: bool = False) -> Submit:
        """What to send to an engine, for the first time or again. One that waits may wait for `left_s` more seconds, or
        without an end where `group_began`."""
        self.sent += 1
        self.resumed_at = self.completion_tokens
        if self.sent == 1:
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
        """Take in what a step did."""
        if output.admitted and self.started is None:
            self.started = now
            self.wait_s = output.wait_s
        if output.prompt_tokens_done is not None:
            self.prompt_tokens_done = output.prompt_tokens_done
        if output.cached_tokens is not None and not self._cached_told:
            self.cached_tokens, self._cached_told = output.cached_tokens, True
        if output.tokens:
            self._tokens.extend(output.tokens)
            self._logprobs.extend(output.logprobs)
        if output.prompt_logprobs:
            self._prompt_logprobs.extend(output.prompt_logprobs)
        self.follow(output)
        if output.finish is not None:
            self._end(output.finish)
        elif len(self._tokens) > MAX_UNREAD_TOKENS:
            self.cancel(CancelReason.STALLED)
        self._news = True
        self._wake.set()

    def follow(self, output: Output) -> None:
        """Take in what the next engine needs of what a step did, and nothing for a reader."""
        self.completion_tokens += len(output.tokens)
        self.generated.extend(output.tokens)
        self._scored += len(output.prompt_logprobs)

    def fail(self, error: TreadleError) -> None:
        """End it from outside: the engine is gone for good, or it is at fault."""
        if not self.ended:
            self.ended = True
            self._error = error
            self._wake.set()

    def expired(self, error: TreadleError) -> None:
        """Its wait is over: `error` says when to come again."""
        self._error = error

    def _end(self, finish: Finish) -> None:
        self.ended = True
        self._finish = finish
        self._error = _error_of(finish)

    def _take(self) -> Delta:
        finish = self._finish if self._error is None else None
        delta = Delta(
            tokens=tuple(self._tokens),
            logprobs=tuple(self._logprobs),
            prompt_logprobs=tuple(self._prompt_logprobs),
            prompt_tokens_done=self.prompt_tokens_done,
            cached_tokens=self.cached_tokens,
            finish=finish,
        )
        self._tokens.clear()
        self._logprobs.clear()
        self._prompt_logprobs.clear()
        self._news = False
        return delta

    async def _changed(self) -> None:
        self._wake.clear()
        await self._wake.wait()


def _error_of(finish: Finish) -> TreadleError | None:
    """The error that a terminal event means to the caller; None for a good end."""
    match finish.reason:
        case FinishReason.STOP | FinishReason.LENGTH:
            return None
        case FinishReason.EXPIRED:
            return Busy("the server is busy: no slot came free within the time a request may wait")
        case FinishReason.CANCELLED if finish.code == CancelReason.STALLED:
            return ReaderStalled("the client stopped reading its stream")
        case FinishReason.CANCELLED if finish.code == CancelReason.SHUTDOWN:
            return ServerStopping("the server is stopping")
        case FinishReason.CANCELLED:
            return RequestCancelled("the request was cancelled")
        case _:
            return from_code(finish.code, finish.message)
