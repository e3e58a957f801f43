"""Pages of layers with a sliding window: a table of its own for each sequence, freed behind the window. Pure numbers.

Each block of tokens has a page in the tables of `page_allocator`, for layers that see all tokens, and one here while
the window reaches it. A block that is offered to the prefix index takes its page here along, so a cached prefix can be
reused up to any position whose window is still there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ..block_resources import BlockResources

_FIRST_PAGES = 64


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


class WindowPages(BlockResources):
    """`count` pages of `size` tokens for layers with `window`.

    `slack` tokens behind the window are kept: a sequence may go back by so many.
    """

    def __init__(self, count: int, size: int, window: int, slack: int = 0) -> None:
        super().__init__(count, "pages of window memory")
        self.size = size
        self.window = window
        self._slack = slack

    def usable(self, handles: Sequence[int]) -> npt.NDArray[np.bool_]:
        """Return whether the first n of the blocks with `handles` can be reused, for each n from 0 on: the window
        before the next token is there."""
        counts = np.arange(len(handles) + 1)
        there = np.fromiter(map(self.has, handles), np.bool_, len(handles))
        missing = np.concatenate([[-1], np.where(there, -1, counts[:-1])])
        first = np.maximum(0, counts * self.size - self.window + 1) // self.size
        usable: npt.NDArray[np.bool_] = np.maximum.accumulate(missing) < first
        return usable

    def reuse(self, mine: WindowTable, handles: Sequence[int]) -> None:
        """Give an empty table the pages of the window behind the first blocks, which have `handles`, and hold them."""
        first = self._first(len(handles) * self.size)
        mine.table = np.empty(max(_FIRST_PAGES, 2 * len(handles)), np.int32)
        mine.first = mine.count = first
        for handle in handles[first:]:
            page = self._unit_of[handle]
            self._hold(page)
            mine.append(page)

    def copy_of(self, mine: WindowTable, handle: int) -> tuple[int, int]:
        """Append a page for a copy of the one of `handle`; return both. Raises MemoryError where none is left."""
        source = self._unit_of[handle]
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

    def shrink(self, mine: WindowTable, tokens: int) -> None:
        """Let go of the pages behind the first `tokens` tokens."""
        while (mine.count - 1) * self.size >= tokens:
            mine.count -= 1
            self._let_go(int(mine.table[mine.count]))

    def attach(self, mine: WindowTable, block: int, handle: int) -> None:
        """The sequence's `block` is the one with this handle. If that has a page already, the sequence uses it."""
        if mine.first <= block < mine.count:
            mine.table[block] = self._attach(int(mine.table[block]), handle)

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

    def _first(self, tokens: int) -> int:
        """The first block that the token behind the first `tokens` sees."""
        return max(0, tokens - self.window + 1) // self.size
