"""API keys in memory (names, SHA-256 hashes, scopes, limits), and their constant-time look-up.

SHA-256 suffices for keys of 256 random bits, which can't be guessed from their hash. A slow hash would protect short
keys better, but would cost a tenth of a second of CPU for every request, including unauthenticated ones. Keys chosen by
people have a minimum length instead (`treadle keys add --stdin`).
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

SINGLE = "api-key"
"""The name of the key given with `--api-key`."""
PREFIX = "sk-treadle-"


class Scope(StrEnum):
    """Permissions of a key. `admin` includes `use`."""

    USE = "use"  # generate, list the model, read health and its own requests
    ADMIN = "admin"  # also: clear the prefix cache, set priorities, read and abort all requests, read metrics


ALL = frozenset(Scope)


@dataclass(frozen=True)
class KeyLimits:
    """Limits of one key; None is no limit. Only generation requests count. Tokens are prompt and completion tokens.
    `max_running` counts running and waiting sequences."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_running: int | None = None


@dataclass(frozen=True)
class Key:
    """An API key. `sha256`: hash of its bytes."""

    name: str
    sha256: bytes = field(repr=False)
    scopes: frozenset[Scope] = frozenset({Scope.USE})
    limits: KeyLimits = KeyLimits()


class Keyring:
    """Keys by hash. The time of a look-up reveals nothing about a wrong key: the index is a hash keyed with a secret of
    this process, and the stored hash is compared in constant time."""

    def __init__(self, keys: Iterable[Key] = ()) -> None:
        self._secret = secrets.token_bytes(32)
        self._keys = {self._index(key.sha256): key for key in keys}

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._keys.values())

    def find(self, given: bytes) -> Key | None:
        """Return the key with these bytes; None if there is none."""
        sha256 = digest(given)
        key = self._keys.get(self._index(sha256))
        return key if key is not None and hmac.compare_digest(key.sha256, sha256) else None

    def _index(self, sha256: bytes) -> bytes:
        return hashlib.blake2b(sha256, key=self._secret, digest_size=16).digest()


def digest(key: bytes) -> bytes:
    """Return the SHA-256 of `key`."""
    return hashlib.sha256(key).digest()


def new_key() -> str:
    """Generate a key of 256 random bits."""
    return PREFIX + secrets.token_urlsafe(32)


def single_key(value: str) -> Key:
    """Return the key of `--api-key`, with all scopes and no limits."""
    return Key(SINGLE, digest(value.encode()), ALL)
