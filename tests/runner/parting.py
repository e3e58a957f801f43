"""Prompts that part from one another in every way that matters to what is reused."""

from __future__ import annotations

import random

TRUNK = tuple(random.Random(5).randrange(256) for _ in range(150))
OTHER = tuple((token + 1) % 256 for token in TRUNK)
PARTING: dict[str, tuple[tuple[int, ...], int]] = {
    "first": (TRUNK, 0),
    "again": (TRUNK, 149),
    "longer": (TRUNK + OTHER[:60], 150),
    "inside": (TRUNK[:45] + OTHER[45:90], 45),
    "border": (TRUNK[:96] + OTHER[96:], 96),
    "late": (TRUNK[:149] + OTHER[149:], 149),
    "early": (TRUNK[:8] + OTHER[8:40], 8),
    "too early": (TRUNK[:7] + OTHER[40:70], 7),
    "short": (TRUNK[:20], 19),
    "else": (OTHER, 0),
}
"""In the order they come: a prompt, and how many of its tokens those before it left. Blocks are of 32 tokens."""
