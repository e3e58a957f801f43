"""What mlx-lm gives by itself, for one sequence alone."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from treadle.core.messages import Submit
from treadle.runner.model import LoadedModel


def reference(model: LoadedModel, request: Submit) -> list[int]:
    """Greedy tokens of mlx-lm's own generation."""
    from mlx_lm.generate import generate_step

    steps: Any = generate_step(mx.array(request.prompt), model.module, max_tokens=request.max_tokens)
    return [int(token) for token, _ in steps]
