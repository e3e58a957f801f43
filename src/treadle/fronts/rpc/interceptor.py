"""The interceptor through which every gRPC call comes in.

For a method with a single request, grpc.aio receives the message before it runs the handler, and waits for it without
an end. Here each method is served as one with streams in both directions, which is the same on the wire: the handler
runs when the call's metadata is there. It finds the caller by its key, takes a place for the call, and only then
receives the message, which has MESSAGE_S to come. A message is compared with the longest that its method may have
before it is parsed.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from functools import partial
from typing import Any

import grpc

from ...core.refusals import Refusal
from ...errors import InvalidRequest, MessageTimeout, ReaderStalled, RequestTooLarge, TreadleError
from .call_slots import CallSlots
from .context import Context, gone, refuse
from .guard import KeyGuard

log = logging.getLogger(__name__)

MESSAGE_S = 30.0
"""Seconds that a call's message may take, and each next one of a stream of requests."""
OTHER_BYTES = 64 * 1024
"""Longest message of a method that names no length of its own."""

Read = Callable[[], Awaitable[Any]]


class Interceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Lets in whom `guard` knows and for whom there is a place. `longest` gives the longest message of a method, by its
    last name. An answer that its client does not read for `stall_s` ends the call."""

    def __init__(
        self, guard: KeyGuard, places: CallSlots, longest: Mapping[str, Callable[[], int]], stall_s: float
    ) -> None:
        self._guard = guard
        self._places = places
        self._longest = longest
        self._stall_s = stall_s
        self._ending: set[asyncio.Task[None]] = set()

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        handler = await continuation(details)
        if handler is None:
            return None

        async def call(requests: Any, context: Context) -> None:
            try:
                self._guard.enter(context, details)
                with self._places.taken(context, details.method):
                    await self._serve(handler, details.method, context)
            except TreadleError as error:
                await refuse(context, error)
            except grpc.aio.BaseError:
                raise
            except Exception:
                log.exception("%s failed", details.method)
                await refuse(context, TreadleError("the server failed on this request; its log says how"))

        return grpc.stream_stream_rpc_method_handler(call, None, handler.response_serializer)

    async def _serve(self, handler: Any, method: str, context: Context) -> None:
        read = partial(self._read, handler.request_deserializer, method, context)
        request = _each(read) if handler.request_streaming else await _only(read)
        answer = _method_of(handler)(request, context)
        if inspect.isasyncgen(answer):
            async with contextlib.aclosing(answer):
                async for message in answer:
                    await self._write(context, message)
        elif handler.response_streaming:
            await answer  # it writes to the context
        else:
            await self._write(context, await answer)

    async def _read(self, parse: Any, method: str, context: Context) -> Any:
        """The call's next message, parsed, or EOF. Raises InvalidRequest, and RequestTooLarge."""
        with self._ended_after(context, MESSAGE_S, self._late):
            data = await context.read()
        if data is grpc.aio.EOF:
            return data
        return _parsed(data, parse, self._longest.get(method.rpartition("/")[2], lambda: OTHER_BYTES))

    def _late(self) -> TreadleError:
        self._places.calls.refused(Refusal.MESSAGE_TIMEOUT)
        return MessageTimeout(f"no message came for {MESSAGE_S:g} s: send it with the call")

    async def _write(self, context: Context, message: Any) -> None:
        with self._ended_after(context, self._stall_s, self._stalled):
            try:
                await context.write(message)
            except grpc.aio.InternalError as error:
                raise gone() from error

    def _stalled(self) -> TreadleError:
        return ReaderStalled(f"the client has not read for {self._stall_s:g} s")

    @contextlib.contextmanager
    def _ended_after(self, context: Context, seconds: float, why: Callable[[], TreadleError]) -> Iterator[None]:
        """End the call unless the block is over in time. The block is not cancelled: what waits for the core then hears
        from it, and gRPC frees the memory of an operation only when it is over."""

        def end() -> None:
            task = asyncio.create_task(_end(context, why()), name="treadle-grpc-late")
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

        timer = asyncio.get_running_loop().call_later(seconds, end)
        try:
            yield
        finally:
            timer.cancel()


async def _end(context: Context, error: TreadleError) -> None:
    with contextlib.suppress(grpc.aio.BaseError, asyncio.CancelledError):
        await refuse(context, error)


async def _only(read: Read) -> Any:
    """The one message of a call. Raises InvalidRequest where it ends without."""
    message = await read()
    if message is grpc.aio.EOF:
        raise InvalidRequest("the call ended without a message: send one")
    return message


async def _each(read: Read) -> AsyncIterator[Any]:
    while (message := await read()) is not grpc.aio.EOF:
        yield message


def _method_of(handler: Any) -> Any:
    asked = "stream" if handler.request_streaming else "unary"
    return getattr(handler, f"{asked}_{'stream' if handler.response_streaming else 'unary'}")


def _parsed(data: bytes, parse: Any, longest: Callable[[], int]) -> Any:
    """The message. Left to gRPC, each that can't be parsed would write a traceback to the log."""
    limit = longest()
    if len(data) > limit:
        raise RequestTooLarge(
            f"the message has {len(data)} bytes, and {limit} are enough for all that its method may be asked, such as "
            "a prompt that fills the model's context: send less"
        )
    try:
        return parse(data)
    except Exception:
        raise InvalidRequest("the message can't be parsed as its method's request") from None
