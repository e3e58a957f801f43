"""Rotary positions with dynamic NTK scaling, which are plain ones up to the length that a model was trained for.

mlx-lm's class compares positions with that length, which fails for rows of several lengths in one pass.
"""

from __future__ import annotations

from typing import Any

import mlx.nn as nn

from .axes import replace_parts

_NAME = "DynamicNTKScalingRoPE"


def unscale_dynamic(model: Any, context: int) -> None:
    """Replace dynamic rotations of `model` by plain ones where these turn the first `context` positions alike."""

    def plain(one: Any) -> Any:
        if type(one).__name__ != _NAME or not _is_plain(one, context):
            return one
        return nn.RoPE(one.dims, traditional=one.traditional, base=one.base)

    replace_parts(model, plain)


def _is_plain(rotation: Any, context: int) -> bool:
    length = rotation.max_position_embeddings
    return isinstance(length, (int, float)) and context <= length
