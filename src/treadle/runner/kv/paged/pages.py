"""Pages of cache memory: who holds which, and what is kept in pages that nobody holds any more. Pure numbers.

A page is free, a row's own, or the index's: a page whose tokens are complete is offered to the index of prefixes, and
from then on any row that begins with the same tokens holds it there, in place. What the index alone holds is given up
when a page is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ....cache.index import Freed, PrefixIndex
from ....cache.node import Node

WORTH_COPYING = 4
"""The part of a page (one in so many tokens) that a prompt has to have in common with it for the page to be copied: all
prompts of one template begin with the same few tokens."""
_FIRST_PAGES = 64


@dataclass(slots=True, eq=False)
class RowPages:
    """A row's `count` pages in order, in `table`; the first `shared` of them are the index's, held through `nodes`."""

    salt: str
    table: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(_FIRST_PAGES, np.int32))
    count: int = 0
    nodes: list[Node] = field(default_factory=list)
    shares: bool = True

    @property
    def shared(self) -> int:
        return len(self.nodes)

    @property
    def pages(self) -> npt.NDArray[np.int32]:
        return self.table[: self.count]

    def append(self, page: int) -> None:
        if self.count == len(self.table):
            self.table = np.concatenate([self.table, np.empty_like(self.table)])
        self.table[self.count] = page
        self.count += 1


class Pages:
    """`count` pages of `size` tokens. `copy(source, target)` copies what is in a page; `keeps` says whether anything is
    kept for others."""

    def __init__(self, count: int, size: int, copy: Callable[[int, int], None], *, keeps: bool) -> None:
        self.count = count
        self.size = size
        self.index = PrefixIndex(size) if keeps else None
        self.looked_up = self.reused = self.copied_pages = 0
        self._copy = copy
        self._free = list(range(count - 1, -1, -1))
        self._rows: dict[str, RowPages] = {}

    def __getitem__(self, row: str) -> npt.NDArray[np.int32]:
        """The row's pages (int32), in order."""
        return self._rows[row].pages

    @property
    def room(self) -> int:
        """Pages that no row holds."""
        return len(self._free) + (self.index.evictable if self.index is not None else 0)

    @property
    def held(self) -> int:
        """Pages that rows hold."""
        return self.count - self.room

    def reuse(self, row: str, salt: str, tokens: Sequence[int]) -> int:
        """A new row, with the pages of the longest beginning of `tokens` that is kept; how many tokens that is."""
        self.release(row)
        mine = self._rows[row] = RowPages(salt)
        if self.index is None:
            return 0
        self.looked_up += len(tokens)
        found = self.index.match(salt, tokens, row)
        self.index.hold(found.path)
        mine.nodes = list(found.nodes)
        for node in found.nodes:
            mine.append(node.handle)
        reused = mine.count * self.size
        if found.last is not None:
            try:
                if found.agree >= self.size // WORTH_COPYING and self._begin_like(mine, found.last):
                    reused = found.tokens
            finally:
                self._give(self.index.let_go([found.last]))
        self.reused += reused
        return reused

    def _begin_like(self, mine: RowPages, last: Node) -> bool:
        """Give the row a page that holds what `last` does, if there is one: a row writes behind what it has, which it
        can't do in a page of others."""
        assert self.index is not None
        if not self._free and not self.index.evictable:
            return False
        page = self._take()
        mine.append(page)  # before anything can raise: what a row has is freed with it
        self._copy(last.handle, page)
        self.copied_pages += 1
        return True

    def admit(self, row: str, salt: str) -> None:
        """A new row, if `reuse` did not make it."""
        if row not in self._rows:
            self._rows[row] = RowPages(salt)

    def grow(self, row: str, tokens: int) -> npt.NDArray[np.int32]:
        """The row's pages, with those for its first `tokens` tokens. Raises MemoryError where there are none left."""
        mine = self._rows[row]
        while mine.count * self.size < tokens:
            mine.append(self._take())
        return mine.table[: mine.count]

    def settle(self, row: str, tokens: Sequence[int]) -> None:
        """Offer the pages that `tokens`, all that the row has, fill."""
        mine = self._rows.get(row)
        if mine is None or self.index is None:
            return
        while mine.shares and (mine.shared + 1) * self.size <= len(tokens):
            at = mine.shared
            self._offer(mine, row, tokens[at * self.size : (at + 1) * self.size])

    def _offer(self, mine: RowPages, row: str, tokens: Sequence[int]) -> None:
        assert self.index is not None
        at = mine.shared
        parent = mine.nodes[-1] if mine.nodes else None
        done = self.index.insert(parent, mine.salt, tokens, int(mine.table[at]), 1, row)
        if done.node is None:
            mine.shares = False
        else:
            self.index.hold([done.node])
            mine.nodes.append(done.node)
            if not done.stored:  # others were there first: theirs is as good, and this one is free again
                self._free.append(int(mine.table[at]))
                mine.table[at] = done.node.handle
        self._give(done.freed)

    def release(self, row: str, tokens: Sequence[int] = ()) -> None:
        """The row is gone; of `tokens`, all it has that can be trusted, what the last page holds is kept as well."""
        mine = self._rows.pop(row, None)
        if mine is None:
            return
        own: list[int] = mine.pages[mine.shared :].tolist()
        if self.index is not None:
            tail = tokens[mine.shared * self.size : (mine.shared + 1) * self.size]
            if tail and mine.shares and own:
                parent = mine.nodes[-1] if mine.nodes else None
                done = self.index.insert(parent, mine.salt, tail, own[0], 1, row)
                own = own[1:] if done.stored else own
                self._give(done.freed)
            self._give(self.index.let_go(mine.nodes))
        self._free.extend(own)

    def lose(self, row: str) -> None:
        """The row's own pages can't be trusted; what it shares was complete before."""
        self.release(row)

    def reset(self) -> int:
        """Forget everything that is kept; how many tokens that were."""
        if self.index is None:
            return 0
        tokens = self.index.tokens
        self._give(self.index.clear())
        for mine in self._rows.values():
            mine.shares = False
        return tokens

    def _take(self) -> int:
        if not self._free and self.index is not None:
            self._give(self.index.evict(1))
        if not self._free:
            raise MemoryError(f"all {self.count} pages of cache memory are held")
        return self._free.pop()

    def _give(self, freed: Sequence[Freed]) -> None:
        if freed:
            self._free.extend(handle for handle, _ in freed)
