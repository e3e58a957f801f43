"""Events of the prefix index for cache-aware routers: blocks stored, each after its parent, and blocks removed."""

from __future__ import annotations

from hashlib import blake2b
from typing import NamedTuple, TypeAlias


class Stored(NamedTuple):
    """A stored block and its tokens. `parent`: id of the previous block, 0 for the first. A short block is a tail."""

    id: int
    parent: int
    salt: str
    tokens: tuple[int, ...]


class Removed(NamedTuple):
    """A block that left the tree."""

    id: int


Event: TypeAlias = Stored | Removed


def chained_id(parent: int, salt: str, key: bytes) -> int:
    """Return the id of a block after `parent`: a signed 64-bit hash, equal for equal paths and salts in any process.

    It identifies blocks for routers only; the index never looks up blocks by it.
    """
    name = salt.encode("utf-8", "surrogatepass")
    digest = blake2b(parent.to_bytes(8, "little", signed=True), digest_size=8)
    digest.update(len(name).to_bytes(4, "little"))
    digest.update(name)
    digest.update(key)
    return int.from_bytes(digest.digest(), "little", signed=True)
