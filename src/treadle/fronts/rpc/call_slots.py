"""Limits of open gRPC calls, in all and per address."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from ...core.refusals import Refusal
from ...errors import Busy
from ...host_names import address_of, site_of
from ..connections import CALLS, STREAMS, Connections
from .context import Context, host_of

EXTRA_CALLS = 4096
"""Open calls beyond those that generate."""
EXTRA_CALLS_PER_PEER = 1024
"""The same, per address."""
MAX_STREAMS = 256
STREAMS_PER_PEER = 64
LONG_LIVED = frozenset({"/grpc.health.v1.Health/Watch", "/vllm.grpc.engine.VllmEngine/SubscribeKvEvents"})
REFLECTION = "/grpc.reflection."
RETRY_S = 1.0


class CallSlots:
    """Counters of calls. An address may hold the calls of all sequences that the server holds, as many refusals, and
    EXTRA_CALLS_PER_PEER more, but never more than three quarters of all. Loopback addresses have the same limit: a
    gateway there holds no more either. Long-lived streams have slots of their own as well."""

    def __init__(self, sequences: int, on_refused: Callable[[Refusal], None] = lambda reason: None) -> None:
        """`sequences` is the number that the server holds."""
        limit = 2 * sequences + EXTRA_CALLS
        share = min(limit * 3 // 4, 2 * sequences + EXTRA_CALLS_PER_PEER)
        self.calls = Connections(limit, share, front="gRPC", kind=CALLS, on_refused=on_refused)
        self.streams = Connections(MAX_STREAMS, STREAMS_PER_PEER, front="gRPC", kind=STREAMS, on_refused=on_refused)

    @contextlib.contextmanager
    def reserved(self, context: Context, method: str) -> Iterator[None]:
        """Context manager that holds a slot for the call. Raises Busy."""
        peer = _peer(context)
        with contextlib.ExitStack() as stack:
            stack.enter_context(_slot(self.calls, peer))
            if method in LONG_LIVED or method.startswith(REFLECTION):
                stack.enter_context(_slot(self.streams, peer))
            yield


@contextlib.contextmanager
def _slot(counter: Connections, peer: str) -> Iterator[None]:
    reason = counter.enter(peer)
    if reason is not None:
        counter.refused(reason)
        raise Busy(f"gRPC {counter.kind.name} are refused: {counter.explain(reason)}", retry_after_s=RETRY_S)
    try:
        yield
    finally:
        counter.leave(peer)


def _peer(context: Context) -> str:
    host = host_of(context)
    address = address_of(host.partition("%")[0])
    return host if address is None else str(site_of(address))
