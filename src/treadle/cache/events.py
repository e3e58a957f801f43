"""What a router hears of the prefix index: blocks stored, each after its parent, and blocks removed."""

from __future__ import annotations

from hashlib import blake2b
from typing import NamedTuple, TypeAlias


class Stored(NamedTuple):
    """A block with its tokens; `parent` is 0 at the beginning of a prompt. Fewer tokens than a block are a tail."""

    id: int
    parent: int
    salt: str
    tokens: tuple[int, ...]


class Removed(NamedTuple):
    """A block that can't be found any more."""

    id: int


Event: TypeAlias = Stored | Removed


def chained_id(parent: int, salt: str, key: bytes) -> int:
    """The same for the same path under the same salt, in any process: a signed 64-bit number, as routers take it.

    It names blocks for others. Nothing is ever found by it.
    """
    name = salt.encode("utf-8", "surrogatepass")
    digest = blake2b(parent.to_bytes(8, "little", signed=True), digest_size=8)
    digest.update(len(name).to_bytes(4, "little"))
    digest.update(name)
    digest.update(key)
    return int.from_bytes(digest.digest(), "little", signed=True)
