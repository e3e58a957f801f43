"""A generation request from its message to its last one, for both wires.

The order is HTTP's: check the key's limits and what is cheap, reserve a place (or be refused), tokenize, check lengths,
submit, wait until the scheduler has admitted it, and only then send anything: what is refused before the first message
can be tried again elsewhere, what is refused after it can't.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from ...config import Settings
from ...core.messages import CancelReason
from ...core.refusals import Refusal
from ...core.virtual_queue import Arrival
from ...engine.client import EngineClient
from ...engine.generation import Generation
from ...engine.reservation import Reservation
from ...errors import (
    EngineUnavailable,
    InvalidRequest,
    RateLimited,
    ReaderStalled,
    RequestCancelled,
    TreadleError,
)
from ...telemetry.access import GRPC, AccessLines, RequestRecord
from ...telemetry.metrics import Metrics
from ...text import StopSet, TextStream, TextView
from ..authentication import Authenticator, Caller
from ..rows import together
from ..size_limits import message_bytes
from ..tenants import call_arrival
from ..text import Texts, limits_of, with_stops
from ..text_jobs import tokenize_alone
from ..validate import (
    Limits,
    ValidatedRequest,
    build_submits,
    check,
    check_prompt_ids,
    check_size,
    completion_budget,
    too_long,
)
from .ask import MAX_REQUEST_ID_CHARS, Ask
from .context import Context, client_of, refuse
from .guard import caller_of
from .live_calls import Call, LiveCalls
from .sequence import ABORT, Choice, Part
from .sequence import Sequence as Row
from .writer import MessageWriter

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 4 * 1024 * 1024 - 64 * 1024


@dataclass(frozen=True)
class Worker:
    """What both wires answer with: the engine, the text model, the settings, the live calls, and who counts
    and logs them."""

    engine: EngineClient
    texts: Texts
    settings: Settings
    calls: LiveCalls
    metrics: Metrics
    clock: Callable[[], float]
    door: Authenticator
    lines: AccessLines
    draw_seed: Callable[[], int] = lambda: secrets.randbits(63)

    async def generate(
        self, context: Context, service: str, request: Any, read: Callable[[Any], Ask], writer: MessageWriter
    ) -> None:
        """Answer one Generate call. `read` makes an Ask of the message, or raises what is wrong with it."""
        record = RequestRecord(
            id=request.request_id[:MAX_REQUEST_ID_CHARS],
            method=GRPC,
            path=f"/{service}/Generate",
            started=self.clock(),
            client=client_of(context),
            key=caller_of().name,
        )
        error: TreadleError | None = None
        code = "OK"
        try:
            caller_of().account.check(self.clock())
            self._check_length(request)
            arrival = call_arrival(caller_of().tenant, context.invocation_metadata(), request.request_id, _raw(request))
            self.engine.check_room(arrival)
            await self._generate(context, record, read(request), writer, arrival)
            record.status = 200
        except TreadleError as failure:
            error = failure
            if isinstance(failure, RateLimited):
                self.door.refused(Refusal.RATE_LIMITED)
        except asyncio.CancelledError:
            record.status, code = RequestCancelled.http_status, RequestCancelled.grpc_status
            raise
        except Exception:
            log.exception("%s failed", record.path)
            error = TreadleError("the server failed on this request; its log says how")
        finally:
            if error is not None:
                record.status, record.error, code = error.http_status, error.code, error.grpc_status
            now = self.clock()
            self.metrics.rpc(service.partition(".")[0], code, now - record.started)
            self.lines.write(record, now)
        if error is not None:
            await refuse(context, error)

    def message_bytes(self) -> int:
        """The longest message that may fit the model's context, and the settings' limit."""
        try:
            model = self.texts.model()
        except EngineUnavailable:
            fits = message_bytes(self.settings.context)
        else:
            limits = limits_of(model, self.engine.capabilities, self.settings.max_tokens)
            fits = message_bytes(limits.context, model.longest_token)
        return min(fits, self.settings.max_body_bytes or fits)

    def _check_length(self, request: Any) -> None:
        """Refuse ids that can't fit before one of them is looked at. Raises ContextLengthExceeded."""
        count = len(request.tokenized.input_ids)
        limits = limits_of(self.texts.model(), self.engine.capabilities, self.settings.max_tokens)
        if count > limits.context:
            raise too_long(count, limits, "input")

    async def _generate(
        self, context: Context, record: RequestRecord, ask: Ask, writer: MessageWriter, arrival: Arrival
    ) -> None:
        record.public_id = ask.request_id
        caller = caller_of()
        model = self.texts.model()
        limits = limits_of(model, self.engine.capabilities, self.settings.max_tokens)
        checked = with_stops(check(ask.wanted, limits), model, chat=False, hide_special=ask.skip_special_tokens)
        size = _size(ask, model, limits)
        with (
            self.calls.live(ask.request_id, caller.tenant_digest) as call,
            caller.account.serve(record, rows=checked.n, tokens=size, clock=self.clock),
            self.engine.reserve(
                rows=checked.n,
                prompt_tokens=size * checked.n,
                completion_tokens=ask.max_tokens,
                least_tokens=checked.least_tokens,
                kind="grpc",
                tag=ask.request_id,
                arrival=arrival,
            ) as reservation,
        ):
            run = _Run(self, ask, checked, limits, model, reservation, call, record, caller)
            await run.answer(context, writer)


@dataclass
class _Run:
    """One request that has a place."""

    worker: Worker
    ask: Ask
    checked: ValidatedRequest
    limits: Limits
    model: TextView
    reservation: Reservation
    call: Call
    record: RequestRecord
    caller: Caller
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def answer(self, context: Context, writer: MessageWriter) -> None:
        try:
            generations = await self._begin()
        except RequestCancelled:
            await self._aborted(context, writer)
            return
        choices = [
            Choice(i, self.record.prompt_tokens, prompt=generation.request.prompt)
            for i, generation in enumerate(generations)
        ]
        try:
            await together(
                self._forward(context, writer, generation, choice)
                for generation, choice in zip(generations, choices, strict=True)
            )
        finally:
            used = (
                choice.completion_tokens if choice.ended else generation.completion_tokens  # some were not read
                for generation, choice in zip(generations, choices, strict=True)
            )
            self.record.completion_tokens = sum(used)
            self.record.cached_tokens = choices[0].cached_tokens

    async def _begin(self) -> list[Generation]:
        """Tokenize, submit, and return once the scheduler has admitted the first choice."""
        prompt = await self._prompt()
        checked = self._within(prompt)
        self.record.rows, self.record.prompt_tokens = checked.n, len(prompt)
        salt = self.worker.door.salts.salt(self.caller.tenant_digest)
        requests = build_submits(checked, [prompt], self.limits, self.worker.draw_seed, "input", salt=salt)
        self.reservation.resize(
            prompt_tokens=len(prompt) * checked.n,
            completion_tokens=sum(request.max_tokens for request in requests),
        )
        if self.call.aborted:
            raise RequestCancelled("the request was aborted")
        generations = self.reservation.submit(requests)
        self.call.hold(self.reservation)
        try:
            await generations[0].admitted()
        finally:
            self.record.ran = any(generation.runs for generation in generations)
        self.record.wait_s = generations[0].wait_s
        return generations

    async def _prompt(self) -> Sequence[int]:
        prompt, pool = self.ask.prompt, self.worker.texts.pool
        if isinstance(prompt, str):
            return await tokenize_alone(pool, prompt, self.checked, self.limits, self.caller.tenant)
        return prompt

    def _within(self, prompt: Sequence[int]) -> ValidatedRequest:
        """With as many tokens as were asked for, or as are left."""
        scores = self.checked.prompt_logprobs
        if scores is not None and _bytes_of(len(prompt), scores) > MAX_MESSAGE_BYTES:
            raise InvalidRequest(
                f"the prompt has {len(prompt)} tokens, whose log-probabilities do not fit one message of 4 MiB: ask "
                "for fewer, or send a shorter prompt",
                param="prompt_logprobs",
            )
        left = completion_budget(self.checked, len(prompt), self.limits, "input")
        most = left if self.ask.max_tokens is None else min(self.ask.max_tokens, left)
        if self.checked.min_tokens > most:
            raise InvalidRequest(
                f"min_tokens is {self.checked.min_tokens} and the answer has at most {most} tokens: ask for fewer",
                param="min_tokens",
            )
        return dataclasses.replace(self.checked, max_tokens=most)

    async def _aborted(self, context: Context, writer: MessageWriter) -> None:
        """It was taken back before it ran: each choice still gets its end."""
        for i in range(self.checked.n):
            await self._send(context, writer.complete(Choice(i, self.record.prompt_tokens), Part(finish_reason=ABORT)))

    async def _forward(self, context: Context, writer: MessageWriter, generation: Generation, choice: Choice) -> None:
        async for part in Row(generation, self._text()).parts():
            choice.count(part)
            choice.cached_tokens = generation.cached_tokens
            if self.record.ttft_s is None and part.tokens:
                self.record.ttft_s = self.worker.clock() - self.record.started
            if not self.ask.stream:
                self._keep(choice, part)
            elif part.tokens:
                await self._send(context, writer.chunk(choice, part))
            if part.finish_reason:
                await self._send(context, writer.complete(choice, part))

    def _text(self) -> TextStream | None:
        if not self.checked.stop:
            return None
        return TextStream(
            self.model,
            StopSet(self.checked.stop),
            skip_special_tokens=self.ask.skip_special_tokens,
            min_tokens=self.checked.min_tokens,
        )

    def _keep(self, choice: Choice, part: Part) -> None:
        choice.keep(part)
        size = _bytes_of(len(choice.tokens), self.checked.logprobs)
        if size + _bytes_of(len(choice.prompt_logprobs), self.checked.prompt_logprobs) > MAX_MESSAGE_BYTES:
            raise InvalidRequest(
                f"the answer has {len(choice.tokens)} tokens, which with their log-probabilities do not fit one "
                "message of 4 MiB: stream it, or ask for fewer tokens or log-probabilities",
                param="logprobs",
            )

    async def _send(self, context: Context, message: Any) -> None:
        """Write one message. A reader that stalls loses its request: its place is for those who read. Raises
        RequestCancelled where the call has gone and its cancellation is still on the way."""
        stall_s = self.worker.settings.stall_s
        try:
            async with self.writing, asyncio.timeout(stall_s):
                await context.write(message)
        except TimeoutError:
            self.reservation.cancel(CancelReason.STALLED)
            raise ReaderStalled(f"the client has not read for {stall_s:g} s") from None
        except grpc.aio.InternalError as error:
            raise RequestCancelled("the client has left") from error


def _raw(request: Any) -> bytes:
    """A message's prompt, to know it by."""
    prompt = request.text.encode("utf-8", "surrogatepass") if request.HasField("text") else None
    raw: bytes = request.tokenized.SerializeToString() if prompt is None else prompt
    return raw


def _bytes_of(tokens: int, logprobs: int | None) -> int:
    """At most so many bytes of a message are these tokens with that many log-probabilities each."""
    return tokens * (5 if logprobs is None else 5 + 12 + 10 * logprobs)


def _size(ask: Ask, model: TextView, limits: Limits) -> int:
    """About how many tokens the prompt has; exactly, where they came as ids. Raises InvalidRequest for bad ones."""
    if isinstance(ask.prompt, str):
        size = max(1, int(len(ask.prompt.encode("utf-8", "surrogatepass")) / model.bytes_per_token))
        check_size(size, 1, limits, "input")
        return size
    check_prompt_ids(ask.prompt, limits, "input")
    return len(ask.prompt)
