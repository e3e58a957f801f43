"""Loader of a scorer: a small model beside the served one, which scores long prompts (SpecPrefill)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...config import Settings
from ...core.capabilities import Capabilities
from ...core.sparse_prompt import LOOK_AHEAD, longest_scored
from ...errors import ConfigError
from ..base import Progress
from ..device.owner_thread import OutOfMemory
from ..kv.paged.backend import PagedConfig
from .draft import DraftModel, ModelPair, Role, about, divided, load_second
from .model import LoadedModel
from .profile_run import pass_bytes

_log = logging.getLogger(__name__)

SCORED_ROWS = 4
"""Prompts that are scored at the same time, at most."""
LONGEST_STEP = 8192
"""Tokens up to which a scorer's steps are longer than the served model's: products of a small model fill a large device
with so many."""
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
    scorer = with_longer_steps(target, scorer, int(options.get("prefill_tokens", Settings.prefill_tokens)))
    least = scorer.choice.config.least_memory(rows).nbytes
    longest = min(target.context, scorer.context) + LOOK_AHEAD + _SPARE_TOKENS
    pair = divided(
        target,
        scorer,
        asked=options.get("memory") is not None,
        role=SCORER,
        weight_bytes=None if loaded is None else 0,
        bounds=(least, least + longest * scorer.kv.token_bytes + _window_bytes(scorer)),
    )
    pair.target.details["scorer"] = about(pair.draft)
    if scorer.context < target.context:
        longest = longest_scored(target.context, scorer.context)
        _log.info("prompts of more than %d tokens are not scored, by the context of %s", longest, scorer.name)
    return pair


def with_longer_steps(target: LoadedModel, scorer: LoadedModel, prefill_tokens: int) -> LoadedModel:
    """Return the scorer for steps twice or four times as long as those of the target, of up to `prefill_tokens` tokens,
    if a pass takes no more memory than one of the target: as few tokens leave a large device idle in a small model's
    products. Where either is not paged the scorer stays as it is, and where memory is short its steps are no longer
    than the target's."""
    own, other = target.choice.config, scorer.choice.config
    least = min(prefill_tokens, target.prefill_tokens or prefill_tokens)
    if not (isinstance(own, PagedConfig) and isinstance(other, PagedConfig)):
        return scorer
    longest = min(least, scorer.prefill_tokens or least)
    try:
        most = pass_bytes(own, target.module, least)
        for tokens in (2 * least, 4 * least):
            if longest < least or tokens > min(LONGEST_STEP, scorer.context):
                break
            if pass_bytes(other, scorer.module, tokens) > most:
                break
            longest = tokens
    except OutOfMemory as error:
        _log.info("steps of the scorer have up to %d tokens: %s", longest, error)
    config = replace(other, step_tokens=longest)
    return replace(scorer, choice=replace(scorer.choice, config=config, prefill_tokens=longest))


def _window_bytes(scorer: LoadedModel) -> int:
    """Bytes of pages that layers with windows have beside those for all tokens."""
    config = scorer.choice.config
    return config.most_window_bytes if isinstance(config, PagedConfig) else 0


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
