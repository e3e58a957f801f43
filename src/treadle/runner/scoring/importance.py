"""Importance of a prompt's tokens: how much a model attends to them from its end and a few tokens behind it.

As in SpecPrefill (Liu et al., ICML 2025): of each look-ahead token the weights of attention over the prompt, their
maximum over heads and layers, the mean over look-ahead tokens, smoothed along the prompt, and the mean of each chunk.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ...core.sparse_prompt import HEAD_CHUNKS, KEPT_CHUNK, TAIL_CHUNKS

SMOOTHED = 13
"""Tokens over which weights are averaged, so that a word's neighbours count with it."""
Numbers = npt.NDArray[np.float32]


def attended(queries: Any, keys: Any, scale: float) -> Any:
    """Return the largest weights (n, S), over all heads, of the attention of `queries` (n, query heads, D) over `keys`
    (kv heads, S, D)."""
    count, heads = queries.shape[0], keys.shape[0]
    grouped = (queries * scale).reshape(count, heads, -1, queries.shape[-1]).swapaxes(0, 1)
    scores = grouped.reshape(heads, -1, queries.shape[-1]) @ keys.swapaxes(-1, -2)
    weights = mx.softmax(scores.astype(mx.float32), axis=-1)
    return weights.reshape(heads, count, -1, keys.shape[1]).max(axis=(0, 2))


def smoothed(weights: Numbers) -> Numbers:
    """Return the mean (S,) of each of `weights` (S,) and its neighbours."""
    side = SMOOTHED // 2
    sums = np.concatenate([[0.0], np.cumsum(weights, dtype=np.float64)])
    places = np.arange(len(weights))
    low, high = np.maximum(places - side, 0), np.minimum(places + side + 1, len(weights))
    means: Numbers = ((sums[high] - sums[low]) / (high - low)).astype(np.float32)
    return means


def kept_positions(weights: Numbers, start: int, kept: int) -> tuple[int, ...]:
    """Return the positions of `kept` tokens from `start` on, whole chunks but the last one: those with the largest
    `weights` (S,), the first and the last ones. Of equal ones those in front. Raises ValueError for weights that are
    not finite."""
    if not np.isfinite(weights).all():
        raise ValueError("the scorer's attention to this prompt is not finite")
    own = smoothed(weights)[start:]
    firsts = np.arange(0, len(own), KEPT_CHUNK)
    ends = np.minimum(firsts + KEPT_CHUNK, len(own))
    means = np.add.reduceat(own, firsts) / (ends - firsts)
    means[:HEAD_CHUNKS] = means[-TAIL_CHUNKS:] = np.inf
    count = len(firsts) - (len(own) - kept) // KEPT_CHUNK
    chosen = np.sort(np.argsort(-means, kind="stable")[:count])
    return tuple(start + i for chunk in chosen for i in range(int(firsts[chunk]), int(ends[chunk])))
