"""Places for gRPC calls: how many are open at a time, in all and of one address."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from ...core.refusals import Refusal
from ...errors import Busy
from ...hosts import address_of, site_of
from ..connections import CALLS, STREAMS, Connections
from .context import Context, host_of

CALLS_BESIDE = 4096
"""Calls at a time beyond those that generate."""
CALLS_OF_A_PEER = 1024
"""Those of one address."""
MOST_STREAMS = 256
STREAMS_OF_A_PEER = 64
LONG_LIVED = frozenset({"/grpc.health.v1.Health/Watch"})
REFLECTION = "/grpc.reflection."
RETRY_S = 1.0


class CallSlots:
    """The books of calls. An address may hold the calls of all sequences that the server holds, as many refusals, and
    CALLS_OF_A_PEER others, but never more than three quarters of all. Loopback addresses count like others: one
    gateway there holds no more either. Long-lived streams have places of their own beside."""

    def __init__(self, sequences: int, on_refused: Callable[[Refusal], None] = lambda reason: None) -> None:
        """`sequences` is how many the server holds."""
        limit = 2 * sequences + CALLS_BESIDE
        share = min(limit * 3 // 4, 2 * sequences + CALLS_OF_A_PEER)
        self.calls = Connections(limit, share, front="gRPC", kind=CALLS, on_refused=on_refused)
        self.streams = Connections(MOST_STREAMS, STREAMS_OF_A_PEER, front="gRPC", kind=STREAMS, on_refused=on_refused)

    @contextlib.contextmanager
    def taken(self, context: Context, method: str) -> Iterator[None]:
        """A place for the call while the block runs. Raises Busy."""
        peer = _peer(context)
        with contextlib.ExitStack() as stack:
            stack.enter_context(_place(self.calls, peer))
            if method in LONG_LIVED or method.startswith(REFLECTION):
                stack.enter_context(_place(self.streams, peer))
            yield


@contextlib.contextmanager
def _place(books: Connections, peer: str) -> Iterator[None]:
    reason = books.enter(peer)
    if reason is not None:
        books.refused(reason)
        raise Busy(f"gRPC {books.kind.name} are refused: {books.why(reason)}", retry_after_s=RETRY_S)
    try:
        yield
    finally:
        books.leave(peer)


def _peer(context: Context) -> str:
    host = host_of(context)
    address = address_of(host.partition("%")[0])
    return host if address is None else str(site_of(address))
