"""From plain values to a runner, on the thread that will own it."""

from __future__ import annotations

from pathlib import Path

from ..errors import ConfigError
from .base import Progress
from .guard import leave_thread
from .loader import load
from .model import LoadedModel
from .text import TextRunner


def build(
    folder: str | Path,
    *,
    name: str = "",
    context: int | None = None,
    memory: int | None = None,
    blas: object = None,
    max_running: int = 1,
    progress: Progress = lambda stage: None,
) -> TextRunner:
    """The text runner for the model in `folder`, a checked model folder; the calling thread becomes its owner.

    `name` is the model's public name (the folder's by default), `context` shortens the model's own, `memory` is the
    byte budget of all caches, and `blas`, which reads as text, says to people what does the CPU's matrix products.
    Raises StartFailed, ModelError and ConfigError, each with one line that names the cause.
    """
    details = {} if blas is None else {"blas": str(blas)}
    try:
        model = load(Path(folder), name=name, context=context, memory=memory, details=details, progress=progress)
        _check_budget(model, max_running)
        return TextRunner(model)
    except BaseException:
        leave_thread()
        raise


def _check_budget(model: LoadedModel, max_running: int) -> None:
    least = max_running * model.kv.row_bytes + model.kv.token_bytes
    if 0 < model.kv_budget_bytes < least:
        raise ConfigError(
            f"{model.name} needs {least} bytes of cache for {max_running} sequences before their first token, and "
            f"{model.kv_budget_bytes} are there: lower max_running, or give more memory",
            param="memory",
        )
