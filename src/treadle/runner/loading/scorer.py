"""Loader of a scorer: a small model beside the served one, which scores long prompts (SpecPrefill)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...core.capabilities import Capabilities
from ...core.sparse_prompt import LOOK_AHEAD, longest_scored
from ...errors import ConfigError
from ..base import Progress
from .draft import DraftModel, ModelPair, Role, about, divided, load_second
from .model import LoadedModel

_log = logging.getLogger(__name__)

SCORED_ROWS = 4
"""Prompts that are scored at the same time, at most."""
_SPARE_TOKENS = 512
"""Tokens by which a cache is larger than the longest prompt: blocks that are not full, and the look-ahead."""
SCORER = Role("spec_prefill", "scorer", "to prefill in part")


@dataclass(frozen=True)
class ScorerModel(DraftModel):
    """A scorer to load, and its settings: of prompts that have `min_tokens` or more, a share of `keep` is kept."""

    keep: float = 0.2
    min_tokens: int = 8192


def load_scorer(
    target: LoadedModel,
    wanted: ScorerModel,
    options: Mapping[str, Any],
    progress: Progress = lambda stage: None,
    loaded: LoadedModel | None = None,
) -> ModelPair:
    """Load the scorer for `target`, which was loaded with `options`, and give it memory for the longest prompt; or take
    the model that is `loaded` from its folder. The target's `details` describe it.

    Raises ModelError where it can't be loaded beside the target, or generates no text, and ConfigError where memory for
    both is missing.
    """
    rows = min(SCORED_ROWS, int(options.get("max_running", SCORED_ROWS)))
    scorer = loaded or load_second(target, wanted, {**options, "max_running": rows}, SCORER, progress)
    scorer = replace(scorer, name=wanted.name or scorer.name, choice=scorer.choice.for_rows(rows), max_running=rows)
    least = scorer.choice.config.least_memory(rows).nbytes
    longest = min(target.context, scorer.context) + LOOK_AHEAD + _SPARE_TOKENS
    pair = divided(
        target,
        scorer,
        asked=options.get("memory") is not None,
        role=SCORER,
        weight_bytes=None if loaded is None else 0,
        bounds=(least, least + longest * scorer.kv.token_bytes),
    )
    pair.target.details["scorer"] = about(pair.draft)
    if scorer.context < target.context:
        _log.info("prompts of more than %d tokens, the context of %s, are not scored", scorer.context, scorer.name)
    return pair


def check_scored(target: LoadedModel, no_positions: str) -> None:
    """Raise ConfigError where the served model's KV backend has no positions apart from places, for that reason."""
    if no_positions:
        raise ConfigError(
            f"{target.name} can't prefill a part of a prompt: {no_positions}; leave `spec_prefill` out",
            param="spec_prefill",
        )


def check_least(target: LoadedModel, scorer: LoadedModel, can: Capabilities, wanted: ScorerModel) -> None:
    """Raise ConfigError where no prompt that both models have a context for, or both caches memory, with a token of an
    answer behind it in the target's, is long enough to be scored."""
    held = can.steps.spec_prefill.longest
    if can.kv.blocks:
        held = min(held, can.kv.blocks * can.kv.block - 1)
    for longest, what, cure in (
        (longest_scored(target.context, scorer.context), "a context", "give less"),
        (held, "memory", "give less, give more `memory`"),
    ):
        if longest < wanted.min_tokens:
            raise ConfigError(
                f"`spec_prefill_min` is {wanted.min_tokens}, and the longest prompt that {target.name} and its scorer "
                f"have {what} for has {longest} tokens, so none would be scored: {cure}, or leave `spec_prefill` out",
                param="spec_prefill_min",
            )
