"""Counts of connections: open ones, in all and per peer, and refused ones by reason. Pure bookkeeping, without
sockets."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..core.refusals import Refusal
from ..host_names import address_of, site_of

log = logging.getLogger(__name__)

LOG_EVERY_S = 1.0


@dataclass(frozen=True)
class ConnectionKind:
    """A kind of counted object, the reasons of its refusals, and their cures."""

    name: str
    full: Refusal
    share: Refusal
    cures: Mapping[Refusal, str]


CONNECTIONS = ConnectionKind(
    "connections",
    Refusal.CONNECTIONS,
    Refusal.PEER_CONNECTIONS,
    {
        Refusal.CONNECTIONS: "all {limit} are open: raise the limit of open files (ulimit -n), or look for idle "
        "clients",
        Refusal.PEER_CONNECTIONS: "one address already has {per_peer}: let its clients reuse connections",
    },
)
CALLS = ConnectionKind(
    "calls",
    Refusal.CALLS,
    Refusal.PEER_CALLS,
    {
        Refusal.CALLS: "all {limit} are open: look for clients that leave calls open",
        Refusal.PEER_CALLS: "one address already has {per_peer}: let it wait for its answers",
        Refusal.MESSAGE_TIMEOUT: "no message came in time: look for clients that open calls and send nothing",
    },
)
STREAMS = ConnectionKind(
    "streams of Watch and reflection",
    Refusal.STREAMS,
    Refusal.PEER_STREAMS,
    {
        Refusal.STREAMS: "all {limit} are open: use Check instead of Watch",
        Refusal.PEER_STREAMS: "one address already has {per_peer}: use Check instead of Watch",
    },
)


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits of HTTP and gRPC connections, in all and per peer's address. `None` is no limit."""

    http: int | None = None
    http_per_peer: int | None = None
    grpc: int | None = None
    grpc_per_peer: int | None = None


class Connections:
    """Counter of one front's connections, or of other objects of its `kind`. `parts` are the counters of calls that run
    on them, by name. The peer "" has no limit of its own: `peer_of` returns it for this machine, where a proxy speaks
    for many clients."""

    def __init__(
        self,
        limit: int | None = None,
        per_peer: int | None = None,
        *,
        front: str = "HTTP",
        kind: ConnectionKind = CONNECTIONS,
        on_refused: Callable[[Refusal], None] = lambda reason: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limit = limit
        self.per_peer = per_peer
        self.open = 0
        self.kind = kind
        self.parts: Mapping[str, Connections] = {}
        self._front = front
        self._on_refused = on_refused
        self._clock = clock
        self._peers: Counter[str] = Counter()
        self._refused: Counter[Refusal] = Counter()
        self._logged_at: dict[Refusal, float] = {}

    def enter(self, peer: str) -> Refusal | None:
        """Count one of `peer`, or return the reason of its refusal."""
        if self.limit is not None and self.open >= self.limit:
            return self.kind.full
        if self.per_peer is not None and peer and self._peers[peer] >= self.per_peer:
            return self.kind.share
        self.open += 1
        if peer:
            self._peers[peer] += 1
        return None

    def leave(self, peer: str) -> None:
        """Count the end of a connection that had entered."""
        self.open -= 1
        if peer:
            self._peers[peer] -= 1
            if self._peers[peer] <= 0:
                del self._peers[peer]

    def refused(self, reason: Refusal) -> None:
        """Count a refused connection, and log it at most every LOG_EVERY_S seconds."""
        self._refused[reason] += 1
        self._on_refused(reason)
        now = self._clock()
        if now - self._logged_at.get(reason, -LOG_EVERY_S) >= LOG_EVERY_S:
            self._logged_at[reason] = now
            count = self._refused[reason]
            cures = (self._front, self.kind.name, count, self.explain(reason))
            log.warning("%s %s are refused (%d so far): %s", *cures)

    def statistics(self) -> dict[str, Any]:
        """Return plain values for `/v1/status`."""
        return {
            "open": self.open,
            "limit": self.limit,
            "per_peer": self.per_peer,
            "peers": len(self._peers),
            "most_of_a_peer": max(self._peers.values(), default=0),
            "refused": {reason.value: count for reason, count in self._refused.items()},
            **{name: part.statistics() for name, part in self.parts.items()},
        }

    def explain(self, reason: Refusal) -> str:
        """Return the cause and the cure of a refusal."""
        return self.kind.cures[reason].format(limit=self.limit, per_peer=self.per_peer)


def peer_of(host: str) -> str:
    """Return the name under which a connection is counted: the address, or the network of an IPv6 address's host. ""
    for this machine."""
    address = address_of(host.partition("%")[0])
    if address is None or address.is_loopback:
        return ""
    return str(site_of(address))
