"""Build a runner from settings, on the thread that will own it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from ..core.compute_path import KernelPolicy
from ..errors import ConfigError
from ..units import size
from .base import Progress
from .device.blas import BlasReport, blas_status
from .device.blas_threads import ThreadGovernor
from .device.guard import leave_thread
from .loading.loader import load
from .loading.model import LoadedModel
from .model_runner import ModelRunner

_log = logging.getLogger(__name__)


def build(
    folder: str | Path,
    *,
    name: str = "",
    context: int | None = None,
    memory: int | None = None,
    prefix_cache: bool = True,
    kv_bits: int | None = None,
    kernels: KernelPolicy = KernelPolicy.AUTO,
    blas: BlasReport | None = None,
    max_running: int = 1,
    prefill_tokens: int = 2048,
    progress: Progress = lambda stage: None,
) -> ModelRunner:
    """The runner for the model in `folder`, a checked model folder; the calling thread becomes its owner.

    `kernels` says which custom kernels are used. `blas` is the report of `blas.prepare`: it is shown, and its warning
    logged. `LoadOptions` describes the others.
    Raises StartFailed, ModelError and ConfigError, each with one line that names the cause.
    """
    details = {} if blas is None else {"blas": str(blas)}
    if blas is not None and blas.warning:
        _log.warning("%s", blas.warning)
    govern = _governor(blas)
    try:
        model = load(
            Path(folder),
            name=name,
            context=context,
            memory=memory,
            max_running=max_running,
            prefill_tokens=prefill_tokens,
            prefix_cache=prefix_cache,
            kv_bits=kv_bits,
            kernels=kernels,
            blas=None if blas is None else blas_status(blas),
            details=details,
            progress=progress,
        )
        _check_budget(model, max_running)
        return ModelRunner(model, before_step=govern)
    except BaseException:
        leave_thread()
        raise


def _governor(blas: BlasReport | None) -> Callable[[], None]:
    """Callback before each step that keeps BLAS threads off busy cores; does nothing where the threads are not ours."""
    if blas is None or blas.set_threads is None:
        return lambda: None
    return ThreadGovernor(blas.set_threads, blas.threads).before_step


def _check_budget(model: LoadedModel, max_running: int) -> None:
    """Raises ConfigError where the budget does not hold the least that the KV backend needs."""
    budget, least = model.kv_budget_bytes, model.choice.config.least_memory(max_running)
    if 0 < budget < least.nbytes:
        raise ConfigError(
            f"{model.name} needs {size(least.nbytes)} of cache for {least.holds}, and {size(budget)} are there: "
            f"{least.fix}",
            param="memory",
        )
