"""Messages that are too long for the model are refused before they are parsed.

The transport's own limit is set before a model is known; this one follows the context that is served now.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from ...errors import RequestTooLarge
from .wires import refuse


class TooLong:
    """Stands in for a message that was not parsed. `size` and `limit` are in bytes."""

    def __init__(self, size: int, limit: int) -> None:
        self.error = RequestTooLarge(
            f"the message has {size} bytes, and a prompt that fits the model's context needs at most {limit}: send less"
        )


class Bounded:
    """A gRPC server, as generated code adds services to it: each of their methods reads messages of at most `most()`
    bytes."""

    def __init__(self, server: Any, most: Callable[[], int]) -> None:
        self._server = server
        self._most = most

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Generated code hands over its methods twice; the registered ones are those that are called."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        import grpc

        bounded = {name: self._bounded(handler) for name, handler in handlers.items()}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, bounded),))

    def _bounded(self, handler: Any) -> Any:
        parse = handler.request_deserializer

        def read(data: bytes) -> Any:
            try:
                limit = self._most()
            except Exception:  # the call itself will meet it, and can answer
                limit = len(data)
            return parse(data) if len(data) <= limit else TooLong(len(data), limit)

        if handler.unary_stream is not None:
            return handler._replace(request_deserializer=read, unary_stream=_streaming(handler.unary_stream))
        return handler._replace(request_deserializer=read, unary_unary=_single(handler.unary_unary))


def _single(method: Callable[..., Any]) -> Callable[..., Any]:
    async def call(request: Any, context: Any) -> Any:
        if isinstance(request, TooLong):
            await refuse(context, request.error)
        return await method(request, context)

    return call


def _streaming(method: Callable[..., Any]) -> Callable[..., Any]:
    """Methods that write to the context, and those that are generators."""
    import inspect

    async def write(request: Any, context: Any) -> None:
        if isinstance(request, TooLong):
            await refuse(context, request.error)
        await method(request, context)

    async def generate(request: Any, context: Any) -> AsyncIterator[Any]:
        if isinstance(request, TooLong):
            await refuse(context, request.error)
        async for answer in method(request, context):
            yield answer

    return generate if inspect.isasyncgenfunction(method) else write
