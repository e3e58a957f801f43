"""Requests that took the engine down, by fingerprint: the same request is refused from then on.

A fingerprint is a keyed hash of what decides the computation: the prompt and how it is sampled and scored, without the
seed, as a retry of the same request draws another. The key is the process's own: fingerprints tell nothing about
prompts, and nobody can make two requests collide.

Entries expire after EXPIRY_S: long enough for retries and loops of agents to end, short enough that a prompt which was
condemned for a fault since mended (the device's memory, say) is served again. The table holds MOST entries, the oldest
gives way: each cost two loads of the model, so an attacker doesn't fill it within the expiry.
"""

from __future__ import annotations

import hashlib
import secrets
from array import array
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from ..core.messages import Submit
from ..errors import Quarantined

EXPIRY_S = 3600.0
MOST = 1024


class Quarantine:
    """Lives on the event loop. While it is empty a check costs nothing."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.condemned = 0
        self._clock = clock
        self._key = secrets.token_bytes(32)
        self._until: OrderedDict[bytes, float] = OrderedDict()

    def __len__(self) -> int:
        self._expire()
        return len(self._until)

    def fingerprint(self, request: Submit) -> bytes:
        """The same for requests that compute the same."""
        sampling = msgspec.structs.replace(request.sampling, seed=0)
        plain = msgspec.msgpack.encode((sampling, request.logprobs, request.prompt_logprobs))
        digest = hashlib.blake2b(array("q", request.prompt).tobytes(), key=self._key, digest_size=16)
        digest.update(plain)
        return digest.digest()

    def add(self, request: Submit) -> bytes:
        """Refuse `request`, and its like, from now on; its fingerprint."""
        self.condemned += 1
        mark = self.fingerprint(request)
        self._until[mark] = self._clock() + EXPIRY_S
        self._until.move_to_end(mark)
        while len(self._until) > MOST:
            self._until.popitem(last=False)
        return mark

    def check(self, request: Submit) -> None:
        """Raises Quarantined for one that took the engine down."""
        if self._until and len(self) and self.fingerprint(request) in self._until:
            raise quarantined()

    def _expire(self) -> None:
        now = self._clock()
        while self._until and next(iter(self._until.values())) <= now:
            self._until.popitem(last=False)


def quarantined() -> Quarantined:
    """The error that a guilty request ends with, and all later ones like it."""
    return Quarantined(
        f"the engine's process died or hung whenever it ran this request: it is quarantined, and refused for "
        f"{EXPIRY_S / 60:g} minutes; send another prompt or other sampling, and report it with the server's log"
    )
