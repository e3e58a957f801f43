"""Reference distribution of sampling parameters, computed the slow way."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from treadle.core.messages import Sampling

Floats = npt.NDArray[np.float64]


def expected(logits: npt.NDArray[np.float32], sampling: Sampling) -> Floats:
    """Return the distribution that temperature, min_p, top_k and top_p leave of `logits` (V,)."""
    scaled = logits.astype(np.float64) / sampling.temperature
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    p[p < sampling.min_p * p.max()] = 0
    order = np.argsort(-p, kind="stable")
    if sampling.top_k:
        p[order[sampling.top_k :]] = 0
    p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    p[order[(before >= sampling.top_p) & (np.arange(len(p)) > 0)]] = 0
    return np.asarray(p / p.sum())
