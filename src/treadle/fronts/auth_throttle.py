"""Throttle of wrong API keys by address: after MOST_WRONG in a minute an address is refused without a check, so that
keys can't be guessed quickly. The table is bounded; when it is full, the longest idle address is dropped.

Keys that came from an address before it was refused still work: other clients behind the same NAT are not locked out.
This machine's own addresses are never refused, as all clients behind a local reverse proxy have them.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from ..errors import TooManyWrongKeys
from ..host_names import address_of, is_this_machine, site_of
from .accounts import Bucket

MOST_WRONG = 30  # a minute
MOST_PEERS = 4096
MOST_NAMES = 16


@dataclass(slots=True)
class _Peer:
    bucket: Bucket
    names: set[str] = field(default_factory=set)


class AuthThrottle:
    """Table of one server, for all its fronts. Times are seconds of one clock."""

    def __init__(self) -> None:
        self._peers: OrderedDict[str, _Peer] = OrderedDict()

    def __len__(self) -> int:
        return len(self._peers)

    def check(self, peer: str, name: str | None, now: float) -> None:
        """Raise TooManyWrongKeys if `peer` has sent too many wrong keys, except for the key `name` if that came from
        there before."""
        entry = None if is_this_machine(peer) else self._peers.get(_site(peer))
        if entry is None or (name is not None and name in entry.names):
            return
        wait_s = entry.bucket.seconds_until(1.0, now)
        if wait_s > 0:
            raise TooManyWrongKeys(
                f"{MOST_WRONG} wrong API keys a minute have come from this address, so right ones are refused too: "
                "mend the client that sends the wrong key, and try again later",
                retry_after_s=wait_s,
            )

    def wrong(self, peer: str, keys: int, now: float) -> None:
        """Count wrong keys of one request."""
        if not is_this_machine(peer):
            self._entry(peer, now).bucket.take(keys, now)

    def right(self, peer: str, name: str, now: float) -> None:
        """Remember that the key `name` came from `peer`."""
        if not is_this_machine(peer):
            names = self._entry(peer, now).names
            if len(names) < MOST_NAMES:
                names.add(name)

    def _entry(self, peer: str, now: float) -> _Peer:
        site = _site(peer)
        entry = self._peers.get(site)
        if entry is None:
            entry = self._peers[site] = _Peer(Bucket(MOST_WRONG, now))
            if len(self._peers) > MOST_PEERS:
                self._peers.popitem(last=False)
        self._peers.move_to_end(site)
        return entry


def _site(peer: str) -> str:
    """Return the key under which wrong keys of `peer` are counted."""
    address = address_of(peer)
    return peer if address is None else str(site_of(address))
