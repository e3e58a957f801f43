"""Multi-head latent attention of mlx-lm's modules (DeepSeek-V2, 2024), over the latents themselves.

Such a module caches a latent and a rotated key of each token. Where each sequence has one token, as in a ragged batch,
it absorbs a projection into its queries, so that the latents are keys and values of all heads. It computes the scores
of the rotated parts, with what the cache returned, and passes them as the mask to mlx-lm's attention function.

A cache that attends itself returns the identity in the place of the rotated keys. What the module computes are then not
scores but its scaled rotated queries, and the cache has all it needs.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx


@cache
def identity(dim: int, dtype: Any) -> Any:
    """Return the matrix (dim, dim) that leaves rotated queries as they are."""
    matrix = mx.eye(dim, dtype=dtype)
    mx.eval(matrix)
    return matrix


def is_latent(keys: Any, values: Any, mask: Any, cache: Any) -> bool:
    """Whether mlx-lm's attention function was called for latents, with rotated queries as `mask`."""
    return values is keys and isinstance(mask, mx.array) and hasattr(cache, "attend_latent")


def by_heads(module: Any) -> bool:
    """Let `module`, if it is mlx-lm's product of each head with a matrix of its own, multiply single tokens of many
    sequences together: as they come, (T, heads, 1, D), each token would read all matrices again."""
    kind: Any = type(module)
    if kind.__module__ != "mlx_lm.models.mla" or kind.__name__ not in ("MultiLinear", "QuantizedMultiLinear"):
        return False
    module.__class__ = _by_heads(kind)
    return True


@cache
def _by_heads(kind: Any) -> type:
    def call(self: Any, x: Any, transpose: bool = True) -> Any:
        if x.ndim != 4 or x.shape[0] == 1 or x.shape[2] > 1:
            return kind.__call__(self, x, transpose)
        return kind.__call__(self, x.swapaxes(0, 2), transpose).swapaxes(0, 2)

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": __name__})
