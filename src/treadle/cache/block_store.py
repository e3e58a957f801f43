"""Store of cached blocks' keys and values by handle: immutable copies, concatenated when a sequence reuses them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx


class BlockStore:
    """Keys and values by the index's handles. `copied_bytes`: total bytes copied for reuse. `evaluate` waits for
    copies, or only begins them."""

    def __init__(self, evaluate: Callable[..., None] = mx.eval) -> None:
        self._evaluate = evaluate
        self._blocks: dict[int, list[tuple[Any, Any]]] = {}
        self._pending: list[list[tuple[Any, Any]]] = []
        self._next = 0
        self.copied_bytes = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def new_handle(self) -> int:
        """Allocate a handle without content."""
        self._next += 1
        return self._next

    def put(self, handle: int, layers: Sequence[tuple[Any, Any]]) -> None:
        """Copy keys and values (1, kv heads, n, D) of each layer, at the next `flush`. A slice instead of a copy would
        keep its whole buffer alive and prevent in-place writes to it."""
        copies = self._blocks[handle] = [(keys * 1, values * 1) for keys, values in layers]
        self._pending.append(copies)

    def flush(self) -> None:
        """Evaluate the pending copies, or begin that. Until then their source arrays stay alive."""
        if self._pending:
            self._evaluate(self._pending)
            self._pending = []

    def drop(self, handle: int) -> None:
        """Remove a block, if it is stored."""
        self._blocks.pop(handle, None)

    def parts(self, layer: int, handles: Sequence[int], sizes: Sequence[int]) -> tuple[list[Any], list[Any]]:
        """Return lists of keys and of values of `layer`: the first `sizes[i]` tokens of each block `handles[i]`."""
        parts = [self._blocks[handle][layer] for handle in handles]
        keys = [k if k.shape[2] == n else k[..., :n, :] for (k, _), n in zip(parts, sizes, strict=True)]
        values = [v if v.shape[2] == n else v[..., :n, :] for (_, v), n in zip(parts, sizes, strict=True)]
        return keys, values
