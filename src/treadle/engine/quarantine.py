"""Quarantine of requests that killed the engine: equal requests are refused, by fingerprint.

A fingerprint is a keyed hash of the computation's inputs: the prompt, sampling, scoring and pooling, constraint and
reasoning, but not the seed, which differs in a retry. The key is random in each process, so fingerprints reveal nothing
about prompts and collisions can't be constructed.

Entries expire after EXPIRY_S seconds: long enough for retry loops of clients to end, short enough that a prompt is
served again after its fault (such as exhausted device memory) is fixed. The table holds MAX_ENTRIES entries and drops
the oldest. Each entry costs two loads of the model, so an attacker can't fill it within the expiry.
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
MAX_ENTRIES = 1024


class Quarantine:
    """Table of quarantined fingerprints, on the event loop. A check of an empty table costs nothing."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.condemned = 0
        self._clock = clock
        self._key = secrets.token_bytes(32)
        self._until: OrderedDict[bytes, float] = OrderedDict()

    def __len__(self) -> int:
        self._expire()
        return len(self._until)

    def fingerprint(self, request: Submit) -> bytes:
        """Return a fingerprint, equal for requests with equal computations."""
        sampling = msgspec.structs.replace(request.sampling, seed=0)
        scoring = (request.logprobs, request.prompt_logprobs, request.pooling)
        limits = (request.constraint, request.thinking)
        images = [(image.start, image.count, image.hash) for image in request.images]
        parameters = msgspec.msgpack.encode((sampling, *scoring, *limits, images))
        digest = hashlib.blake2b(array("q", request.prompt).tobytes(), key=self._key, digest_size=16)
        digest.update(parameters)
        return digest.digest()

    def add(self, request: Submit) -> bytes:
        """Quarantine `request` and all equal ones; returns its fingerprint."""
        self.condemned += 1
        fingerprint = self.fingerprint(request)
        self._until[fingerprint] = self._clock() + EXPIRY_S
        self._until.move_to_end(fingerprint)
        while len(self._until) > MAX_ENTRIES:
            self._until.popitem(last=False)
        return fingerprint

    def check(self, request: Submit) -> None:
        """Raise Quarantined for a quarantined request."""
        if self._until and len(self) and self.fingerprint(request) in self._until:
            raise quarantined()

    def _expire(self) -> None:
        now = self._clock()
        while self._until and next(iter(self._until.values())) <= now:
            self._until.popitem(last=False)


def quarantined() -> Quarantined:
    """Return the error of a quarantined request."""
    return Quarantined(
        f"the engine's process died or hung whenever it ran this request: it is quarantined, and refused for "
        f"{EXPIRY_S / 60:g} minutes; send another prompt or other sampling, and report it with the server's log"
    )
