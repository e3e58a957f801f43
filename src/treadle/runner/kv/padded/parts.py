"""Parts of a pass over mlx-lm's caches: prompts up to checkpoints, the tokens sampled from, and the logits of both."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import mlx.core as mx
from msgspec.structs import replace

from ...forward.segments import ForwardOutput, RowSegment
from .batch import PaddedState


def is_repeated(segments: Sequence[RowSegment]) -> bool:
    """Whether the caches hold the tokens of `segments` already."""
    states = [(segment, segment.sequence.kv) for segment in segments]
    return next((segment.end == state.cached for segment, state in states if state is not None), False)


def parts_of(segment: RowSegment) -> list[RowSegment]:
    """Return the segment, split at its sequence's checkpoints."""
    state: PaddedState | None = segment.sequence.kv
    if state is None or segment.wants or segment.hidden > 1:
        return [segment]
    inside = [end for end in state.checkpoints if segment.start < end < segment.end]
    parts = [segment.part(start, end, hidden=0) for start, end in pairwise([segment.start, *inside, segment.end])]
    return [*parts[:-1], replace(parts[-1], hidden=segment.hidden)]


def join(segments: Sequence[RowSegment], scores: dict[str, Any], picked: dict[str, Any], done: ForwardOutput) -> None:
    """Put each sequence's logits for its prompt's scores and those to sample from side by side."""
    parts: list[Any] = []
    first = 0
    for segment in segments:
        own = [logits[segment.id] for logits in (scores, picked) if segment.id in logits]
        if own and segment.id not in done.refused:
            count = sum(part.shape[0] for part in own)
            done.places[segment.id] = (first, count)
            first += count
            parts.extend(own)
    done.logits = mx.concatenate(parts) if parts else None


def head_of(segment: RowSegment) -> RowSegment | None:
    """Return the part of a segment before the token whose logits are sampled from, if there is one."""
    if not segment.picks:
        return segment
    count = len(segment.tokens) - 1
    if not count:
        return None
    wants = max(0, segment.wants - 1)
    return RowSegment(segment.sequence, segment.tokens[:count], segment.start, wants=wants, picks=False)
