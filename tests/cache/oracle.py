"""Reference implementation of the prefix index: linear search for prefixes and for the next eviction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from treadle.cache.eviction import MAX_LIFE

Tokens = tuple[int, ...]


@dataclass(eq=False)
class Entry:
    """A block, with all tokens of its path."""

    salt: str
    path: Tokens
    tokens: Tokens
    above: Entry | None
    handle: int
    size: int
    user: str
    rank: tuple[int, int] = (0, 0)
    linked: bool = True
    ended: bool = False
    branches: int = 0

    def way(self) -> Iterator[Entry]:
        if self.above is not None:
            yield from self.above.way()
        yield self


def common(one: Tokens, other: Tokens) -> int:
    """Return the length of the common prefix."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


class Oracle:
    """Reference index. `present`: entries that take memory. `held`: number of references by entry."""

    def __init__(self, block: int) -> None:
        self.block = block
        self.present: dict[int, Entry] = {}  # by handle
        self.held: Counter[Entry] = Counter()
        self.evicted = 0
        self._generation = 0
        self._uses = 0

    def linked(self, salt: str | None = None) -> list[Entry]:
        return [entry for entry in self.present.values() if entry.linked and salt in (None, entry.salt)]

    def pinned(self) -> set[Entry]:
        return {above for entry in self.held for above in entry.way()}

    def below(self, entry: Entry) -> list[Entry]:
        return [other for other in self.linked() if other.above is entry]

    # Finding -----------------------------------------------------------------------------------------------------

    def longest(self, salt: str, tokens: Tokens) -> int:
        return max((common(entry.path, tokens) for entry in self.linked(salt)), default=0)

    def matched(self, last: Entry | None, agree: int, full: Entry | None, request: str) -> None:
        """Record a match that ended in the first `agree` tokens of `last`, after `full`."""
        entry = last if last is not None and 2 * agree >= len(last.tokens) else full
        if entry is None:
            return
        if not request or request != entry.user:
            entry.branches += entry.ended or bool(self.below(entry))
            entry.ended, entry.user = True, request
        self.refresh(entry)

    def refresh(self, entry: Entry) -> None:
        self._uses += 1
        entry.rank = (self._generation + 1 + min(entry.branches, MAX_LIFE), self._uses)

    # Storing -----------------------------------------------------------------------------------------------------

    def beside(self, above: Entry | None, salt: str) -> list[Entry]:
        return [entry for entry in self.linked(salt) if entry.above is above]

    def covering(self, above: Entry | None, salt: str, tokens: Tokens) -> list[Entry]:
        return [entry for entry in self.beside(above, salt) if entry.tokens[: len(tokens)] == tokens]

    def store(self, above: Entry | None, salt: str, tokens: Tokens, handle: int, size: int, user: str) -> set[int]:
        """Store a block unless it is covered; returns the freed handles."""
        begun = [entry for entry in self.beside(above, salt) if tokens[: len(entry.tokens)] == entry.tokens]
        entry = Entry(salt, (above.path if above else ()) + tokens, tokens, above, handle, size, user)
        self.present[handle] = entry
        self.refresh(entry)
        return {handle for tail in begun for handle in self.unlink(tail)}

    # Giving up ---------------------------------------------------------------------------------------------------

    def release(self, entries: list[Entry]) -> set[int]:
        for entry in entries:
            self.held[entry] -= 1
        self.held = +self.held
        return self.free()

    def evict(self, amount: int) -> list[int]:
        handles: list[int] = []
        enough = sum(entry.size for entry in self.present.values()) - amount
        while sum(entry.size for entry in self.present.values()) > enough:
            pinned = self.pinned()
            leaves = [entry for entry in self.linked() if entry not in pinned and not self.below(entry)]
            if not leaves:
                break
            first = min(leaves, key=lambda entry: entry.rank)
            self._generation = max(self._generation, first.rank[0])
            self.evicted += len(first.tokens)
            handles += self.unlink(first)
        return handles

    def clear(self, salt: str | None) -> set[int]:
        for entry in self.linked(salt):
            entry.linked = False
        return self.free()

    def unlink(self, entry: Entry) -> set[int]:
        entry.linked = False
        if entry.above is not None:
            entry.above.rank = max(entry.above.rank, entry.rank)
            entry.above.branches += entry.branches
        return self.free()

    def free(self) -> set[int]:
        """Free detached entries without references."""
        pinned = self.pinned()
        gone = {entry.handle for entry in self.present.values() if not entry.linked and entry not in pinned}
        for handle in gone:
            del self.present[handle]
        return gone
