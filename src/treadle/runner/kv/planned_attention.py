"""Rounded lengths of passes for MLX's own attention, which on CUDA is planned anew for every length.

A plan for a new pair of lengths, of a chunk and of all tokens before it, takes about 45 ms on an H200, where the pass
itself takes 6.
"""

from __future__ import annotations

from .backend import WarmLimits, WarmPass

UNPLANNED = "MLX's attention on CUDA is planned anew for each new length of a pass, which takes longer than drafts save"
_QUANTUM = 256
_PAD = 64


def prefill_quantum(device: str) -> int:
    """Chunk lengths should be multiples of it; 0 where any length will do."""
    return _QUANTUM if device == "cuda" else 0


def pad_to(device: str) -> int:
    """A pass's length should be a multiple of it."""
    return _PAD if device == "cuda" else 1


def warm_passes(device: str, limits: WarmLimits) -> list[WarmPass]:
    """The usual lengths, once."""
    quantum = prefill_quantum(device)
    chunks = (quantum, quantum, pad_to(device))
    return [WarmPass(chunks=chunks)] if quantum and sum(chunks) < limits.context else []
