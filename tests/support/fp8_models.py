"""Weights in FP8 as publishers store them: bytes by a name's dtype, and scales of tensors or of blocks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from treadle.models import safetensors_file

SIDE = 128
_LARGEST = 448.0
_DTYPES = {mx.float32: "F32", mx.bfloat16: "BF16", mx.uint8: "F8_E4M3"}


def by_blocks(weight: Any) -> tuple[Any, Any]:
    """The bytes of a weight (m, n), and the scales of its blocks (m / 128, n / 128), up."""
    rows, columns = weight.shape
    down, right = -rows % SIDE, -columns % SIDE
    padded: Any = mx.pad(weight, [(0, down), (0, right)])
    padded = padded.reshape((rows + down) // SIDE, SIDE, (columns + right) // SIDE, SIDE)
    scales = mx.abs(padded).max(axis=(1, 3)) / _LARGEST
    scaled = (padded / scales[:, None, :, None]).reshape(rows + down, columns + right)
    return mx.to_fp8(scaled[:rows, :columns]), scales


def by_tensor(weight: Any) -> tuple[Any, Any]:
    """The bytes of a weight, and its one scale, in bfloat16."""
    scale = (mx.abs(weight).max() / _LARGEST).astype(mx.bfloat16)
    return mx.to_fp8(weight / scale.astype(mx.float32)), scale.reshape(1)


def write(folder: Path, tensors: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Write a folder whose tensors of bytes are FP8 by their dtype."""
    mx.eval(dict(tensors))
    kinds = {name: (_DTYPES[array.dtype], tuple(array.shape)) for name, array in tensors.items()}
    data = {name: [np.asarray(mx.contiguous(array).view(mx.uint8)).tobytes()] for name, array in tensors.items()}
    folder.mkdir(parents=True, exist_ok=True)
    safetensors_file.write(folder / "model.safetensors", kinds, data)
    (folder / "config.json").write_text(json.dumps(config))
