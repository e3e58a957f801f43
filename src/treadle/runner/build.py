"""Build a runner from settings, on the thread that will own it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..core.capabilities import SpeculationCapabilities
from ..core.grammar_state import NO_GRAMMARS
from ..errors import ConfigError, ModelError
from ..grammar.compiler import GrammarCompiler
from ..grammar.vocabulary import VocabularyThread
from .base import Progress
from .device.blas import BlasReport, blas_status
from .device.blas_threads import ThreadGovernor
from .device.owner_thread import leave_thread
from .drafting.drafter import Drafter
from .drafting.either import Either
from .drafting.head import HeadDrafter
from .drafting.lookup import LookupDrafter
from .drafting.model import ModelDrafter
from .loading.budget import check_budget
from .loading.draft import CHUNK, DRAFT, DraftModel, load_beside
from .loading.draft_costs import TOKENS
from .loading.eagle import load_eagle
from .loading.headed import HeadedModel
from .loading.loader import load
from .loading.model import LoadedModel
from .loading.mtp import load_head, may_have_head
from .loading.scorer import SCORER, ScorerModel, check_least, check_scored, load_scorer
from .loading.vision import with_vision
from .mlxlm import NoHead
from .model_runner import ModelRunner
from .scoring.scorer import Scorer

_log = logging.getLogger(__name__)


def build(
    folder: str | Path,
    *,
    blas: BlasReport | None = None,
    vocabulary: VocabularyThread | None = None,
    speculate: str = "auto",
    draft: DraftModel | None = None,
    spec_prefill: ScorerModel | None = None,
    progress: Progress = lambda stage: None,
    **options: Any,
) -> ModelRunner:
    """The runner for the model in `folder`, a checked model folder; the calling thread becomes its owner.

    `blas` is the report of `blas.prepare`: it is shown, and its warning logged. `vocabulary` reads the model's tokens
    for grammars; without it the runner has none. `speculate` is "auto", "off", or "lookup", "draft" or "mtp", which
    have to be possible. `draft` is the draft model, which has the same tokens, or an EAGLE-3 head; without one "auto"
    uses the model's MTP head, if it has one. `spec_prefill` is the scorer of long prompts, with the same tokens, too.
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
        model = with_vision(model, Path(folder), asked=options.get("memory") is not None, progress=progress)
        drafts = headed = scorer = None
        if draft is not None and draft.is_head:
            headed = load_eagle(model, draft, options, progress)
            _check_budget(headed.head, "draft")
            model = headed.target
        elif draft is not None:
            model, drafts = load_beside(model, draft, options, progress, prefill_tokens=_chunk(draft, spec_prefill))
            _check_budget(drafts, DRAFT.param, f", or leave `{DRAFT.param}` out")
        elif headed := _headed(model, Path(folder), speculate, options, progress):
            model = headed.target
        if spec_prefill is not None:
            same = drafts if draft is not None and draft.folder == spec_prefill.folder else None
            model, scorer = load_scorer(model, spec_prefill, options, progress, same)
            _check_scorer(scorer)
        _check_budget(model)
        if vocabulary is not None:
            progress("reading the vocabulary")
        grammars = _grammar_compiler(vocabulary, model.name)
        model.details["structured output"] = grammars.unavailable or "llguidance"
        scoring = None
        if scorer is not None and spec_prefill is not None:
            scoring = partial(_scorer, model, scorer, spec_prefill)
        runner = _runner(
            model, govern, grammars, speculate, drafts or headed, scoring, "" if draft is None else draft.name
        )
        if scorer is not None and spec_prefill is not None:
            check_least(model, scorer, runner.capabilities(), spec_prefill)
        return runner
    except BaseException:
        leave_thread()
        raise


def _runner(
    model: LoadedModel,
    govern: Callable[[], None],
    grammars: GrammarCompiler,
    speculate: str,
    draft: LoadedModel | HeadedModel | None,
    scorer: Callable[[], Scorer] | None,
    asked: str,
) -> ModelRunner:
    """Return the runner, with the drafter that `speculate` names, and that of a `draft` model or of a head, and with a
    `scorer`. `asked` is the name of the draft model in the settings, empty where there is none. Raises ConfigError
    where one has to be used and the KV backend can't verify drafts, or has no positions apart from places."""

    def cached(salt: str, tokens: Sequence[int], most: int) -> Sequence[int]:
        return runner.continuation(salt, tokens, most)

    drafter: Drafter | None = LookupDrafter(cached) if speculate in ("auto", "lookup") else None
    if draft is not None:
        costly = HeadDrafter(draft) if isinstance(draft, HeadedModel) else ModelDrafter(draft, model.vocabulary)
        drafter = costly if drafter is None else Either(drafter, costly)
    scores = None if scorer is None else scorer()
    runner = ModelRunner(model, before_step=govern, grammars=grammars, drafter=drafter, scorer=scores)
    possible = runner.capabilities().steps.speculation
    if model.context <= TOKENS and possible.drafters:
        reason = f"in a context of {TOKENS} tokens or less their cost can't be timed"
        possible = SpeculationCapabilities(reason=reason)
    _check_drafts(model.name, possible, speculate, asked)
    if scores is not None:
        check_scored(model, runner.no_positions)
    return runner


def _scorer(target: LoadedModel, model: LoadedModel, wanted: ScorerModel) -> Scorer:
    return Scorer(model, target.vocabulary, keep=wanted.keep, min_tokens=wanted.min_tokens)


def _chunk(draft: DraftModel, scorer: ScorerModel | None) -> int | None:
    """Return the length of chunks for which a draft model is loaded; None for that of the served model, where it scores
    prompts, too."""
    return None if scorer is not None and scorer.folder == draft.folder else CHUNK


def _headed(
    model: LoadedModel, folder: Path, speculate: str, options: Mapping[str, Any], progress: Progress
) -> HeadedModel | None:
    """Return the model with its MTP head; None where `speculate` asks for none, or there is none and none is demanded.
    The model's details say why. Raises ConfigError."""
    if speculate not in ("auto", "mtp") or (speculate == "auto" and not may_have_head(model)):
        return None
    try:
        headed = load_head(model, folder, options, progress)
        _check_budget(headed.head)
        _check_budget(headed.target)
        return headed
    except (NoHead, ConfigError) as error:
        if speculate == "mtp":
            raise ConfigError(
                f"`speculate` is mtp, and {model.name} has no MTP head that can be used: {error}; use a checkpoint "
                "with MTP weights, or give auto",
                param="speculate",
            ) from error
        _log.info("%s is served without an MTP head: %s", model.name, error)
        model.details["MTP head"] = f"none: {error}"
    return None


def _check_drafts(name: str, possible: SpeculationCapabilities, speculate: str, draft: str) -> None:
    """Raise ConfigError where drafts are demanded, by either setting, and can't be verified."""
    if possible.drafters or (not draft and speculate in ("auto", "off")):
        return
    given = f"`speculate` is {speculate}" if not draft else f"`draft` is {draft}"
    cure = "give auto or off" if not draft else "leave it out"
    raise ConfigError(
        f"{given}, and {name} can't verify draft tokens: {possible.reason or 'its KV backend has no way to'}; {cure}",
        param="speculate" if not draft else "draft",
    )


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


def _check_budget(model: LoadedModel, param: str = "memory", or_else: str = "") -> None:
    """Raises ConfigError where the budget does not hold the least that the KV backend needs; `or_else` ends it."""
    least = model.choice.config.least_memory(model.max_running)
    check_budget(model.name, model.kv_budget_bytes, least._replace(fix=least.fix + or_else), param)


def _check_scorer(scorer: LoadedModel) -> None:
    """The same for a scorer: of the prompts that it holds at a time, fewer running sequences leave it few less."""
    least = scorer.choice.config.least_memory(scorer.max_running)
    fix = f"give more `memory`, or leave `{SCORER.param}` out"
    check_budget(f"the {SCORER.title} {scorer.name}", scorer.kv_budget_bytes, least._replace(fix=fix), SCORER.param)
