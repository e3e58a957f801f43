"""Interface of a gRPC call, and its refusal."""

from __future__ import annotations

import asyncio
from typing import Any, NoReturn, Protocol
from urllib.parse import unquote

import grpc

from ...errors import InvalidRequest, TreadleError
from ..tenants import TICKET


class Context(Protocol):
    """One call, as grpc.aio passes it to a handler."""

    async def read(self) -> Any:
        """Return the next message, or grpc.aio.EOF after the last."""
        ...

    async def write(self, message: Any) -> None:
        """Send a message; returns when the client has room for it."""
        ...

    async def send_initial_metadata(self, metadata: tuple[tuple[str, str], ...]) -> None:
        """Begin the answer, before its first message."""
        ...

    def peer(self) -> str:
        """Return the client's address, as a URI."""
        ...

    def invocation_metadata(self) -> Any:
        """Return the pairs of names and values that came with the call."""
        ...

    async def abort(self, code: Any, details: str, trailing_metadata: tuple[tuple[str, str], ...]) -> NoReturn:
        """End the call with a status."""
        ...


def client_of(context: Context) -> str:
    """Return the client's address with its port: gRPC writes `ipv4:127.0.0.1:5000` or `ipv6:%5B::1%5D:5000`."""
    return unquote(context.peer()).partition(":")[2]


def host_of(context: Context) -> str:
    """Return the client's address without its port."""
    return client_of(context).rpartition(":")[0].strip("[]")


def client_left() -> asyncio.CancelledError:
    """Return the exception that ends the handler of a call whose client has left: grpc.aio logs a traceback for
    others."""
    return asyncio.CancelledError("the client has left")


async def refuse(context: Context, error: TreadleError) -> NoReturn:
    """End the call with the error's status. Its code, the time to retry and the ticket go along as metadata."""
    metadata = [("treadle-error", error.code)]
    if error.retry_after_s is not None:
        metadata.append(("retry-after-ms", str(round(1000 * error.retry_after_s))))
    if error.ticket:
        metadata.append((TICKET, error.ticket))
    try:
        await context.abort(grpc.StatusCode[error.grpc_status], error.message, tuple(metadata))
    except grpc.aio.InternalError as error_of_core:
        raise client_left() from error_of_core


class NotImplementedHere(InvalidRequest):
    """A field needs a feature that this worker lacks: the gateway may have another that has it."""

    code = "not_implemented"
    http_status = 501
    grpc_status = "UNIMPLEMENTED"
