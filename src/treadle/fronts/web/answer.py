"""Routes that generate, of every dialect: from a request's body to the last byte of its answer.

`generation.life` holds the order of a request's life; here its body is read and parsed before, and its answer written
after. The client may leave at any point: its request is cancelled then.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.types import Receive, Scope, Send

from ...config import Settings
from ...core.messages import CancelReason
from ...core.refusals import Refusal
from ...core.virtual_queue import Arrival
from ...errors import EngineUnavailable, InsufficientScope, RateLimited, ReaderStalled, TreadleError
from ...telemetry.access_log import AccessLogWriter, RequestRecord
from ...text import TextView
from ..authentication import Authenticator, Caller
from ..generation.choice import Choice, together
from ..generation.life import Choices, begin
from ..generation.pieces import Usage, WholeChoice
from ..generation.request import GenerationRequest
from ..live_requests import LiveRequests
from ..media.service import RequestImages
from ..served_models import Models, ServedModel
from ..service_tiers import tier_of
from ..size_limits import TRANSPORT_BYTES, body_bytes
from ..strict_json import is_small, parse_json
from ..tenants import web_arrival
from .access_log import record_error, record_of
from .body import BODIES_BYTES, Body, BodyBudget, read_body
from .body_jobs import BodyPrompts, read_in_worker
from .errors import internal_error, send_error, send_json
from .guard import caller_of
from .parsed import Head, ParsedRequest, Shape, StreamWriter
from .sse import EventStream, while_connected

log = logging.getLogger(__name__)

WRITE_ASIDE_ENTRIES = 2000


@dataclass(frozen=True)
class RouteContext:
    """Shared state of the routes: models, settings, callers and bodies. `fingerprint` returns a model's
    `system_fingerprint`; `live` are the requests that can be cancelled by their ids, `lines` the access log."""

    models: Models
    settings: Settings
    fingerprint: Callable[[ServedModel], str]
    authenticator: Authenticator
    clock: Callable[[], float] = time.monotonic
    now: Callable[[], float] = time.time
    new_id: Callable[[], str] = lambda: secrets.token_hex(16)
    bodies: BodyBudget = field(default_factory=lambda: BodyBudget(BODIES_BYTES))
    live: LiveRequests = field(default_factory=lambda: LiveRequests(time.monotonic))
    lines: AccessLogWriter = field(default_factory=AccessLogWriter)

    def arrival_of(self, scope: Scope) -> Arrival:
        """Return the tenant of a request, and the marks by which its client is recognised when it returns."""
        return web_arrival(scope, caller_of(scope).tenant)

    def images_for(self, caller: Caller, cache_salt: str | None = None) -> RequestImages | None:
        """Return what prepares a request's images; None where none are read."""
        salt = self.authenticator.salts.salt(caller.tenant_digest, cache_salt)
        return self.models.default.images_for(caller.tenant, salt)

    def body_bytes(self) -> int:
        """Return the most bytes of a body: the setting, or what the longest prompt of the context can need."""
        if self.settings.max_body_bytes is not None:
            return self.settings.max_body_bytes
        model = self.models.default
        try:
            limits = model.limits()
            return body_bytes(model.text(), limits.context, images=not limits.no_images)
        except EngineUnavailable:
            return TRANSPORT_BYTES  # the request will be refused


async def with_body(
    server: RouteContext,
    scope: Scope,
    receive: Receive,
    send: Send,
    answer: Callable[[Body], Coroutine[Any, Any, None]],
) -> None:
    """Read a request's body, and run `answer` with it until it ends or the client leaves. A refusal by a limit or the
    scope of the API key is counted and sent; other errors are raised."""
    try:
        with Body(server.bodies, caller_of(scope).tenant) as body:
            await read_body(receive, scope["headers"], body, limit=server.body_bytes())
            await while_connected(receive, answer(body))
    except (RateLimited, InsufficientScope) as error:
        server.authenticator.refused(Refusal(error.code))
        record_error(scope, error.code)
        await send_error(send, error, scope)


class Answer:
    """The ASGI application of one route. `shape` parses its requests."""

    def __init__(self, server: RouteContext, shape: Shape) -> None:
        self._server = server
        self._shape = shape

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await with_body(
            self._server, scope, receive, send, lambda body: self._answer(body, scope, send, record_of(scope))
        )

    async def _answer(self, body: Body, scope: Scope, send: Send, record: RequestRecord) -> None:
        parsed = await self._parse(body.data, caller_of(scope).tenant)
        await self.respond(parsed, body, scope, send, record)

    @property
    def models(self) -> Models:
        return self._server.models

    def now(self) -> float:
        """Return the time of the clock that limits of API keys are counted by."""
        return self._server.authenticator.clock()

    @property
    def settings(self) -> Settings:
        return self._server.settings

    def images_for(self, caller: Caller) -> RequestImages | None:
        """Return what prepares the images of a request without a `cache_salt`; None where none are read."""
        return self._server.images_for(caller)

    @property
    def clock(self) -> Callable[[], float]:
        return self._server.clock

    async def respond(self, parsed: ParsedRequest, body: Body, scope: Scope, send: Send, record: RequestRecord) -> None:
        """Admit the request and write its answer. A dialect whose requests may need no generation overrides it."""
        model = parsed.served_by(self.models)
        await self.generate(parsed, model, self.request(parsed, body, scope, record), scope, send)

    async def generate(
        self, parsed: ParsedRequest, model: ServedModel, request: GenerationRequest, scope: Scope, send: Send
    ) -> None:
        """Admit a request and write its answer."""
        head = self.head(parsed, request, model)
        async with begin(model, request, clock=self.clock) as choices:
            writer = _AnswerWriter(self._server, parsed, choices, head, model.text(), request.record)
            await writer.write(scope, send)

    def head(self, parsed: ParsedRequest, request: GenerationRequest, model: ServedModel) -> Head:
        """Return the fields of the answer to a request, which is created now."""
        server = self._server
        tier = None if parsed.service_tier is None else tier_of(parsed.params.priority or 0)
        created, cached = int(server.now()), _caches_prompts(model)
        return Head(request.id, created, model.name, server.fingerprint(model), request.record, tier, cached)

    def request(self, parsed: ParsedRequest, body: Body, scope: Scope, record: RequestRecord) -> GenerationRequest:
        """Return the request as `begin` takes it."""
        server, caller = self._server, caller_of(scope)
        public_id = parsed.id_prefix + server.new_id()
        parsed.apply_tier(caller)
        return GenerationRequest(
            kind=parsed.kind,
            id=public_id,
            prompts=BodyPrompts(parsed, body, partial(server.images_for, caller)),
            check=parsed.check_against,
            caller=caller,
            arrival=server.arrival_of(scope),
            salts=server.authenticator.salts,
            record=record,
            stops_of_model=parsed.stops_of_model,
            skip_special_tokens=parsed.skip_special_tokens,
            spellings=parsed.spellings,
            register=partial(server.live.shared, (public_id, record.id), caller.tenant_digest),
        )

    async def _parse(self, body: bytes, tenant: str) -> ParsedRequest:
        """Parse a small body here, a large one in a text worker, under the limits of the default model."""
        if is_small(body):
            return self._shape(parse_json(body))
        model = self._server.models.default
        return await read_in_worker(model.texts.pool, self._shape.kind, body, model.limits(), tenant)


@dataclass
class _AnswerWriter:
    """Writer of the answer to one request."""

    server: RouteContext
    request: ParsedRequest
    choices: Choices
    head: Head
    text: TextView
    record: RequestRecord

    async def write(self, scope: Scope, send: Send) -> None:
        if self.request.stream:
            await self._stream(scope, send)
        else:
            await self._whole(send)

    # Whole answers -----------------------------------------------------------------------------------------------

    async def _whole(self, send: Send) -> None:
        wholes = [WholeChoice() for _ in self.choices]
        await together(_collect(choice, whole) for choice, whole in zip(self.choices, wholes, strict=True))
        body = await self._json(wholes, self.choices.usage)
        self.choices.settle()  # the headers tell what the key has left
        await send_json(send, 200, body)

    async def _json(self, wholes: Sequence[WholeChoice], usage: Usage) -> bytes:
        entries = sum(len(whole.entries) + len(whole.prompt_logprobs) for whole in wholes)
        return await self._encoded(entries, self.request.whole, self.head, wholes, usage, self.text)

    async def _encoded(self, entries: int, encode: Callable[..., bytes], *parts: Any) -> bytes:
        """`encode(*parts)`, on a thread where there are many log-probabilities: the event loop has others to serve."""
        if entries * (1 + (self.choices.params.logprobs or 0)) < WRITE_ASIDE_ENTRIES:
            return encode(*parts)
        return await asyncio.to_thread(encode, *parts)

    # Streams -----------------------------------------------------------------------------------------------------

    async def _stream(self, scope: Scope, send: Send) -> None:
        settings = self.server.settings
        stream = EventStream(
            scope,
            send,
            keepalive_s=settings.keepalive_s,
            stall_s=settings.stall_s,
            on_stall=self._stalled,
            framing=self.request.framing,
        )
        writer = self.request.stream_writer(self.head, self.text)
        try:
            async with stream.open():
                if begin := writer.start(self.choices.usage):
                    await stream.write(begin)
                await together(self._forward(choice, stream, writer) for choice in self.choices)
                last = writer.end(self.choices.usage)
            await stream.end(last)
        except TreadleError as error:
            if stream.dropped:
                raise
            self.record.error = error.code
            await stream.end(writer.error(error, self.choices.usage))
        except Exception:
            log.exception("%s failed in its stream", self.head.id)
            await stream.end(writer.error(internal_error(), self.choices.usage))

    def _stalled(self) -> None:
        self.record.error = ReaderStalled.code
        self.choices.cancel(CancelReason.STALLED)

    async def _forward(self, choice: Choice, stream: EventStream, writer: StreamWriter) -> None:
        index, begun = choice.index, False
        async for piece in choice.pieces():
            first = b"" if begun else await self._encoded(len(piece.prompt_logprobs), writer.first, index, piece)
            begun = True
            if events := first + writer.piece(index, piece):
                await stream.write(events)


def _caches_prompts(model: ServedModel) -> bool:
    """Whether prompts are added to the prefix cache from their first token to their last. A backend that adds snapshots
    of whole sequences instead reports no blocks."""
    capabilities = model.engine.capabilities
    return capabilities is not None and capabilities.steps.prefix_cache and capabilities.kv.prefix_block > 0


async def _collect(choice: Choice, whole: WholeChoice) -> None:
    async for piece in choice.pieces():
        whole.add(piece)
