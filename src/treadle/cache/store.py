"""Keys and values of kept blocks, by handle: copies that nobody writes to, joined when a row reuses them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx


class BlockStore:
    """What the index's handles stand for. `copied_bytes` counts what was copied to be reused."""

    def __init__(self) -> None:
        self._blocks: dict[int, list[tuple[Any, Any]]] = {}
        self._pending: list[list[tuple[Any, Any]]] = []
        self._next = 0
        self.copied_bytes = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def new_handle(self) -> int:
        """A handle that stands for nothing yet."""
        self._next += 1
        return self._next

    def put(self, handle: int, layers: Sequence[tuple[Any, Any]]) -> None:
        """Copy keys and values (1, kv heads, n, D) of each layer, at the next `flush`. A slice would keep all that it
        is a part of, and keep its owner from writing in place."""
        copies = self._blocks[handle] = [(keys * 1, values * 1) for keys, values in layers]
        self._pending.append(copies)

    def flush(self) -> None:
        """Make the copies. Until then they keep what they are copied from."""
        if self._pending:
            mx.eval(self._pending)
            self._pending = []

    def drop(self, handle: int) -> None:
        """Forget a block."""
        self._blocks.pop(handle, None)

    def parts(self, layer: int, handles: Sequence[int], sizes: Sequence[int]) -> tuple[list[Any], list[Any]]:
        """Keys and values of `layer`: the first `sizes[i]` tokens of each block `handles[i]`, in order."""
        parts = [self._blocks[handle][layer] for handle in handles]
        keys = [k if k.shape[2] == n else k[..., :n, :] for (k, _), n in zip(parts, sizes, strict=True)]
        values = [v if v.shape[2] == n else v[..., :n, :] for (_, v), n in zip(parts, sizes, strict=True)]
        return keys, values
