"""A generation request from its body to its last byte, for both OpenAI routes.

The order is the contract: read, check what is cheap, reserve a place (or be refused), tokenize, check lengths, correct
the reservation, submit, wait until the scheduler has admitted it, and only then send headers. The client may leave at
any point; everything of its request is taken back then.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Receive, Scope, Send

from ....config import Settings
from ....core.messages import CancelReason
from ....core.refusals import Refusal
from ....core.virtual_queue import Arrival
from ....engine.client import EngineClient
from ....engine.reservation import Reservation
from ....errors import EngineUnavailable, InsufficientScope, ModelNotFound, RateLimited, ReaderStalled, TreadleError
from ....telemetry.access import RequestRecord
from ....text import StopSet, TextStream, TextView
from ...authentication import Authenticator
from ...rows import Piece, Row, together
from ...size_limits import UNKNOWN_MESSAGE_BYTES, body_bytes
from ...strict_json import is_small, parse_json
from ...tenants import web_arrival
from ...text import Texts, limits_of, with_stops
from ...text_jobs import Shape, read_aside, tokenize
from ...validate import Limits, ValidatedRequest, build_submits, check_size
from ..access import note_error, record_of
from ..body import BODIES_BYTES, Body, BodyBudget, read_body
from ..errors import internal_error, send_error, send_json
from ..guard import caller_of
from ..sse import EventStream, while_connected
from .dialect import Ask
from .wire import Choice, ChunkWriter, Head, Usage

log = logging.getLogger(__name__)

WRITE_ASIDE_ENTRIES = 2000


@dataclass(frozen=True)
class Server:
    """What answering needs: the engine, the text model, the settings, and names."""

    engine: EngineClient
    texts: Texts
    settings: Settings
    model_names: tuple[str, ...]
    fingerprint: Callable[[], str]
    door: Authenticator
    clock: Callable[[], float] = time.monotonic
    now: Callable[[], float] = time.time
    draw_seed: Callable[[], int] = lambda: secrets.randbits(63)
    new_id: Callable[[], str] = lambda: secrets.token_hex(16)

    bodies: BodyBudget = field(default_factory=lambda: BodyBudget(BODIES_BYTES))

    def limits(self, model: TextView) -> Limits:
        return limits_of(model, self.engine.capabilities, self.settings.max_tokens)

    def arrival_of(self, scope: Scope) -> Arrival:
        """Who sent this request, for its share and for its place in line."""
        return web_arrival(scope, caller_of(scope).tenant)

    def body_bytes(self) -> int:
        """The longest body: as the settings say, else what a prompt that fits the context can need."""
        if self.settings.max_body_bytes is not None:
            return self.settings.max_body_bytes
        try:
            model = self.texts.model()
        except EngineUnavailable:
            return UNKNOWN_MESSAGE_BYTES  # the request will be refused
        return body_bytes(model, self.limits(model).context)

    def check_model(self, name: str | None) -> None:
        """Raises ModelNotFound for a model that is not served here."""
        if name is not None and name not in self.model_names:
            raise ModelNotFound(
                f"the model '{name[:80]}' is not served here: use '{self.model_names[0]}'", param="model"
            )


class Answer:
    """The ASGI application behind one generation route."""

    def __init__(self, server: Server, ask: Shape) -> None:
        self._server = server
        self._ask = ask

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        server = self._server
        try:
            with Body(server.bodies, caller_of(scope).tenant) as body:
                await read_body(receive, scope["headers"], body, limit=server.body_bytes())
                await while_connected(receive, self._answer(body, scope, send, record_of(scope)))
        except (RateLimited, InsufficientScope) as error:
            server.door.refused(Refusal(error.code))
            note_error(scope, error.code)
            await send_error(send, error)

    async def _answer(self, body: Body, scope: Scope, send: Send, record: RequestRecord) -> None:
        server = self._server
        ask = await self._asked(body.data, caller_of(scope).tenant)
        server.check_model(ask.model)
        model = server.texts.model()
        limits = server.limits(model)
        checked = ask.check_against(limits)
        caller_of(scope).check_priority(checked.priority)
        with ask.in_its_words():
            await self._admit(ask, body, checked, limits, model, scope, send, record)

    async def _admit(
        self,
        ask: Ask,
        body: Body,
        checked: ValidatedRequest,
        limits: Limits,
        model: TextView,
        scope: Scope,
        send: Send,
        record: RequestRecord,
    ) -> None:
        server, caller = self._server, caller_of(scope)
        checked = with_stops(checked, model, chat=ask.kind == "chat", hide_special=ask.skip_special_tokens)
        size = ask.size(model)
        check_size(size, ask.prompts, limits, ask.prompt_param)
        public_id = ask.id_prefix + server.new_id()
        record.public_id, record.rows = public_id, checked.n * ask.prompts
        with (
            caller.account.serve(record, rows=record.rows, tokens=size, clock=server.clock, prompts=ask.prompts),
            server.engine.reserve(
                rows=record.rows,
                prompt_tokens=size * checked.n,
                completion_tokens=checked.max_tokens,
                least_tokens=checked.least_tokens,
                kind=ask.kind,
                tag=public_id,
                arrival=server.arrival_of(scope),
                prompts=ask.prompts,
            ) as reservation,
        ):
            head = Head(public_id, int(server.now()), server.model_names[0], server.fingerprint())
            salt = server.door.salts.salt(caller.tenant_digest, checked.cache_salt)
            run = _Run(server, ask, body, caller.tenant, checked, limits, model, reservation, head, record, salt)
            await run.run(scope, send)

    async def _asked(self, body: bytes, tenant: str) -> Ask:
        if is_small(body):
            return self._ask(parse_json(body))
        server = self._server
        model = server.texts.model()
        return await read_aside(server.texts.pool, self._ask.kind, body, server.limits(model), tenant)


@dataclass
class _Run:
    """One request that has a place."""

    server: Server
    ask: Ask
    body: Body
    tenant: str
    checked: ValidatedRequest
    limits: Limits
    model: TextView
    reservation: Reservation
    head: Head
    record: RequestRecord
    salt: str

    async def run(self, scope: Scope, send: Send) -> None:
        rows = await self._begin()
        try:
            if self.ask.stream:
                await self._stream(rows, scope, send)
            else:
                await self._whole(rows, send)
        finally:
            self._note_usage(rows)

    async def _begin(self) -> list[Row]:
        """Tokenize, submit, and return once the scheduler has admitted the first sequence."""
        ask = self.ask
        prompts = await tokenize(self.server.texts.pool, ask, self.body.data, self.checked, self.limits, self.tenant)
        self.body.let_go()
        draw, param = self.server.draw_seed, ask.prompt_param
        requests = build_submits(self.checked, prompts, self.limits, draw, param, salt=self.salt)
        self.record.prompt_tokens = sum(map(len, prompts))
        self.reservation.resize(
            prompt_tokens=self.record.prompt_tokens * self.checked.n,
            completion_tokens=sum(request.max_tokens for request in requests),
        )
        generations = self.reservation.submit(requests)
        stops = StopSet(self.checked.stop)
        rows = [Row(generation, self._text(stops)) for generation in generations]
        try:
            await generations[0].admitted()
        finally:
            self.record.ran = any(generation.runs for generation in generations)
        self.record.wait_s = generations[0].wait_s
        return rows

    def _text(self, stops: StopSet) -> TextStream:
        return TextStream(
            self.model, stops, skip_special_tokens=self.ask.skip_special_tokens, min_tokens=self.checked.min_tokens
        )

    # Whole answers -----------------------------------------------------------------------------------------------

    async def _whole(self, rows: Sequence[Row], send: Send) -> None:
        choices = [Choice() for _ in rows]
        await together(self._collect(row, choice) for row, choice in zip(rows, choices, strict=True))
        await send_json(send, 200, await self._written(choices, self._usage(rows)))

    async def _written(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """The answer's JSON."""
        parts = (self.head, choices, usage, self.model)
        entries = sum(len(choice.entries) + len(choice.prompt_logprobs) for choice in choices)
        return await self._write(entries, self.ask.whole, *parts)

    async def _write(self, entries: int, write: Callable[..., bytes], *parts: Any) -> bytes:
        """`write(*parts)`; many log-probabilities are written on a thread: the loop has others to serve."""
        if entries * (1 + (self.checked.logprobs or 0)) < WRITE_ASIDE_ENTRIES:
            return write(*parts)
        return await asyncio.to_thread(write, *parts)

    async def _collect(self, row: Row, choice: Choice) -> None:
        async for piece in row.pieces():
            self._note_first()
            choice.add(piece)

    # Streams -----------------------------------------------------------------------------------------------------

    async def _stream(self, rows: Sequence[Row], scope: Scope, send: Send) -> None:
        settings = self.server.settings
        stream = EventStream(
            scope, send, keepalive_s=settings.keepalive_s, stall_s=settings.stall_s, on_stall=self._stalled
        )
        writer = self.ask.chunks(self.head)
        try:
            async with stream.open():
                await together(self._forward(i, row, stream, writer) for i, row in enumerate(rows))
                last = writer.usage(self._usage(rows)) if self.ask.include_usage else b""
            await stream.done(last)
        except ReaderStalled:
            raise
        except TreadleError as error:
            self.record.error = error.code
            await stream.fail(error)
        except Exception:
            log.exception("%s failed in its stream", self.head.id)
            await stream.fail(internal_error())

    def _stalled(self) -> None:
        self.record.error = ReaderStalled.code
        self.reservation.cancel(CancelReason.STALLED)

    async def _forward(self, index: int, row: Row, stream: EventStream, writer: ChunkWriter) -> None:
        begun = False
        async for piece in row.pieces():
            self._note_first()
            events = self.ask.events(writer, index, piece, self.model)
            if not begun:
                events = await self._first_events(writer, index, piece) + events
                begun = True
            if events:
                await stream.write(events)

    async def _first_events(self, writer: ChunkWriter, index: int, piece: Piece) -> bytes:
        return await self._write(len(piece.prompt_logprobs), self.ask.first_events, writer, index, piece, self.model)

    # Books -------------------------------------------------------------------------------------------------------

    def _usage(self, rows: Sequence[Row]) -> Usage:
        return Usage(
            prompt_tokens=self.record.prompt_tokens,
            completion_tokens=sum(row.completion_tokens for row in rows),
            cached_tokens=self._cached_tokens(rows),
        )

    def _cached_tokens(self, rows: Sequence[Row]) -> int:
        """As prompt tokens are counted: of each prompt once, as its first choice found it."""
        return sum(row.cached_tokens for row in rows[:: self.checked.n])

    def _note_first(self) -> None:
        if self.record.ttft_s is None:
            self.record.ttft_s = self.server.clock() - self.record.started

    def _note_usage(self, rows: Sequence[Row]) -> None:
        """Tokens that the client left unread were generated for it too."""
        self.record.completion_tokens = sum(row.generated_tokens for row in rows)
        self.record.cached_tokens = self._cached_tokens(rows)
