"""The life of a generation request: check, reserve, tokenize, resize, submit, admitted, and its end.

The order is a contract: everything cheap is checked before a place is taken, the place before anything is tokenized,
and nothing is sent to a client before the scheduler has admitted its first sequence.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, replace

from ...core.messages import CancelReason, Submit
from ...core.refusals import Refusal
from ...engine.generation import Generation
from ...engine.reservation import Reservation
from ...errors import Busy, RequestCancelled
from ...telemetry.access_log import RequestRecord
from ...text import StopSet, TextStream, TextView
from ...text.answer_stream import AnswerStream
from ...text.formats.reader import ReaderSetup
from ..prepared import Held
from ..served_models import ServedModel
from ..validate import Limits, ValidatedRequest, build_submits, rename_params
from .choice import Choice
from .pieces import Usage
from .request import GenerationRequest, Registration


class Choices:
    """The choices of a request that was admitted: all choices of the first prompt, then of the second. `params` are
    the validated parameters. `charge` charges the request's key for what `record` tells."""

    def __init__(
        self,
        choices: Sequence[Choice],
        params: ValidatedRequest,
        reservation: Reservation,
        record: RequestRecord,
        charge: Callable[[], None],
    ) -> None:
        self.params = params
        self._choices = choices
        self._reservation = reservation
        self._record = record
        self._charge = charge
        self._prompt_tokens = record.prompt_tokens

    def __len__(self) -> int:
        return len(self._choices)

    def __iter__(self) -> Iterator[Choice]:
        return iter(self._choices)

    def cancel(self, reason: CancelReason) -> None:
        """Cancel all choices that still live."""
        self._reservation.cancel(reason)

    def expire(self) -> None:
        """End all choices that still live: the request's own timeout is over."""
        for choice in self._choices:
            choice.expire()

    def settle(self) -> None:
        """Fill in the request's record, and charge its key, as far as the answer has come."""
        self._record.completion_tokens = self.generated_tokens
        self._record.cached_tokens = self.cached_tokens
        self._record.skipped_tokens = self.skipped_tokens
        self._charge()

    @property
    def usage(self) -> Usage:
        """Tokens read so far. Cached tokens count as prompt tokens do: each prompt once, by its first choice."""
        completion_tokens = sum(choice.completion_tokens for choice in self._choices)
        reasoning_tokens = sum(choice.reasoning_tokens for choice in self._choices)
        usage = Usage(self._prompt_tokens, completion_tokens, self.cached_tokens, reasoning_tokens)
        scored, kept = (sum(kind) for kind in zip(*self._sparse_tokens, strict=True))
        if scored:
            usage = replace(usage, scored_tokens=scored, kept_tokens=kept)
        if self._choices[0].generation.request.prediction is None:
            return usage
        counts = [choice.draft_tokens for choice in self._choices]
        accepted, rejected = (sum(kind) for kind in zip(*counts, strict=True))
        return replace(usage, accepted_tokens=accepted, rejected_tokens=rejected)

    @property
    def cached_tokens(self) -> int:
        return sum(choice.cached_tokens for choice in self._choices[:: self.params.n])

    @property
    def _sparse_tokens(self) -> list[tuple[int, int]]:
        return [choice.sparse_tokens for choice in self._choices[:: self.params.n]]

    @property
    def skipped_tokens(self) -> int:
        """Tokens of prompts that were left out."""
        return self._prompt_tokens - sum(kept for _, kept in self._sparse_tokens)

    @property
    def generated_tokens(self) -> int:
        """Tokens generated so far, also those that the client left unread."""
        return sum(choice.generated_tokens for choice in self._choices)


def _draw_seed() -> int:
    return secrets.randbits(63)


@asynccontextmanager
async def begin(
    model: ServedModel,
    request: GenerationRequest,
    *,
    clock: Callable[[], float] = time.monotonic,
    draw_seed: Callable[[], int] = _draw_seed,
) -> AsyncIterator[Choices]:
    """Admit `request` and give its choices, once the first of them runs. Leaving the block cancels what still lives
    and fills in the request's record.

    Raises, in this order: EngineUnavailable while the model loads; InvalidRequest for a model that generates no text;
    InvalidRequest and InsufficientScope for parameters;
    RateLimited for the key's limits; Busy, EngineUnavailable or ServerStopping from the gate; InvalidRequest and Busy
    from the text workers; Busy for a size that no longer fits; RequestCancelled for an abort meanwhile; Quarantined;
    ContextLengthExceeded for a sequence that the cache can't hold; and the error that ended the wait for a slot. Busy
    also where the request's own timeout is over before.
    """
    text, limits = model.text(), model.limits()
    model.check_generates()
    params = request.check(limits)
    request.caller.check_priority(params.priority)
    with rename_params(request.spellings):
        life = _Life(model, request, with_stops(params, text, request), limits, text, clock, draw_seed)
        with life.reserved() as (reservation, registration, charge):
            choices = await life.start_in_time(reservation, registration, charge)
            timer = life.expire_in_time(choices)
            try:
                yield choices
            finally:
                if timer is not None:
                    timer.cancel()
                choices.settle()


def with_stops(params: ValidatedRequest, text: TextView, request: GenerationRequest) -> ValidatedRequest:
    """Return `params` with the model's own stop strings, where the request has them, and with stop strings that are
    special tokens as stop tokens: where text hides those, the strings would never be found in it."""
    own = text.stop_strings if request.stops_of_model and not params.ignore_eos else ()
    stop = tuple(dict.fromkeys((*params.stop, *own)))
    tokens = text.stop_tokens(stop) if request.skip_special_tokens else ()
    return replace(params, stop=stop, stop_token_ids=tuple(dict.fromkeys((*params.stop_token_ids, *tokens))))


@dataclass(slots=True)
class _Life:
    """One request on its way."""

    model: ServedModel
    request: GenerationRequest
    params: ValidatedRequest
    limits: Limits
    text: TextView
    clock: Callable[[], float]
    draw_seed: Callable[[], int]
    held: Held | None = None

    @contextmanager
    def reserved(self) -> Iterator[tuple[Reservation, Registration | None, Callable[[], None]]]:
        """The request's place, registration and charge, for as long as the block runs."""
        request, params, record = self.request, self.params, self.request.record
        account = request.caller.account
        size = request.prompts.size(self.text, self.limits)
        prompts = len(request.prompts)
        record.public_id, record.rows = request.id, params.n * prompts
        register: AbstractContextManager[Registration | None] = (
            nullcontext() if request.register is None else request.register()
        )
        with (
            register as registration,
            account.serve(record, rows=record.rows, tokens=size, clock=self.clock, prompts=prompts) as charge,
            self.model.engine.reserve(
                rows=record.rows,
                prompt_tokens=size * params.n,
                completion_tokens=params.completion_limit,
                least_tokens=params.least_tokens,
                kind=request.kind,
                tag=request.id,
                arrival=request.arrival,
                prompts=prompts,
            ) as reservation,
        ):
            try:
                yield reservation, registration, charge
            finally:
                if self.held is not None:
                    self.held.release()

    async def start_in_time(
        self, reservation: Reservation, registration: Registration | None, charge: Callable[[], None]
    ) -> Choices:
        """Return what `start` does. Raises Busy where the request's own timeout is over before."""
        if self.params.timeout_s is None:
            return await self.start(reservation, registration, charge)
        try:
            async with asyncio.timeout(self._left_s(self.params.timeout_s)):
                return await self.start(reservation, registration, charge)
        except TimeoutError:
            for _ in range(self.request.record.rows):
                self.model.engine.gate.refuse(Refusal.WAIT_OVER)
            raise Busy(
                f"the server is busy: the answer could not begin within the request's timeout of "
                f"{self.params.timeout_s:g} s"
            ) from None

    def expire_in_time(self, choices: Choices) -> asyncio.TimerHandle | None:
        """Arrange the end of all choices when the request's own timeout is over; None without one."""
        if self.params.timeout_s is None:
            return None
        return asyncio.get_running_loop().call_later(self._left_s(self.params.timeout_s), choices.expire)

    def _left_s(self, timeout_s: float) -> float:
        return max(0.0, timeout_s - (self.clock() - self.request.record.started))

    async def start(
        self, reservation: Reservation, registration: Registration | None, charge: Callable[[], None]
    ) -> Choices:
        """Tokenize and submit; returns once the scheduler has admitted the first sequence."""
        record = self.request.record
        submits, reader = await (self._submits() if registration is None else registration.preparing(self._submits))
        reservation.resize(
            prompt_tokens=record.prompt_tokens * self.params.n,
            completion_tokens=sum(submit.max_tokens for submit in submits),
        )
        if registration is not None and registration.aborted:
            raise RequestCancelled("the request was aborted")
        generations = reservation.submit(submits)
        if registration is not None:
            registration.hold(reservation)
        choices = self._choices(generations, reader)
        try:
            await generations[0].admitted()
        finally:
            record.ran = any(generation.runs for generation in generations)
        record.wait_s = generations[0].wait_s
        return Choices(choices, self.params, reservation, record, charge)

    async def _submits(self) -> tuple[list[Submit], ReaderSetup | None]:
        request, limits = self.request, self.limits
        caller = request.caller
        prompts = await request.prompts.tokenize(self.model.texts.pool, self.params, limits, caller.tenant)
        salt = request.salts.salt(caller.tenant_digest, self.params.cache_salt)
        param = request.prompts.param
        ids, prepared = prompts.ids, prompts.prepared
        self.held = prompts.held
        submits = build_submits(
            self.params, ids, limits, self.draw_seed, param, salt=salt, prepared=prepared, images=prompts.images
        )
        request.record.prompt_tokens = sum(map(len, ids))
        return submits, prepared.reader

    def _choices(self, generations: Sequence[Generation], reader: ReaderSetup | None) -> list[Choice]:
        request, params = self.request, self.params
        stops = StopSet(params.stop)
        text_needed = request.text or bool(params.stop)
        return [
            Choice(
                i,
                generation,
                self._text_stream(stops, reader) if text_needed else None,
                request.record,
                self.clock,
                text_logprobs=request.text,
                abortable=request.register is not None,
            )
            for i, generation in enumerate(generations)
        ]

    def _text_stream(self, stops: StopSet, reader: ReaderSetup | None) -> TextStream:
        skip, min_tokens = self.request.skip_special_tokens, self.params.min_tokens
        if reader is None or not self.request.text:
            return TextStream(self.text, stops, skip_special_tokens=skip, min_tokens=min_tokens)
        logprobs = self.params.logprobs is not None
        return AnswerStream(
            self.text, reader, stops, skip_special_tokens=skip, min_tokens=min_tokens, logprobs=logprobs
        )
