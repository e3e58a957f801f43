"""API keys in memory: names, SHA-256 hashes, scopes and limits, and the look-up of a key that a client sent.

SHA-256 is fast, and that is right for keys of 256 random bits: no attack on a hash gets anywhere with them. A slow hash
would protect short keys better, but every request, a stranger's too, would cost a tenth of a second of CPU. So keys
that people choose have a least length instead (`treadle keys add --stdin`).
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

SINGLE = "api-key"
"""The name of the key that `--api-key` gives."""
PREFIX = "sk-treadle-"


class Scope(StrEnum):
    """What a key may do. `admin` includes `use`."""

    USE = "use"  # generate, list the model, see health and one's own requests
    ADMIN = "admin"  # also: empty the prefix cache, go before others, see and abort their requests, read metrics


ALL = frozenset(Scope)


@dataclass(frozen=True)
class KeyLimits:
    """Limits of one key; None is no limit. Requests are those that generate; tokens are prompt and completion tokens;
    `max_running` counts sequences that run or wait."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_running: int | None = None


@dataclass(frozen=True)
class Key:
    """One API key. `sha256` is the hash of its bytes."""

    name: str
    sha256: bytes = field(repr=False)
    scopes: frozenset[Scope] = frozenset({Scope.USE})
    limits: KeyLimits = KeyLimits()


class Keyring:
    """Look-up of keys, in a time that says nothing about how nearly a guess was right: the table's index is a hash
    under a secret of this process, and the hash that it finds is compared in constant time."""

    def __init__(self, keys: Iterable[Key] = ()) -> None:
        self._secret = secrets.token_bytes(32)
        self._keys = {self._index(key.sha256): key for key in keys}

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._keys.values())

    def find(self, given: bytes) -> Key | None:
        """The key with these bytes; None where there is none."""
        sha256 = digest(given)
        key = self._keys.get(self._index(sha256))
        return key if key is not None and hmac.compare_digest(key.sha256, sha256) else None

    def _index(self, sha256: bytes) -> bytes:
        return hashlib.blake2b(sha256, key=self._secret, digest_size=16).digest()


def digest(key: bytes) -> bytes:
    """The hash that stands for `key`."""
    return hashlib.sha256(key).digest()


def new_key() -> str:
    """A new key of 256 random bits."""
    return PREFIX + secrets.token_urlsafe(32)


def single_key(value: str) -> Key:
    """The key of `--api-key`: every scope, no limits."""
    return Key(SINGLE, digest(value.encode()), ALL)
