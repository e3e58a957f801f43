"""Loader of a draft model: a second model beside the served one, in the same memory."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import ConfigError, ModelError
from ...units import count, size
from ..base import Progress
from ..device.memory import BUDGET_SHARE
from .loader import load
from .model import LoadedModel

_log = logging.getLogger(__name__)

CHUNK = 512
"""Most tokens of prompts in a pass of a draft model: a step of the served model waits for it."""
_SHARED = ("memory", "max_running", "prefix_cache", "kernels")
_CURE = "give a smaller model of the same family, or leave it out"


@dataclass(frozen=True)
class DraftModel:
    """A draft model to load: its folder, and its name for people."""

    folder: Path
    name: str = ""


class ModelPair(NamedTuple):
    """The served model, and the draft model, each with its part of the memory for caches."""

    target: LoadedModel
    draft: LoadedModel


def load_beside(
    target: LoadedModel, wanted: DraftModel, options: Mapping[str, Any], progress: Progress = lambda stage: None
) -> ModelPair:
    """Load the draft model for `target`, which was loaded with `options`, and divide the memory for caches: both hold
    the same number of tokens then. The target's `details` describe the draft.

    The draft's keys and values are never quantized. Raises ModelError where the draft can't be loaded beside the
    target, or generates no text, and ConfigError where memory for both is missing.
    """
    if target.embedding.only:
        raise ConfigError(f"{target.name} generates no text to draft: leave `draft` out", param="draft")
    progress("loading the draft model")
    shared = {name: options[name] for name in _SHARED if name in options}
    try:
        draft = load(wanted.folder, name=wanted.name, prefill_tokens=CHUNK, progress=progress, **shared)
    except ModelError as error:
        raise ModelError(f"`draft` can't be used: {error}; {_CURE}", param="draft") from error
    if draft.embedding.only:
        raise ModelError(f"`draft` {draft.name} is an embedding model and generates no text: {_CURE}", param="draft")
    pair = divided(target, draft, asked=options.get("memory") is not None)
    pair.target.details["draft model"] = _about(pair.draft)
    if draft.context < target.context:
        _log.info("drafts end at %d tokens, the context of the draft model %s", draft.context, draft.name)
    return pair


def divided(target: LoadedModel, draft: LoadedModel, *, asked: bool) -> ModelPair:
    """Divide the memory for caches. If it was not asked for, the draft's weights take their part of it."""
    budget = target.kv_budget_bytes
    if not budget:
        return ModelPair(target, draft)
    if not asked:
        paged = target.choice.config.name == "paged"
        budget -= draft.weight_bytes if paged else int(draft.weight_bytes * BUDGET_SHARE)
    if budget <= 0:
        raise ConfigError(
            f"the weights of the draft model {draft.name} take {size(draft.weight_bytes)} and leave no memory for "
            f"caches: {_CURE}, or give a smaller or a quantized model",
            param="draft",
        )
    part = _part_of_draft(budget, target, draft)
    target = replace(_limited(target, budget - part), draft_budget_bytes=part)
    return ModelPair(target, _limited(draft, part))


def _part_of_draft(budget: int, target: LoadedModel, draft: LoadedModel) -> int:
    """Return the bytes with which the draft holds as many tokens of as many sequences as the target with the rest."""
    rows, own, other = target.max_running, target.kv, draft.kv
    tokens = max(0, budget - rows * (own.row_bytes + other.row_bytes))
    each = other.token_bytes / max(1, own.token_bytes + other.token_bytes)
    return min(budget, rows * other.row_bytes + int(tokens * each))


def _limited(model: LoadedModel, budget: int) -> LoadedModel:
    return replace(model, choice=model.choice.with_memory(budget))


def _about(draft: LoadedModel) -> str:
    """Describe the draft model in one line."""
    cache = f", up to {size(draft.kv_budget_bytes)} of KV cache" if draft.kv_budget_bytes else ""
    return (
        f"{draft.name} ({draft.architecture}, {count(draft.parameters)} parameters, {draft.dtype}; "
        f"{size(draft.weight_bytes)} of weights{cache}; {draft.choice.config.name} KV backend, "
        f"{draft.context:,} tokens of context)"
    )
