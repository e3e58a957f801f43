"""What must always be true of pages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from treadle.cache.prefix_index import _descendants
from treadle.cache.prefix_node import Node
from treadle.runner.kv.block_resources import BlockResources
from treadle.runner.kv.paged.page_allocator import PageAllocator, PageTable


class NamedPages(PageAllocator):
    """Pages, and the tables of sequences by name."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.tables: dict[str, PageTable] = {}

    def __getitem__(self, name: str) -> npt.NDArray[np.int32]:
        return self.tables[name].pages

    def begin(self, name: str, salt: str = "") -> PageTable:
        """A new sequence's table; one of that name goes first."""
        self.drop(name)
        self.tables[name] = self.new_table(name, salt)
        return self.tables[name]

    def reuse_for(self, name: str, salt: str, tokens: Sequence[int]) -> int:
        table = self.begin(name, salt)
        count = self.match(salt, tokens)
        assert self.reuse_partial(table, self.reuse(table, (*tokens, 0), count)) == count, "it gets what was found"
        return count

    def drop(self, name: str, tokens: Sequence[int] = ()) -> None:
        table = self.tables.pop(name, None)
        if table is not None:
            self.release(table, tokens)

    def reset_all(self) -> int:
        """As the backend resets: tables in use stop sharing."""
        for table in self.tables.values():
            table.shares = False
        return self.reset()


def check(pages: PageAllocator, rows: Iterable[PageTable]) -> None:
    """Every page is free, one row's own, or the index's, and all add up; what rows hold of the index they hold once."""
    rows = list(rows)
    own = [page for row in rows for page in row.pages[row.shared :].tolist()]
    kept = {node.handle for node in _nodes(pages, rows)}
    free = pages._free
    assert sorted([*free, *own, *kept]) == list(range(pages.count))
    held: list[Node] = [node for row in rows for node in row.nodes]
    if pages.index is None:
        assert not held
    else:
        pages.index.check(held)
        assert pages.index.size == len(kept)
        assert len(free) + len(own) + pages.index.size == pages.count
        assert pages.free == len(free) + pages.index.evictable
    assert pages.held == len(set(own) | {above.handle for node in held for above in path(node)})
    for i in range(len(pages.windows)):
        check_units(pages.windows[i], [row.windows[i].pages.tolist() for row in rows], kept)
    if pages.slots is not None:
        check_units(pages.slots, [list(row.slots.states.values()) for row in rows], kept)
    for row in rows:
        assert row.pages[: row.shared].tolist() == [node.handle for node in row.nodes]
        assert [node.parent for node in row.nodes[1:]] == row.nodes[:-1]
        assert all(node.salt == row.salt and node.tokens == pages.size for node in row.nodes)


def check_units(units: BlockResources, rows: Sequence[Sequence[int]], kept: set[int]) -> None:
    """Every unit is free, held by rows, or a block's of the index; rows hold as many as are counted."""
    held = Counter(unit for row in rows for unit in row)
    attached = {unit: handle for handle, unit in units._unit_of.items()}
    assert sorted([*units._free, *(held.keys() | attached.keys())]) == list(range(units.count))
    assert units._handle_of == attached
    assert set(attached.values()) <= kept
    assert all(units._holders[unit] == held[unit] for unit in range(units.count))
    assert set(units._idle) == {unit for unit in attached if not held[unit]}
    assert units.held == len(held)
    assert units.available == units.count - len(held)


def path(node: Node) -> Iterable[Node]:
    at: Node | None = node
    while at is not None and at.parent is not None:
        yield at
        at = at.parent


def _nodes(pages: PageAllocator, rows: Iterable[PageTable]) -> set[Node]:
    """All that the index has: what can be found, and what has left the tree and is still held."""
    if pages.index is None:
        return set()
    linked = {node for root in pages.index._roots.values() for node in _descendants(root)}
    return linked | {above for row in rows for node in row.nodes for above in path(node)}
