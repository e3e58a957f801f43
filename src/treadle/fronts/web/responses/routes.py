"""Routes of responses: the ones that generate, the one that counts, and those of stored responses."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import msgspec
from fastapi import APIRouter
from starlette.convertors import Convertor, register_url_convertor
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ....config import Settings
from ....errors import InvalidRequest
from ....telemetry.access_log import ENDED, QUEUED, RequestRecord
from ....text import TextView
from ...authentication import Caller
from ...generation.life import begin
from ...generation.prompts import Prompts
from ...generation.request import GenerationRequest
from ...prepared import PreparedPrompts
from ...served_models import ServedModel
from ...text_jobs import TextJobRunner
from ...validate import Limits, ValidatedRequest
from ..answer import Answer, RouteContext
from ..body import Body
from ..counting import CountAnswer
from ..errors import send_json
from ..guard import caller_of
from ..parsed import ParsedRequest
from ..sse import AsgiResponse, EventStream, while_connected
from .documents import LIST_QUERY, MAX_LISTED, RETRIEVE_QUERY
from .input_tokens import ParsedInputTokens
from .parsed import ParsedResponse
from .sessions import BackgroundRun, Sessions
from .store import ResponseNotFound, StoredResponse

LISTED = 20
PATH = "/v1/responses/{response_id:stored_response}"


class ResponseId(Convertor[str]):
    """Id of a response in a path: anything but the name of another route."""

    regex = "(?!(?:compact|input_tokens)(?:/|$))[^/]+"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("stored_response", ResponseId())


class ResponsesAnswer(Answer):
    """The ASGI application of a route that generates responses."""

    def __init__(self, server: RouteContext, shape: type[ParsedResponse], sessions: Sessions) -> None:
        super().__init__(server, shape)
        self._sessions = sessions

    async def respond(self, parsed: ParsedRequest, body: Body, scope: Scope, send: Send, record: RequestRecord) -> None:
        assert isinstance(parsed, ParsedResponse)
        model = self.models.get(parsed.model)
        request = self.request(parsed, body, scope, record)
        with self._sessions.begin(parsed, request.id, caller_of(scope).tenant_digest) as stored:
            if stored is not None and parsed.facts.background:
                await self._in_background(parsed, stored, model, request, scope, send)
            else:
                await self._connected(parsed, stored, model, request, scope, send)

    async def _connected(
        self,
        parsed: ParsedResponse,
        stored: StoredResponse | None,
        model: ServedModel,
        request: GenerationRequest,
        scope: Scope,
        send: Send,
    ) -> None:
        """Generate a response for a client that waits for it."""
        if stored is not None:
            stored.snapshot = parsed.stream_writer(self.head(parsed, request, model), model.text()).snapshot
        await self.generate(parsed, model, request, scope, send)

    async def _in_background(
        self,
        parsed: ParsedResponse,
        stored: StoredResponse,
        model: ServedModel,
        request: GenerationRequest,
        scope: Scope,
        send: Send,
    ) -> None:
        """Start a response that needs no connection, and answer once it can no longer be refused. The request and the
        response have a line each in the access log; the tokens are the latter's."""
        run, queued = self._sessions.run(parsed, stored), request.record
        record = dataclasses.replace(queued, background=ENDED)
        request = dataclasses.replace(request, record=record)
        try:
            writer = parsed.stream_writer(self.head(parsed, request, model), model.text())
            stored.snapshot = writer.snapshot

            def accept() -> None:
                writer.queued()
                run.accept()

            prompts = _AcceptedPrompts(request.prompts, accept)
            admitted = partial(begin, model, dataclasses.replace(request, prompts=prompts), clock=self.clock)
            work = self._run(run, run.work(admitted, writer), record)
            run.task = asyncio.create_task(work, name=f"treadle-{stored.id}")
            await run.queued
            queued.background = QUEUED
        except BaseException:
            await run.stop()
            self._sessions.finish(run)
            raise
        finally:
            queued.public_id, queued.rows, queued.prompt_tokens = record.public_id, record.rows, record.prompt_tokens
        if parsed.stream:
            await stream_events(scope, send, run.events(0), self.settings)
        else:
            await send_json(send, 200, stored.json())

    async def _run(self, run: BackgroundRun, work: Any, record: RequestRecord) -> None:
        try:
            await work
        finally:
            self._sessions.finish(run)
            if run.accepted:
                record.status = 200 if run.error is None else run.error.http_status
                record.error = "" if run.error is None else run.error.code
                self._server.lines.write(record, self.clock())


class InputTokensAnswer(CountAnswer):
    """The ASGI application of the route that counts the tokens of an input."""

    fields: ClassVar[Mapping[str, Any]] = {"object": "response.input_tokens"}

    def __init__(self, server: RouteContext, sessions: Sessions) -> None:
        super().__init__(server, ParsedInputTokens)
        self._sessions = sessions

    def completed(self, parsed: ParsedRequest, caller: Caller) -> AbstractContextManager[Any]:
        assert isinstance(parsed, ParsedInputTokens)
        return self._sessions.begin(parsed, "", caller.tenant_digest)


@dataclass(frozen=True)
class _AcceptedPrompts:
    """Prompts that call `accept` when they are tokenized."""

    prompts: Prompts
    accept: Callable[[], None]

    @property
    def param(self) -> str:
        return self.prompts.param

    def __len__(self) -> int:
        return len(self.prompts)

    def size(self, text: TextView, limits: Limits) -> int:
        return self.prompts.size(text, limits)

    async def tokenize(
        self, pool: TextJobRunner, params: ValidatedRequest, limits: Limits, tenant: str
    ) -> PreparedPrompts:
        found = await self.prompts.tokenize(pool, params, limits, tenant)
        self.accept()
        return found


async def stream_events(scope: Scope, send: Send, events: AsyncIterator[bytes], settings: Settings) -> None:
    """Send a response's events until they end."""
    stream = EventStream(scope, send, keepalive_s=settings.keepalive_s, stall_s=settings.stall_s, on_stall=lambda: None)
    async with stream.open():
        async for new in events:
            await stream.write(new)
    await stream.end(b"")


class StoredRoutes:
    """Routes of stored responses: each caller sees its own."""

    def __init__(self, sessions: Sessions, settings: Settings) -> None:
        self._sessions = sessions
        self._settings = settings

    def router(self) -> APIRouter:
        router = APIRouter(tags=["responses"])
        add = router.add_api_route
        add(PATH, self.retrieve_or_delete, methods=["GET", "DELETE"], include_in_schema=False)  # the others document it
        queries = {"parameters": RETRIEVE_QUERY}
        add(PATH, self.retrieve, methods=["GET"], summary="A stored response", openapi_extra=queries)
        add(PATH, self.delete, methods=["DELETE"], summary="Delete a stored response")
        add(f"{PATH}/cancel", self.cancel, methods=["POST"], summary="Cancel a response that runs in the background")
        add(
            f"{PATH}/input_items",
            self.input_items,
            methods=["GET"],
            summary="The input of a stored response",
            openapi_extra={"parameters": LIST_QUERY},
        )
        return router

    async def retrieve_or_delete(self, request: Request, response_id: str) -> Response:
        of_method = self.delete if request.method == "DELETE" else self.retrieve
        return await of_method(request, response_id)

    async def retrieve(self, request: Request, response_id: str) -> Response:
        stored = self._stored(request, response_id)
        start = _number(request, "starting_after", -1, 0, 2**53) + 1
        if not _flag(request, "stream"):
            return _json(stored.json())
        if not stored.events:
            raise InvalidRequest(
                "stream is true, and only responses in the background can be streamed again: leave it out",
                param="stream",
            )
        run = self._sessions.runs.get(stored.id)
        events = _ended(stored, start) if run is None else run.events(start)

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            await while_connected(receive, stream_events(scope, send, events, self._settings))

        return AsgiResponse(answer)

    async def delete(self, request: Request, response_id: str) -> Response:
        stored = self._stored(request, response_id)
        if (run := self._sessions.runs.get(stored.id)) is not None:
            await run.cancel()
        self._sessions.store.remove(stored)
        return _json(msgspec.json.encode({"id": stored.id, "object": "response", "deleted": True}))

    async def cancel(self, request: Request, response_id: str) -> Response:
        stored = self._stored(request, response_id)
        run = self._sessions.runs.get(stored.id)
        if run is not None:
            await run.cancel()
        elif not stored.events:
            raise InvalidRequest(
                f"the response '{stored.id}' was not created with background: true: close its connection to cancel it"
            )
        return _json(stored.json())

    async def input_items(self, request: Request, response_id: str) -> Response:
        items = list(self._stored(request, response_id).input_items())
        if _choice(request, "order", ("desc", "asc")) == "desc":
            items.reverse()
        if (after := request.query_params.get("after")) is not None:
            place = next((i for i, (item_id, _) in enumerate(items) if item_id == after), None)
            if place is None:
                raise ResponseNotFound(f"after names no item of this response: '{after[:80]}'", param="after")
            items = items[place + 1 :]
        page = items[: _number(request, "limit", LISTED, 1, MAX_LISTED)]
        listed = {
            "object": "list",
            "data": [msgspec.Raw(item) for _, item in page],
            "first_id": page[0][0] if page else None,
            "last_id": page[-1][0] if page else None,
            "has_more": len(page) < len(items),
        }
        return _json(msgspec.json.encode(listed))

    def _stored(self, request: Request, response_id: str) -> StoredResponse:
        return self._sessions.store.get(caller_of(request.scope).tenant_digest, response_id)


async def _ended(stored: StoredResponse, start: int) -> AsyncIterator[bytes]:
    yield b"".join(stored.events[start:])


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")


def _flag(request: Request, name: str) -> bool:
    return _choice(request, name, ("false", "true")) == "true"


def _choice(request: Request, name: str, values: tuple[str, ...]) -> str:
    """Return a query's value; the first of `values` where it is missing. Raises InvalidRequest."""
    value = request.query_params.get(name, values[0])
    if value not in values:
        raise InvalidRequest(f"{name} is '{value[:40]}': it must be {' or '.join(values)}", param=name)
    return value


def _number(request: Request, name: str, default: int, least: int, most: int) -> int:
    value = request.query_params.get(name)
    if value is None:
        return default
    if not (value.isascii() and value.isdigit() and len(value) < 17 and least <= int(value) <= most):
        raise InvalidRequest(f"{name} is '{value[:40]}': it must be a number from {least} to {most}", param=name)
    return int(value)
