"""Page tables of sequences, and the prefix cache in pages that no sequence holds any more. Pure numbers.

A page is free, one sequence's own, or the index's. A full page is offered to the prefix index, and from then on every
sequence that begins with the same tokens holds it there, in place. A page that only the index holds is evicted when
one is needed. Layers with a sliding window have tables and pages of their own beside these (`window_pages`), recurrent
layers have slots (`slot_allocator`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ....cache.prefix_index import Freed, Match, PrefixIndex
from ....cache.prefix_node import Node
from ..block_resources import places_to_keep
from ..slot_allocator import SlotAllocator, SlotTable
from .window_pages import WindowPages, WindowTable

WORTH_COPYING = 4
"""A partly matching page is copied where a prompt shares at least one in so many of its tokens: all prompts of one
template begin with the same few."""
_FIRST_PAGES = 64


@dataclass(slots=True, eq=False)
class PageTable:
    """A sequence's `count` pages in order, in `table`; the first `shared` of them are the index's, held through
    `nodes`. `request` names the sequence's uses of the index. What it computes is offered to the index while
    `shares`. `windows` are its tables for layers with a window, `slots` those of recurrent layers. Other sequences may
    go on from the positions `marks`."""

    request: str
    salt: str
    table: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(_FIRST_PAGES, np.int32))
    count: int = 0
    nodes: list[Node] = field(default_factory=list)
    shares: bool = True
    windows: list[WindowTable] = field(default_factory=list)
    slots: SlotTable = field(default_factory=SlotTable)
    marks: list[int] = field(default_factory=list)

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


class PageAllocator:
    """`count` pages of `size` tokens, those of layers with `windows`, and `slots` of recurrent layers.

    `copy(table, source, target)` copies a page's contents: table 0 is that of layers without a window, i + 1 that of
    `windows[i]`. Without `keep_prefixes` there is no index.
    """

    def __init__(
        self,
        count: int,
        size: int,
        copy: Callable[[int, int, int], None],
        *,
        keep_prefixes: bool,
        windows: Sequence[WindowPages] = (),
        slots: SlotAllocator | None = None,
    ) -> None:
        self.count = count
        self.size = size
        self.windows = windows
        self.slots = slots
        self._others: list[WindowPages | SlotAllocator] = [*windows, *([] if slots is None else [slots])]
        self.index = PrefixIndex(size) if keep_prefixes else None
        self.looked_up = self.reused = self.copied_pages = 0
        self._copy = copy
        self._free = list(range(count - 1, -1, -1))

    @property
    def free(self) -> int:
        """Pages that no sequence holds."""
        return len(self._free) + (self.index.evictable if self.index is not None else 0)

    @property
    def held(self) -> int:
        """Pages that sequences hold."""
        return self.count - self.free

    def new_table(self, request: str, salt: str) -> PageTable:
        """An empty table for a new sequence."""
        return PageTable(request, salt, windows=[WindowTable() for _ in self.windows])

    def match(self, salt: str, tokens: Sequence[int]) -> int:
        """Return the length in tokens of the longest prefix of `tokens` that a sequence could reuse now. The copy of a
        partly matching page needs a free one."""
        if self.index is None:
            return 0
        cached = self.index.find(salt, tokens)
        found = self._reusable(cached)
        if found.last is not None and (self.slots is not None or found.agree >= self.size // WORTH_COPYING):
            held_next = sum(not node.pins for node in found.path)
            if self.free > held_next:
                return found.tokens
        return self._whole(cached).tokens

    def reuse(self, mine: PageTable, tokens: Sequence[int], count: int) -> Match:
        """Give an empty table the whole pages of the first `count` tokens that are cached, and hold a page that begins
        like the rest. Return the match, for `reuse_partial`."""
        assert not mine.count
        if self.index is None:
            return Match()
        self.looked_up += len(tokens) - 1
        found = self._reusable(self.index.match(mine.salt, tokens[:count], mine.request))
        self.index.acquire(found.path)
        mine.nodes = list(found.nodes)
        for node in found.nodes:
            mine.append(node.handle)
        for pages, table in zip(self.windows, mine.windows, strict=True):
            pages.reuse(table, [node.handle for node in found.nodes])
        if self.slots is not None and found.path:
            self.slots.reuse(mine.slots, found.path[-1].handle, found.tokens)
        return found

    def mark_places(self, mine: PageTable, tokens: Sequence[int]) -> None:
        """Mark the places of a new sequence that other prompts may go on from."""
        if self.index is not None and self._others:
            mine.marks += places_to_keep(self.index, mine.salt, tokens, mine.count)

    def _reusable(self, found: Match) -> Match:
        """The part of a match that layers with windows and recurrent layers can reuse, too."""
        if not self._others:
            return found
        last = found.last
        if last is None or not all(units.has(last.handle) for units in self._others):
            return self._whole(found)
        if self.slots is not None and found.agree < last.tokens:
            return self._whole(found)
        handles = [node.handle for node in found.nodes]
        return found if all(pages.usable(handles)[-1] for pages in self.windows) else self._whole(found)

    def _whole(self, found: Match) -> Match:
        """The whole blocks of a match that all layers can reuse."""
        handles, depth = [node.handle for node in found.nodes], len(found.nodes)
        if self._others:
            usable = np.logical_and.reduce([units.usable(handles) for units in self._others])
            depth = int(np.flatnonzero(usable)[-1])
        return Match(found.nodes[:depth], tokens=depth * self.size)

    def reuse_partial(self, mine: PageTable, found: Match) -> int:
        """Append a copy of the page that matches in part, if one is left for it; return how many tokens are reused in
        all."""
        reused = mine.count * self.size
        if self.index is not None and found.last is not None:
            try:
                if self._copy_partial(mine, found.last):
                    reused = found.tokens
            finally:
                self._give(self.index.release([found.last]))
        self.reused += reused
        return reused

    def _copy_partial(self, mine: PageTable, last: Node) -> bool:
        """Copy-on-write of a partly matching page: append a copy of `last`'s, if a page is left for it."""
        if not self.free or not all(units.has(last.handle) for units in self._others):
            return False
        page = self._take()
        mine.append(page)  # before anything can raise: a table's pages are freed with it
        self._copy(0, last.handle, page)
        for i, (pages, table) in enumerate(zip(self.windows, mine.windows, strict=True), 1):
            self._copy(i, *pages.copy_of(table, last.handle))
        self.copied_pages += 1
        return True

    def grow(self, mine: PageTable, tokens: int) -> npt.NDArray[np.int32]:
        """The table's pages, with those for its first `tokens` tokens. Raises MemoryError where none are left."""
        while mine.count * self.size < tokens:
            mine.append(self._take())
        return mine.table[: mine.count]

    def shrink(self, mine: PageTable, tokens: int, committed: int) -> int:
        """Free the pages behind the table's first `tokens` tokens, all of its own, and let go of states that the
        sequence, of which `committed` tokens are known, needs no more. Return how many tokens it goes on from."""
        while (mine.count - 1) * self.size >= tokens:
            assert mine.count > mine.shared, "a page of the index"
            mine.count -= 1
            self._free.append(int(mine.table[mine.count]))
        for pages, table in zip(self.windows, mine.windows, strict=True):
            pages.shrink(table, tokens)
        return tokens if self.slots is None else self.slots.retract(mine.slots, tokens, committed, mine.marks)

    def leave_behind(self, mine: PageTable, tokens: int) -> None:
        """Let go of pages behind the windows: the first `tokens` tokens are computed."""
        for pages, table in zip(self.windows, mine.windows, strict=True):
            pages.drop_behind(table, tokens, mine.marks)

    def commit(self, mine: PageTable, tokens: Sequence[int]) -> None:
        """Offer the pages that `tokens`, all that are committed of the sequence, fill."""
        if self.index is None:
            return
        while mine.shares and (mine.shared + 1) * self.size <= len(tokens):
            at = mine.shared
            self._offer(mine, tokens[at * self.size : (at + 1) * self.size])
        if self.slots is not None:
            for seen in list(mine.slots.states):
                if seen in mine.marks and seen % self.size == 0 and seen <= mine.shared * self.size:
                    self.slots.attach(mine.slots, seen, mine.nodes[seen // self.size - 1].handle)

    def _offer(self, mine: PageTable, tokens: Sequence[int]) -> None:
        assert self.index is not None
        at = mine.shared
        parent = mine.nodes[-1] if mine.nodes else None
        done = self.index.insert(parent, mine.salt, tokens, int(mine.table[at]), 1, mine.request)
        if done.node is None:
            mine.shares = False
        else:
            self.index.acquire([done.node])
            mine.nodes.append(done.node)
            if not done.stored:  # another sequence's page is there already: use it, and free this one
                self._free.append(int(mine.table[at]))
                mine.table[at] = done.node.handle
            self._attach(mine, at, done.node.handle)
        self._give(done.freed)

    def _attach(self, mine: PageTable, block: int, handle: int) -> None:
        for pages, table in zip(self.windows, mine.windows, strict=True):
            pages.attach(table, block, handle)

    def release(self, mine: PageTable, tokens: Sequence[int] = ()) -> None:
        """Free the table's pages. Of `tokens`, all that are committed, those in the last page are cached as well."""
        own: list[int] = mine.pages[mine.shared :].tolist()
        if self.index is not None:
            tail = tokens[mine.shared * self.size : (mine.shared + 1) * self.size]
            last = mine.nodes[-1] if mine.nodes else None
            if tail and mine.shares and own:
                done = self.index.insert(last, mine.salt, tail, own[0], 1, mine.request)
                if done.stored:
                    self._attach(mine, mine.shared, own[0])
                    own = own[1:]
                self._give(done.freed)
                last = done.node if done.node is not None and done.node.tokens == len(tail) else None
            if self.slots is not None and last is not None and mine.shares and tokens:
                self.slots.attach(mine.slots, len(tokens), last.handle)
        for pages, table in zip(self.windows, mine.windows, strict=True):
            pages.release(table)
        if self.slots is not None:
            self.slots.release(mine.slots)
        if self.index is not None:
            self._give(self.index.release(mine.nodes))
        self._free.extend(own)
        mine.count, mine.nodes = 0, []

    def reset(self) -> int:
        """Clear the index; the number of tokens in it. Tables that are still in use must stop sharing."""
        if self.index is None:
            return 0
        tokens = self.index.tokens
        self._give(self.index.clear())
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
            for units in self._others:
                units.detach(handle for handle, _ in freed)
