"""Arrays of tokens with all heads side by side, and by the head."""

from __future__ import annotations

from typing import Any


def heads_of(x: Any, heads: int) -> Any:
    """(B, L, heads * D) as (B, heads, L, D)."""
    return x.reshape(*x.shape[:2], heads, -1).transpose(0, 2, 1, 3)


def lines_of(x: Any) -> Any:
    """(B, heads, L, D) as (B, L, heads * D)."""
    return x.transpose(0, 2, 1, 3).reshape(x.shape[0], x.shape[2], -1)
