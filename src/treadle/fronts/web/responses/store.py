"""Store of responses, in memory and bounded: nothing of it survives the server's end.

Each tenant sees its own responses alone. When the store is full, the tenant that holds most of it loses the response
that it has not used for longest. Items that several responses have in common are held and counted once. A response
that is still generated is never evicted.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ....errors import InvalidRequest

log = logging.getLogger(__name__)

SLOT_BYTES = 128
"""Bytes of an item's or a response's slot in the index, beside its own: measured, CPython's dicts and tuples."""
LOG_EVERY_S = 60.0


class ResponseNotFound(InvalidRequest):
    """The response, or the item, is not in the store."""

    code = "response_not_found"
    http_status = 404
    grpc_status = "NOT_FOUND"


@dataclass(eq=False, slots=True)
class Chunk:
    """Items that were stored together, as JSON, with their ids. `holders` counts the responses that have them."""

    ids: tuple[str, ...]
    items: tuple[bytes, ...]
    size: int = 0
    holders: int = 0

    def __post_init__(self) -> None:
        self.size = sum(sys.getsizeof(part) + SLOT_BYTES for parts in (self.ids, self.items) for part in parts)


@dataclass(eq=False)
class StoredResponse:
    """One response. `chunks` are the items of its conversation: those before it, its input, and its output once it has
    ended. `input_chunks` of them are input. `body` is its JSON; None while it is generated, when `snapshot` returns it.
    """

    id: str
    tenant: bytes
    chunks: list[Chunk]
    input_chunks: int
    body: bytes | None = None
    snapshot: Callable[[], bytes] | None = None
    events: list[bytes] = field(default_factory=list)
    size: int = 0  # without chunks

    @property
    def ended(self) -> bool:
        return self.body is not None

    def json(self) -> bytes:
        """Return the response as it is now."""
        if self.body is not None:
            return self.body
        assert self.snapshot is not None
        return self.snapshot()

    def input_items(self) -> Iterator[tuple[str, bytes]]:
        """Yield the items of its input with their ids, oldest first; those of earlier responses too."""
        for chunk in self.chunks[: self.input_chunks]:
            yield from zip(chunk.ids, chunk.items, strict=True)


@dataclass(eq=False)
class _Shelf:
    """Responses of one tenant, the one used last at the end, and the chunks that have an item, by its id: clients send
    items again with their ids."""

    size: int = 0
    responses: OrderedDict[str, StoredResponse] = field(default_factory=OrderedDict)
    chunks: dict[str, list[Chunk]] = field(default_factory=dict)


class ResponseStore:
    """Store of at most `limit` bytes; 0 keeps nothing. Lives on the event loop."""

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self.size = 0
        self.evicted = 0
        self._clock = clock
        self._logged: float | None = None
        self._unlogged = 0
        self._shelves: dict[bytes, _Shelf] = {}

    def __len__(self) -> int:
        return sum(len(shelf.responses) for shelf in self._shelves.values())

    def statistics(self) -> dict[str, Any]:
        """Return plain values for `/v1/status`."""
        return {"stored": len(self), "bytes": self.size, "limit_bytes": self.limit, "evicted": self.evicted}

    def get(self, tenant: bytes, response_id: str, param: str | None = None) -> StoredResponse:
        """Return a response, and mark it as used. Raises ResponseNotFound, which names `param`."""
        shelf = self._shelves.get(tenant)
        if shelf is None or response_id not in shelf.responses:
            raise ResponseNotFound(
                f"there is no response '{response_id[:80]}': it was not stored (store: false), was deleted, was "
                "evicted from a full store, belongs to another API key, or the server was restarted since; send the "
                "whole conversation as input",
                param=param,
            )
        shelf.responses.move_to_end(response_id)
        return shelf.responses[response_id]

    def items(self, tenant: bytes, ids: Iterable[str]) -> dict[str, bytes]:
        """Return items by their ids. Raises ResponseNotFound for an unknown one."""
        shelf = self._shelves.get(tenant, _Shelf())
        found = {}
        for item_id in ids:
            if not (chunks := shelf.chunks.get(item_id)):
                raise ResponseNotFound(
                    f"there is no item '{item_id[:80]}', which item_reference names: its response was not stored, or "
                    "is no longer; send the item itself",
                    param="input",
                )
            found[item_id] = chunks[-1].items[chunks[-1].ids.index(item_id)]
        return found

    def add(
        self, tenant: bytes, response_id: str, history: Sequence[Chunk], ids: Sequence[str], items: Sequence[bytes]
    ) -> StoredResponse:
        """Add a response that is about to be generated, with its input behind the items of `history`."""
        chunks = [*history, Chunk(tuple(ids), tuple(items))]
        stored = StoredResponse(response_id, tenant, [], len(chunks))
        shelf = self._shelves.setdefault(tenant, _Shelf())
        shelf.responses[response_id] = stored
        for chunk in chunks:
            self._hold(shelf, stored, chunk)
        self._grow(shelf, stored, sys.getsizeof(response_id) + SLOT_BYTES)
        self._make_space()
        return stored

    def end(self, stored: StoredResponse, body: bytes, ids: Sequence[str], items: Sequence[bytes]) -> None:
        """Set the JSON and the output of a response that has ended."""
        stored.body, stored.snapshot = body, None
        shelf = self._shelves.get(stored.tenant)
        if shelf is None or shelf.responses.get(stored.id) is not stored:
            return  # deleted meanwhile
        self._hold(shelf, stored, Chunk(tuple(ids), tuple(items)))
        self._grow(shelf, stored, sys.getsizeof(body) + sum(map(sys.getsizeof, stored.events)))
        self._make_space()

    def remove(self, stored: StoredResponse) -> None:
        """Remove a response. Others keep the items that they share with it. Idempotent."""
        shelf = self._shelves.get(stored.tenant)
        if shelf is None or shelf.responses.get(stored.id) is not stored:
            return
        del shelf.responses[stored.id]
        self._grow(shelf, stored, -stored.size)
        for chunk in stored.chunks:
            self._let_go(shelf, chunk)
        if not shelf.responses:
            del self._shelves[stored.tenant]

    def _hold(self, shelf: _Shelf, stored: StoredResponse, chunk: Chunk) -> None:
        stored.chunks.append(chunk)
        chunk.holders += 1
        if chunk.holders == 1:
            shelf.size += chunk.size
            self.size += chunk.size
            for item_id in chunk.ids:
                shelf.chunks.setdefault(item_id, []).append(chunk)

    def _let_go(self, shelf: _Shelf, chunk: Chunk) -> None:
        chunk.holders -= 1
        if chunk.holders:
            return
        shelf.size -= chunk.size
        self.size -= chunk.size
        for item_id in chunk.ids:
            shelf.chunks[item_id].remove(chunk)
            if not shelf.chunks[item_id]:
                del shelf.chunks[item_id]

    def _grow(self, shelf: _Shelf, stored: StoredResponse, size: int) -> None:
        stored.size += size
        shelf.size += size
        self.size += size

    def _make_space(self) -> None:
        """Evict until the store is within its limit, or only has responses that are generated now."""
        while self.size > self.limit:
            oldest = self._oldest()
            if oldest is None:
                return
            self.remove(oldest)
            self._count_eviction()

    def _oldest(self) -> StoredResponse | None:
        """Return the response to evict."""
        for shelf in sorted(self._shelves.values(), key=lambda shelf: shelf.size, reverse=True):
            found = next((stored for stored in shelf.responses.values() if stored.ended), None)
            if found is not None:
                return found
        return None

    def _count_eviction(self) -> None:
        """Count an eviction, and log the count now and then."""
        self.evicted += 1
        self._unlogged += 1
        now = self._clock()
        if self._logged is None or now - self._logged >= LOG_EVERY_S:
            log.warning(
                "the response store is full (%d bytes): evicted %d of its oldest responses, which can no longer be "
                "retrieved or continued; raise --response-store, or let clients send store: false",
                self.limit,
                self._unlogged,
            )
            self._logged, self._unlogged = now, 0
