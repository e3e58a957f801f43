"""What must always be true of pages."""

from __future__ import annotations

from collections.abc import Iterable

from treadle.cache.index import _below
from treadle.cache.node import Node
from treadle.runner.kv.paged.pages import Pages, RowPages


def check(pages: Pages) -> None:
    """Every page is free, one row's own, or the index's, and all add up; what rows hold of the index they hold once."""
    rows = list(pages._rows.values())
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
        assert pages.room == len(free) + pages.index.evictable
    assert pages.held == len(set(own) | {above.handle for node in held for above in path(node)})
    for row in rows:
        assert row.pages[: row.shared].tolist() == [node.handle for node in row.nodes]
        assert [node.parent for node in row.nodes[1:]] == row.nodes[:-1]
        assert all(node.salt == row.salt and node.tokens == pages.size for node in row.nodes)


def path(node: Node) -> Iterable[Node]:
    at: Node | None = node
    while at is not None and at.parent is not None:
        yield at
        at = at.parent


def _nodes(pages: Pages, rows: Iterable[RowPages]) -> set[Node]:
    """All that the index has: what can be found, and what has left the tree and is still held."""
    if pages.index is None:
        return set()
    linked = {node for root in pages.index._roots.values() for node in _below(root)}
    return linked | {above for row in rows for node in row.nodes for above in path(node)}
