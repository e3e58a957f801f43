"""Context length of a model, by its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NAMES = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "max_sequence_length",
    "seq_length",
    "model_max_length",
    "n_ctx",
)
NO_LIMIT = 10**9
"""Larger ones are none: tokenizers write 1e30."""


def positive_int(value: Any) -> int | None:
    """Return a number as an int if it is a limit: above zero, and not so large that it means none."""
    fits = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < NO_LIMIT
    return int(value) if fits else None


def context_length(config: Mapping[str, Any]) -> int | None:
    """Return the tokens that a model, or a part of one, is made for; None where its configuration does not say.

    `max_position_embeddings` is the length before or after scaling by YaRN (Peng et al., 2023), depending on the model:
    the longer one counts, as in vLLM.
    """
    own = next((n for name in _NAMES if (n := positive_int(config.get(name)))), None)
    rope = config.get("rope_scaling") or config.get("rope_parameters")
    if own is None or not isinstance(rope, Mapping) or (rope.get("rope_type") or rope.get("type")) != "yarn":
        return own
    before, factor = positive_int(rope.get("original_max_position_embeddings")), rope.get("factor")
    return max(own, positive_int(before * factor) or 0) if before and isinstance(factor, (int, float)) else own
