"""Loader of a second model beside the served one, in the same memory: a draft model, or another one in its role."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
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
    """A draft model to load: its folder, and its name for people. With `is_head` it is an EAGLE-3 head."""

    folder: Path
    name: str = ""
    is_head: bool = field(default=False, kw_only=True)


class Role(NamedTuple):
    """What a second model is for: the setting `param` that names it, and what it is for people. Without it the served
    model has nothing `to_do` for it, in an error."""

    param: str
    title: str
    to_do: str


DRAFT = Role("draft", "draft model", "to draft")


class ModelPair(NamedTuple):
    """The served model, and the second one (`draft`), each with its part of the memory for caches."""

    target: LoadedModel
    draft: LoadedModel


def load_beside(
    target: LoadedModel,
    wanted: DraftModel,
    options: Mapping[str, Any],
    progress: Progress = lambda stage: None,
    prefill_tokens: int | None = CHUNK,
) -> ModelPair:
    """Load the draft model for `target`, which was loaded with `options`, and divide the memory for caches: both hold
    the same number of tokens then. Its passes have up to `prefill_tokens` tokens of prompts (None: as many as the
    target's). The target's `details` describe the draft.

    The draft's keys and values are never quantized. Raises ModelError where the draft can't be loaded beside the
    target, or generates no text, and ConfigError where memory for both is missing.
    """
    own = options if prefill_tokens is None else {**options, "prefill_tokens": prefill_tokens}
    draft = load_second(target, wanted, own, DRAFT, progress)
    pair = divided(target, draft, asked=options.get("memory") is not None)
    text_alone = "" if target.vision is None else "; it drafts by a prompt's text alone, as it reads no images"
    pair.target.details["draft model"] = about(pair.draft) + text_alone
    if draft.context < target.context:
        _log.info("drafts end at %d tokens, the context of the draft model %s", draft.context, draft.name)
    return pair


def load_second(
    target: LoadedModel, wanted: DraftModel, options: Mapping[str, Any], role: Role, progress: Progress
) -> LoadedModel:
    """Load a second model for `target`, with those of its `options` that both share. Raises like `load_beside`."""
    if target.embedding.only:
        raise ConfigError(f"{target.name} generates no text {role.to_do}: leave `{role.param}` out", param=role.param)
    progress(f"loading the {role.title}")
    shared = {name: options[name] for name in (*_SHARED, "prefill_tokens") if name in options}
    try:
        second = load(wanted.folder, name=wanted.name, progress=progress, **shared)
    except ModelError as error:
        raise ModelError(f"`{role.param}` can't be used: {error}; {_CURE}", param=role.param) from error
    if second.embedding.only:
        reason = "is an embedding model and generates no text"
        raise ModelError(f"`{role.param}` {second.name} {reason}: {_CURE}", param=role.param)
    return second


def divided(
    target: LoadedModel,
    draft: LoadedModel,
    *,
    asked: bool,
    role: Role = DRAFT,
    weight_bytes: int | None = None,
    bounds: tuple[int, int] | None = None,
) -> ModelPair:
    """Divide the memory for caches, of which the second model gets bytes within `bounds`. If it was not asked for, its
    weights take their part of it, unless they are there already (`weight_bytes` 0)."""
    budget, weights = target.kv_budget_bytes, draft.weight_bytes if weight_bytes is None else weight_bytes
    if not budget:
        return ModelPair(target, draft)
    if not asked:
        paged = target.choice.config.name == "paged"
        budget -= weights if paged else int(weights * BUDGET_SHARE)
    if budget <= 0:
        raise ConfigError(
            f"the weights of the {role.title} {draft.name} take {size(draft.weight_bytes)} and leave no memory for "
            f"caches: {_CURE}, or give a smaller or a quantized model",
            param=role.param,
        )
    part = _part_of_draft(budget, target, draft)
    if bounds is not None:
        part = min(budget, max(bounds[0], min(part, bounds[1])))
    target = replace(_limited(target, budget - part), draft_budget_bytes=target.draft_budget_bytes + part)
    return ModelPair(target, _limited(draft, part))


def _part_of_draft(budget: int, target: LoadedModel, draft: LoadedModel) -> int:
    """Return the bytes with which the draft holds as many tokens of as many sequences as the target with the rest. A
    target of recurrent layers alone keeps half of what sequences leave, for the states of cached prefixes."""
    rows, own, other = target.max_running, target.kv, draft.kv
    tokens = max(0, budget - rows * (own.row_bytes + other.row_bytes))
    each = other.token_bytes / (own.token_bytes + other.token_bytes) if own.token_bytes else 1 / 2
    return min(budget, rows * other.row_bytes + int(tokens * each))


def _limited(model: LoadedModel, budget: int) -> LoadedModel:
    return replace(model, choice=model.choice.with_memory(budget))


def about(draft: LoadedModel) -> str:
    """Describe a second model in one line."""
    cache = f", up to {size(draft.kv_budget_bytes)} of KV cache" if draft.kv_budget_bytes else ""
    return (
        f"{draft.name} ({draft.architecture}, {count(draft.parameters)} parameters, {draft.dtype}; "
        f"{size(draft.weight_bytes)} of weights{cache}; {draft.choice.config.name} KV backend, "
        f"{draft.context:,} tokens of context)"
    )
