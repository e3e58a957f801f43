"""Interceptor of every gRPC call: authentication, limits and deadlines.

For a method with a single request, grpc.aio receives the message before it runs the handler, and waits for it without
an end. Here each method is served as one with streams in both directions, which is the same on the wire: the handler
runs when the call's metadata is there. It finds the caller by its key, takes a slot for the call, and only then
receives the message, which has MESSAGE_S to come. A message's length is compared with its method's limit before it is
parsed.
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
from .context import Context, client_left, refuse
from .guard import KeyGuard

log = logging.getLogger(__name__)

MESSAGE_S = 30.0
"""Seconds that a call's message may take, and each further one of a stream of requests."""
OTHER_BYTES = 64 * 1024
"""Longest message of a method without a limit of its own."""

Read = Callable[[], Awaitable[Any]]


class Interceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Admits calls that `guard` accepts while a slot is free. `longest` gives the longest message of a method, by its
    last name. A call ends when its client does not read an answer for `stall_s`."""

    def __init__(
        self, guard: KeyGuard, slots: CallSlots, longest: Mapping[str, Callable[[], int]], stall_s: float
    ) -> None:
        self._guard = guard
        self._slots = slots
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
                with self._slots.reserved(context, details.method):
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
        request = _messages(read) if handler.request_streaming else await _single_message(read)
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
        """Return the call's next message, parsed, or EOF. Raises InvalidRequest, and RequestTooLarge."""
        with self._deadline(context, MESSAGE_S, self._no_message):
            data = await context.read()
        if data is grpc.aio.EOF:
            return data
        return _parsed(data, parse, self._longest.get(method.rpartition("/")[2], lambda: OTHER_BYTES))

    def _no_message(self) -> TreadleError:
        self._slots.calls.refused(Refusal.MESSAGE_TIMEOUT)
        return MessageTimeout(f"no message came for {MESSAGE_S:g} s: send it with the call")

    async def _write(self, context: Context, message: Any) -> None:
        with self._deadline(context, self._stall_s, self._stalled):
            try:
                await context.write(message)
            except grpc.aio.InternalError as error:
                raise client_left() from error

    def _stalled(self) -> TreadleError:
        return ReaderStalled(f"the client has not read for {self._stall_s:g} s")

    @contextlib.contextmanager
    def _deadline(self, context: Context, seconds: float, make_error: Callable[[], TreadleError]) -> Iterator[None]:
        """Context manager that ends the call unless the block is over in time. The block is not cancelled: its
        operation then returns an error from the core, and gRPC frees the memory of an operation only when it is
        over."""

        def end() -> None:
            task = asyncio.create_task(_end(context, make_error()), name="treadle-grpc-late")
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


async def _single_message(read: Read) -> Any:
    """Return the single message of a call. Raises InvalidRequest if it ends without one."""
    message = await read()
    if message is grpc.aio.EOF:
        raise InvalidRequest("the call ended without a message: send one")
    return message


async def _messages(read: Read) -> AsyncIterator[Any]:
    while (message := await read()) is not grpc.aio.EOF:
        yield message


def _method_of(handler: Any) -> Any:
    request_kind = "stream" if handler.request_streaming else "unary"
    return getattr(handler, f"{request_kind}_{'stream' if handler.response_streaming else 'unary'}")


def _parsed(data: bytes, parse: Any, longest: Callable[[], int]) -> Any:
    """Parse a message. Left to gRPC, a message that can't be parsed would write a traceback to the log."""
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
