"""The Generate call of both wires: from its message to the last one of its answer.

`generation.life` holds the order of a request's life. Nothing is sent before the scheduler has admitted the request:
what is refused before the first message can be tried again on another worker, what is refused after it can't.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc

from ...config import Settings
from ...core.messages import CancelReason
from ...core.refusals import Refusal
from ...core.virtual_queue import Arrival
from ...errors import EngineUnavailable, RateLimited, ReaderStalled, RequestCancelled, TreadleError
from ...telemetry.access_log import GRPC, AccessLogWriter, RequestRecord
from ...telemetry.metrics import Metrics
from ..authentication import Authenticator
from ..generation.choice import Choice, together
from ..generation.embedding import EmbeddingRequest, Embeddings, embed
from ..generation.embedding_inputs import ListedInputs
from ..generation.life import Choices, begin
from ..generation.pieces import WholeChoice
from ..generation.request import GenerationRequest
from ..live_requests import MAX_REQUEST_ID_CHARS, LiveRequests
from ..served_models import ServedModel
from ..size_limits import message_bytes
from ..tenants import call_arrival
from ..validate import too_long
from .context import Context, client_of, refuse
from .guard import caller_of
from .request import RpcRequest, check_answer_bytes, check_request_id
from .writer import MessageWriter

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServiceContext:
    """Shared state of both wires' calls: the model, settings, live calls, metrics and the access log."""

    model: ServedModel
    settings: Settings
    calls: LiveRequests
    metrics: Metrics
    clock: Callable[[], float]
    authenticator: Authenticator
    lines: AccessLogWriter

    async def generate(
        self, context: Context, service: str, message: Any, parse: Callable[[Any], RpcRequest], writer: MessageWriter
    ) -> None:
        """Answer one Generate call. `parse` reads its message, or raises the message's fault."""

        async def answer(record: RequestRecord, arrival: Arrival) -> None:
            await self._answer(context, record, parse(message), writer, arrival)

        await self._serve(context, service, "Generate", message, _raw(message), answer)

    async def embed(self, context: Context, service: str, message: Any) -> Embeddings:
        """Answer one Embed call: the vector of its tokens."""
        found: list[Embeddings] = []

        async def answer(record: RequestRecord, arrival: Arrival) -> None:
            check_request_id(message.request_id)
            request = EmbeddingRequest(
                kind="grpc",
                id=message.request_id,
                inputs=ListedInputs([tuple(message.tokenized.input_ids)]),
                caller=caller_of(),
                arrival=arrival,
                salts=self.authenticator.salts,
                record=record,
                register=partial(self.calls.exclusive, message.request_id, caller_of().tenant_digest),
            )
            record.public_id = message.request_id
            found.append(await embed(self.model, request, clock=self.clock))

        await self._serve(context, service, "Embed", message, message.tokenized.SerializeToString(), answer)
        return found[0]

    async def _serve(
        self,
        context: Context,
        service: str,
        method: str,
        message: Any,
        raw: bytes,
        answer: Callable[[RequestRecord, Arrival], Coroutine[Any, Any, None]],
    ) -> None:
        """Answer one call by `answer`, and record it. A refusal ends the call. `raw` are the bytes of its prompt, by
        which a request that is sent again is recognised."""
        record = RequestRecord(
            id=message.request_id[:MAX_REQUEST_ID_CHARS],
            method=GRPC,
            path=f"/{service}/{method}",
            started=self.clock(),
            client=client_of(context),
            key=caller_of().name,
        )
        error: TreadleError | None = None
        code = "OK"
        try:
            caller_of().account.check(self.clock())
            self._check_length(message)
            arrival = call_arrival(caller_of().tenant, context.invocation_metadata(), message.request_id, raw)
            self.model.engine.check_room(arrival)
            await answer(record, arrival)
            record.status = 200
        except TreadleError as failure:
            error = failure
            if isinstance(failure, RateLimited):
                self.authenticator.refused(Refusal.RATE_LIMITED)
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
        """The longest message in bytes that may fit the model's context, and the settings' limit."""
        try:
            text = self.model.text()
        except EngineUnavailable:
            fits = message_bytes(self.settings.context)
        else:
            limits = self.model.limits()
            images = text.images is not None and not limits.no_images
            if images and self.settings.max_body_bytes:
                return self.settings.max_body_bytes
            fits = message_bytes(limits.context, text.longest_token, images=images)
        return min(fits, self.settings.max_body_bytes or fits)

    def _check_length(self, message: Any) -> None:
        """Refuse ids that can't fit before one of them is looked at. Raises ContextLengthExceeded."""
        count = len(message.tokenized.input_ids)
        limits = self.model.limits()
        if count > limits.context:
            raise too_long(count, limits, "input")

    async def _answer(
        self, context: Context, record: RequestRecord, request: RpcRequest, writer: MessageWriter, arrival: Arrival
    ) -> None:
        record.public_id = request.request_id
        answer = _Answer(context, writer, request, record, self.settings.stall_s)
        begun = False
        try:
            async with begin(self.model, self._generation(request, record, arrival), clock=self.clock) as choices:
                begun = True
                await answer.write(choices)
        except RequestCancelled:
            if begun:
                raise
            await answer.aborted()

    def _generation(self, request: RpcRequest, record: RequestRecord, arrival: Arrival) -> GenerationRequest:
        caller = caller_of()
        salt = self.authenticator.salts.salt(caller.tenant_digest, request.params.cache_salt)
        images = self.model.images_for(caller.tenant, salt) if request.media else None
        return GenerationRequest(
            kind="grpc",
            id=request.request_id,
            prompts=request.prompts(images),
            check=request.check,
            caller=caller,
            arrival=arrival,
            salts=self.authenticator.salts,
            record=record,
            text=False,
            skip_special_tokens=request.skip_special_tokens,
            register=partial(self.calls.exclusive, request.request_id, caller.tenant_digest),
        )


@dataclass
class _Answer:
    """The answer to one call."""

    context: Context
    writer: MessageWriter
    request: RpcRequest
    record: RequestRecord
    stall_s: float
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def write(self, choices: Choices) -> None:
        await together(self._forward(choices, choice) for choice in choices)

    async def aborted(self) -> None:
        """Send the ends of a request that was aborted before it ran."""
        for index in range(self.request.params.n or 1):
            await self._send(self.writer.aborted(index, self.record.prompt_tokens))

    async def _forward(self, choices: Choices, choice: Choice) -> None:
        whole = WholeChoice()
        async for piece in choice.pieces():
            if not self.request.stream:
                whole.add(piece)
                check_answer_bytes(whole.tokens, whole.prompt_logprobs, choices.params)
            elif piece.tokens:
                await self._send_or_cancel(choices, self.writer.chunk(choice, piece))
            if piece.finish_reason:
                await self._send_or_cancel(choices, self.writer.complete(choice, piece, whole))

    async def _send_or_cancel(self, choices: Choices, message: Any) -> None:
        """Send one message. Cancel the request of a reader that stalls, to free its slot."""
        try:
            await self._send(message)
        except ReaderStalled:
            choices.cancel(CancelReason.STALLED)
            raise

    async def _send(self, message: Any) -> None:
        """Write one message. Raises ReaderStalled, and RequestCancelled where the client has left and the call's
        cancellation is still on its way."""
        try:
            async with self.writing, asyncio.timeout(self.stall_s):
                await self.context.write(message)
        except TimeoutError:
            raise ReaderStalled(f"the client has not read for {self.stall_s:g} s") from None
        except grpc.aio.InternalError as error:
            raise RequestCancelled("the client has left") from error


def _raw(message: Any) -> bytes:
    """The bytes of a message's prompt, by which a request that is sent again is recognised."""
    prompt = message.text.encode("utf-8", "surrogatepass") if message.HasField("text") else None
    raw: bytes = message.tokenized.SerializeToString() if prompt is None else prompt
    return raw
