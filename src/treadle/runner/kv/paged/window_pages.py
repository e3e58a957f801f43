"""Pages of layers with a sliding window: a table of its own for each sequence, freed behind the window. Pure numbers.

Each block of tokens has a page in the tables of `page_allocator`, for layers that see all tokens, and one here while
the window reaches it. A block that is offered to the prefix index takes its page here along: the page is attached to
the block's page there, its `handle`. Pages that sequences no longer hold stay attached until others need them, so a
cached prefix can be reused up to any position whose window is still there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

_FIRST_PAGES = 64
_NONE = -1


@dataclass(slots=True, eq=False)
class WindowTable:
    """A sequence's pages for blocks `first` to `count`, in `table` at the index of each block."""

    table: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(_FIRST_PAGES, np.int32))
    first: int = 0
    count: int = 0

    @property
    def pages(self) -> npt.NDArray[np.int32]:
        return self.table[self.first : self.count]

    def append(self, page: int) -> None:
        if self.count == len(self.table):
            self.table = np.concatenate([self.table, np.empty_like(self.table)])
        self.table[self.count] = page
        self.count += 1


class WindowPages:
    """`count` pages of `size` tokens for layers with `window`, beside `handles` pages of other layers.

    `slack` tokens behind the window are kept: a sequence may go back by so many.
    """

    def __init__(self, count: int, size: int, window: int, handles: int, slack: int = 0) -> None:
        self.count = count
        self.size = size
        self.window = window
        self._slack = slack
        self._free = list(range(count - 1, -1, -1))
        self._page_of = np.full(handles, _NONE, np.int32)
        self._handle_of = np.full(count, _NONE, np.int32)
        self._holders = np.zeros(count, np.int32)
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def held(self) -> int:
        """Pages that sequences hold."""
        return self.count - len(self._free) - len(self._idle)

    def has(self, handle: int) -> bool:
        """Whether the block with this handle has a page."""
        return bool(self._page_of[handle] >= 0)

    def covered(self, handles: Sequence[int]) -> int:
        """Return how many of the first blocks, which have `handles`, can be reused together: the window before the next
        token is there."""
        there = self._page_of[np.fromiter(handles, np.int64, len(handles))] >= 0
        missing = np.flatnonzero(~there)
        ends = [*missing.tolist(), len(handles)]
        starts = [0, *(missing + 1).tolist()]
        for start, end in zip(reversed(starts), reversed(ends), strict=True):
            if start <= self._first(end * self.size):
                return end
        return 0

    def reuse(self, mine: WindowTable, handles: Sequence[int]) -> None:
        """Give an empty table the pages of the window behind the first blocks, which have `handles`, and hold them."""
        first = self._first(len(handles) * self.size)
        mine.table = np.empty(max(_FIRST_PAGES, 2 * len(handles)), np.int32)
        mine.first = mine.count = first
        for handle in handles[first:]:
            page = int(self._page_of[handle])
            self._hold(page)
            mine.append(page)

    def copy_of(self, mine: WindowTable, handle: int) -> tuple[int, int]:
        """Append a page for a copy of the one of `handle`; return both. Raises MemoryError where none is left."""
        source = int(self._page_of[handle])
        self._hold(source)  # or it could be taken for its own copy
        try:
            target = self._take()
        finally:
            self._let_go(source)
        mine.append(target)
        return source, target

    def grow(self, mine: WindowTable, tokens: int) -> npt.NDArray[np.int32]:
        """The table's pages, with those for its first `tokens` tokens. Raises MemoryError where none are left."""
        while mine.count * self.size < tokens:
            mine.append(self._take())
        return mine.table[mine.first : mine.count]

    def attach(self, mine: WindowTable, block: int, handle: int) -> None:
        """The sequence's `block` is the one with this handle. If that has a page already, the sequence uses it."""
        if not mine.first <= block < mine.count:
            return
        own, there = int(mine.table[block]), int(self._page_of[handle])
        if own == there or self._handle_of[own] >= 0:
            return
        if there >= 0:
            self._hold(there)
            mine.table[block] = there
            self._free.append(own)
        else:
            self._page_of[handle], self._handle_of[own], self._holders[own] = own, handle, 1

    def drop_behind(self, mine: WindowTable, tokens: int, marks: Iterable[int]) -> None:
        """Let go of pages that no token behind the first `tokens` sees. Those before one of `marks`, positions that
        other sequences may go on from, are kept as those of sequences that end; the rest is given away first."""
        first = min(mine.count, self._first(tokens - self._slack))
        if first <= mine.first:
            return
        spans = [(self._first(mark), -(-mark // self.size)) for mark in marks]
        for block in range(mine.first, first):
            self._let_go(int(mine.table[block]), last=any(start <= block < end for start, end in spans))
        mine.first = first

    def release(self, mine: WindowTable) -> None:
        """Let go of all of the table's pages."""
        for page in reversed(mine.pages.tolist()):  # the earlier of a window is of no use without the later
            self._let_go(page)
        mine.first = mine.count = 0

    def detach(self, handles: Iterable[int]) -> None:
        """Free the pages of these blocks, which have left the index; no sequence holds them."""
        for handle in handles:
            page = int(self._page_of[handle])
            if page >= 0:
                del self._idle[page]
                self._free_attached(page)

    def _first(self, tokens: int) -> int:
        """The first block that the token behind the first `tokens` sees."""
        return max(0, tokens - self.window + 1) // self.size

    def _hold(self, page: int) -> None:
        self._idle.pop(page, None)
        self._holders[page] += 1

    def _let_go(self, page: int, *, last: bool = True) -> None:
        """Let go of a page. One that is attached, and that nobody else holds, is idle, and is given away after all
        others that are if it comes `last`."""
        if self._handle_of[page] < 0:
            self._free.append(page)
            return
        self._holders[page] -= 1
        if not self._holders[page]:
            self._idle[page] = None
            self._idle.move_to_end(page, last=last)

    def _take(self) -> int:
        if not self._free:
            if not self._idle:
                raise MemoryError(f"all {self.count} pages of window memory are held")
            page, _ = self._idle.popitem(last=False)
            self._free_attached(page)
        return self._free.pop()

    def _free_attached(self, page: int) -> None:
        self._page_of[self._handle_of[page]] = _NONE
        self._handle_of[page] = _NONE
        self._free.append(page)
