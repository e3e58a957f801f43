"""Bitmasks of tokens, one bit a token, 32 in an int32, the first the lowest; and how they are applied to logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ..device.staging import Put

BITS = 32
Words = npt.NDArray[np.int32]
Masking = Callable[[Any, Words, Put], Any]
"""Function of logits (R, V) and their bitmasks (R, W): logits of the same dtype, -inf where a token is not allowed."""


def masking(device: str) -> Masking:
    """Return the fastest operations of MLX on `device`."""
    return expanded if device == "cpu" else gathered


def expanded(logits: Any, words: Words, put: Put) -> Any:
    """Mask on the host's side: for CPUs, where MLX's indexing takes twice as long."""
    count, vocabulary = logits.shape
    biases = np.take(_HOST_TABLE, words.view(np.uint8), axis=0, mode="clip")
    return logits + mx.array(biases.reshape(count, -1)[:, :vocabulary]).astype(logits.dtype)


def gathered(logits: Any, words: Words, put: Put) -> Any:
    """Mask on the device's side, by a table of the biases of eight tokens."""
    count, vocabulary = logits.shape
    table = mx.array(_HOST_TABLE).astype(logits.dtype)
    biases = table[put(words)[0].view(mx.uint8)]
    return logits + biases.reshape(count, -1)[:, :vocabulary]


_HOST_TABLE = np.where(np.arange(256)[:, None] >> np.arange(8) & 1, 0, -np.inf).astype(np.float32)
