"""Authentication of gRPC calls: an interceptor that finds the caller before a message is parsed.

A key comes as metadata, `authorization: Bearer KEY` or `x-api-key: KEY`; a wrong one is refused whoever sends it. The
SMG gateway sends none: where keys are configured, a call without one is taken from this machine, with a certificate
that `--grpc-client-ca` signed, or from anywhere with `--grpc-no-auth`; never with `--grpc-auth`. `grpc.health.v1`
answers everyone.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextvars import ContextVar
from typing import Any

import grpc

from ...config import Settings
from ...core.refusals import Refusal
from ...errors import InvalidRequest, TreadleError
from ...hosts import is_this_machine
from ...keys import ALL, Scope
from ..callers import USE, Caller, Doorkeeper
from .wires import Context, client_of, refuse

OPEN = frozenset({"/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"})
Metadata = Sequence[tuple[str, str | bytes]]

_CALLER: ContextVar[Caller] = ContextVar("treadle_grpc_caller")


def caller_of() -> Caller:
    """Who sent the call that is being answered."""
    return _CALLER.get()


class KeyGuard(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Lets in whom `door` knows and whom the settings trust without a key."""

    def __init__(self, door: Doorkeeper, settings: Settings) -> None:
        self._door = door
        self._ask_everyone = settings.grpc_auth
        self._certified = settings.grpc_client_ca is not None
        self._ask_nobody = settings.grpc_no_auth

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        handler = await continuation(details)
        if handler is None:
            return None
        if details.method in OPEN:
            return _guarded(handler, _let_in)
        return _guarded(handler, lambda context: self._enter(context, details.invocation_metadata))

    async def _enter(self, context: Context, metadata: Metadata) -> None:
        """Find the caller, or end the call."""
        try:
            peer = client_of(context).rpartition(":")[0].strip("[]")
            _CALLER.set(self._door.caller(_keys_in(metadata), peer, keyless=self._trusted(peer)))
        except TreadleError as error:
            await refuse(context, error)

    def _trusted(self, peer: str) -> frozenset[Scope] | None:
        """The scopes of a caller without a key, where keys are configured."""
        if self._ask_everyone:
            return None
        if self._certified:
            return ALL
        return USE if self._ask_nobody or is_this_machine(peer) else None


async def _let_in(context: Context) -> None:
    """Every caller may go on."""


async def check_admin(context: Context, door: Doorkeeper, what: str) -> None:
    """End the call with PERMISSION_DENIED unless its caller may do `what`, which needs the scope admin."""
    try:
        caller_of().check_admin(what)
    except TreadleError as error:
        door.refused(Refusal.INSUFFICIENT_SCOPE)
        await refuse(context, error)


def _keys_in(metadata: Metadata) -> tuple[bytes, ...]:
    """The keys in a call's metadata. Raises InvalidRequest where one kind comes twice."""
    given: dict[str, bytes] = {}
    for name, value in metadata:
        if name in ("authorization", "x-api-key"):
            if name in given:
                raise InvalidRequest(f"a call may have one '{name}' in its metadata: send one")
            given[name] = value if isinstance(value, bytes) else value.encode()
    scheme, _, token = given.get("authorization", b"").partition(b" ")
    bearer = token.strip() if scheme.lower() == b"bearer" else b""
    return bearer, given.get("x-api-key", b"").strip()


def _guarded(handler: Any, enter: Callable[[Context], Awaitable[None]]) -> Any:
    """`handler`, which calls `enter` before it parses its message. A message that can't be parsed ends the call with
    INVALID_ARGUMENT: left to gRPC, each would write a traceback to the log."""
    parse = handler.request_deserializer
    if handler.request_streaming:
        return _guarded_stream(handler, enter)
    if not handler.response_streaming:
        return handler._replace(request_deserializer=None, unary_unary=_unary(handler.unary_unary, parse, enter))
    inner = handler.unary_stream
    wrap = _generator if inspect.isasyncgenfunction(inner) else _unary
    return handler._replace(request_deserializer=None, unary_stream=wrap(inner, parse, enter))


def _unary(inner: Any, parse: Any, enter: Callable[[Context], Awaitable[None]]) -> Any:
    async def call(data: bytes, context: Context) -> Any:
        await enter(context)
        return await inner(await _parsed(data, parse, context), context)

    return call


def _generator(inner: Any, parse: Any, enter: Callable[[Context], Awaitable[None]]) -> Any:
    async def call(data: bytes, context: Context) -> AsyncIterator[Any]:
        await enter(context)
        async for message in inner(await _parsed(data, parse, context), context):
            yield message

    return call


def _guarded_stream(handler: Any, enter: Callable[[Context], Awaitable[None]]) -> Any:
    """A handler of streamed requests (reflection): each message is parsed as it is read."""
    name = "stream_stream" if handler.response_streaming else "stream_unary"
    inner, parse = getattr(handler, name), handler.request_deserializer

    async def generator(requests: Any, context: Context) -> AsyncIterator[Any]:
        await enter(context)
        async for message in inner(_each_parsed(requests, parse, context), context):
            yield message

    async def call(requests: Any, context: Context) -> Any:
        await enter(context)
        return await inner(_each_parsed(requests, parse, context), context)

    wrapped = generator if inspect.isasyncgenfunction(inner) else call
    return handler._replace(request_deserializer=None, **{name: wrapped})


async def _each_parsed(requests: Any, parse: Any, context: Context) -> AsyncIterator[Any]:
    async for data in requests:
        yield await _parsed(data, parse, context)


async def _parsed(data: bytes, parse: Any, context: Context) -> Any:
    if parse is None:
        return data
    try:
        return parse(data)
    except Exception:
        await refuse(context, InvalidRequest("the message can't be parsed as its method's request"))
