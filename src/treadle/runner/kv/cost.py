"""Memory that the caches of a sequence take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..mlxlm import window_of
from .backend import LeastMemory


@dataclass(frozen=True)
class KvCost:
    """Cache bytes of one running sequence: `row_bytes` whatever its length, and `token_bytes` a token."""

    token_bytes: int
    row_bytes: int

    def blocks(self, budget: int, sequences: int, block: int) -> int:
        """Blocks of `block` tokens that `sequences` sequences may hold within `budget` bytes; 0 where nothing limits
        them."""
        if not budget or not self.token_bytes:
            return 0
        return max(1, (budget - sequences * self.row_bytes) // (block * self.token_bytes))

    def least_memory(self, max_running: int, tokens: int) -> LeastMemory:
        """Memory for `max_running` empty sequences and the first `tokens` tokens of one."""
        return LeastMemory(
            max_running * self.row_bytes + tokens * self.token_bytes,
            f"{max_running} sequences and the first tokens of one",
            "lower `max_running`, or give more `memory`",
        )


def kv_cost(leaves: list[Any], tokens: int, context: int) -> KvCost:
    """The cost of a sequence, measured at caches that hold `tokens` tokens (`leaves` holds no lists of caches).

    A window, or a chunk, counts as the whole of it a sequence, unless the context is no longer than the window. Buffers
    grow in steps: half a step more is counted for each sequence.
    """
    token_bytes = row_bytes = 0
    for cache in leaves:
        each = _token_bytes(cache, tokens)
        window = window_of(cache)
        if window and window < context:
            row_bytes += each * window
        elif each:
            token_bytes += each
            row_bytes += each * getattr(cache, "step", 0) // 2
        else:
            row_bytes += int(cache.nbytes)
    return KvCost(token_bytes, row_bytes)


def _token_bytes(cache: Any, tokens: int) -> int:
    """Bytes a token takes; 0 for a cache whose size does not depend on the length."""
    if (keys := getattr(cache, "keys", None)) is not None:
        return int(cache.nbytes) // int(keys.shape[-2])
    if hasattr(cache, "lengths") or hasattr(cache, "keys"):  # recurrent state, or a layer that never ran
        return 0
    return -(-int(cache.nbytes) // max(1, tokens))
