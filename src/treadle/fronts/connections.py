"""Connections by count: how many are open, how many each peer holds, and why others were refused. Plain bookkeeping,
without sockets."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..core.refusals import Refusal
from ..hosts import address_of, site_of

log = logging.getLogger(__name__)

TELL_EVERY_S = 1.0
WORDS = {
    Refusal.CONNECTIONS: "all {limit} are open: raise the limit of open files (ulimit -n), or look for idle clients",
    Refusal.PEER_CONNECTIONS: "one address already has {limit}: let its clients reuse connections",
}


@dataclass(frozen=True)
class ConnectionLimits:
    """Most connections of HTTP and of gRPC, and of one peer's address among them. `None` is no limit."""

    http: int | None = None
    http_per_peer: int | None = None
    grpc: int | None = None
    grpc_per_peer: int | None = None


class Connections:
    """The connections of one front. Peers on this machine have no limit of their own: a proxy here speaks for many."""

    def __init__(
        self,
        limit: int | None = None,
        per_peer: int | None = None,
        *,
        front: str = "HTTP",
        on_refused: Callable[[Refusal], None] = lambda reason: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limit = limit
        self.per_peer = per_peer
        self.open = 0
        self._front = front
        self._on_refused = on_refused
        self._clock = clock
        self._peers: Counter[str] = Counter()
        self._refused: Counter[Refusal] = Counter()
        self._told: dict[Refusal, float] = {}

    def enter(self, peer: str) -> Refusal | None:
        """Count a connection of `peer`, a result of `peer_of`; or the reason why there is no place for it."""
        if self.limit is not None and self.open >= self.limit:
            return Refusal.CONNECTIONS
        if self.per_peer is not None and peer and self._peers[peer] >= self.per_peer:
            return Refusal.PEER_CONNECTIONS
        self.open += 1
        if peer:
            self._peers[peer] += 1
        return None

    def leave(self, peer: str) -> None:
        """A connection that had entered has ended."""
        self.open -= 1
        if peer:
            self._peers[peer] -= 1
            if self._peers[peer] <= 0:
                del self._peers[peer]

    def refused(self, reason: Refusal) -> None:
        """Count a connection that was refused, and say so in the log, TELL_EVERY_S apart at least."""
        self._refused[reason] += 1
        self._on_refused(reason)
        now = self._clock()
        if now - self._told.get(reason, -TELL_EVERY_S) >= TELL_EVERY_S:
            self._told[reason] = now
            count = self._refused[reason]
            log.warning("%s connections are refused (%d so far): %s", self._front, count, self._why(reason))

    def statistics(self) -> dict[str, Any]:
        """Plain values for `/v1/status`."""
        return {
            "open": self.open,
            "limit": self.limit,
            "per_peer": self.per_peer,
            "peers": len(self._peers),
            "most_of_a_peer": max(self._peers.values(), default=0),
            "refused": {reason.value: count for reason, count in self._refused.items()},
        }

    def _why(self, reason: Refusal) -> str:
        return WORDS[reason].format(limit=self.limit if reason is Refusal.CONNECTIONS else self.per_peer)


def peer_of(host: str) -> str:
    """Whose connection it is: the address, or the network of an IPv6 address's host. "" for this machine."""
    address = address_of(host.partition("%")[0])
    if address is None or address.is_loopback:
        return ""
    return str(site_of(address))
