"""Build a runner from settings, on the thread that will own it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..core.grammar_state import NO_GRAMMARS
from ..errors import ConfigError, ModelError
from ..grammar.compiler import GrammarCompiler
from ..grammar.vocabulary import VocabularyThread
from ..units import size
from .base import Progress
from .device.blas import BlasReport, blas_status
from .device.blas_threads import ThreadGovernor
from .device.owner_thread import leave_thread
from .drafting.lookup import LookupDrafter
from .loading.loader import load
from .loading.model import LoadedModel
from .model_runner import ModelRunner

_log = logging.getLogger(__name__)


def build(
    folder: str | Path,
    *,
    blas: BlasReport | None = None,
    vocabulary: VocabularyThread | None = None,
    speculate: str = "auto",
    progress: Progress = lambda stage: None,
    **options: Any,
) -> ModelRunner:
    """The runner for the model in `folder`, a checked model folder; the calling thread becomes its owner.

    `blas` is the report of `blas.prepare`: it is shown, and its warning logged. `vocabulary` reads the model's tokens
    for grammars; without it the runner has none. `speculate` is "auto", "off", or "lookup", which has to be possible.
    `options` are those of `LoadOptions`.
    Raises StartFailed, ModelError and ConfigError, each with one line that names the cause.
    """
    details = {} if blas is None else {"blas": str(blas)}
    if blas is not None and blas.warning:
        _log.warning("%s", blas.warning)
    govern = _governor(blas)
    try:
        status = None if blas is None else blas_status(blas)
        model = load(Path(folder), blas=status, details=details, progress=progress, **options)
        _check_budget(model)
        if vocabulary is not None:
            progress("reading the vocabulary")
        grammars = _grammar_compiler(vocabulary, model.name)
        model.details["structured output"] = grammars.unavailable or "llguidance"
        return _runner(model, govern, grammars, speculate)
    except BaseException:
        leave_thread()
        raise


def _runner(model: LoadedModel, govern: Callable[[], None], grammars: GrammarCompiler, speculate: str) -> ModelRunner:
    """Return the runner, with the drafter that `speculate` names. Raises ConfigError where that has to be used and the
    KV backend can't verify drafts."""

    def cached(salt: str, tokens: Sequence[int], most: int) -> Sequence[int]:
        return runner.continuation(salt, tokens, most)

    drafter = None if speculate == "off" else LookupDrafter(cached)
    runner = ModelRunner(model, before_step=govern, grammars=grammars, drafter=drafter)
    possible = runner.capabilities().steps.speculation
    if speculate not in ("auto", "off") and speculate not in possible.drafters:
        raise ConfigError(
            f"`speculate` is {speculate}, and {model.name} can't verify draft tokens: "
            f"{possible.reason or 'its KV backend has no way to'}; give auto or off",
            param="speculate",
        )
    return runner


def _grammar_compiler(vocabulary: VocabularyThread | None, name: str) -> GrammarCompiler:
    """Return the compiler of grammars, which refuses them with the reason where there is no vocabulary. That is waited
    for here: to read it holds the GIL, which would stretch steps."""
    if vocabulary is None:
        return GrammarCompiler(None, unavailable=NO_GRAMMARS)
    try:
        return GrammarCompiler(vocabulary.result())
    except ModelError as error:
        _log.warning("%s has no structured output, and requests for it are refused: %s", name, error)
        return GrammarCompiler(None, unavailable=f"this model has no structured output: {error}")


def _governor(blas: BlasReport | None) -> Callable[[], None]:
    """Callback before each step that keeps BLAS threads off busy cores; does nothing where the threads are not ours."""
    if blas is None or blas.set_threads is None:
        return lambda: None
    return ThreadGovernor(blas.set_threads, blas.threads).before_step


def _check_budget(model: LoadedModel) -> None:
    """Raises ConfigError where the budget does not hold the least that the KV backend needs."""
    budget, least = model.kv_budget_bytes, model.choice.config.least_memory(model.max_running)
    if 0 < budget < least.nbytes:
        raise ConfigError(
            f"{model.name} needs {size(least.nbytes)} of cache for {least.holds}, and {size(budget)} are there: "
            f"{least.fix}",
            param="memory",
        )
