"""What changes a row's logits before a token is picked: biases, held-back stop tokens and penalties.

Everything is sparse: only the logits of named or seen tokens are touched, in one scatter for the biases of all rows and
one for all penalties. The counts live here, on the host, and go when the row goes (F7).
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ...core.messages import Submit
from ..device.staging import Put, direct

_FIRST_SIZE = 64


class LogitsProcessors:
    """One row's edits. `vocabulary` bounds the ids: those outside it can't be picked and are left out."""

    def __init__(self, request: Submit, history: Sequence[int], vocabulary: int) -> None:
        sampling = request.sampling
        self.stops = np.array(sorted({i for i in request.stop_token_ids if 0 <= i < vocabulary}), np.int32)
        biases = [(i, bias) for i, bias in sampling.logit_bias if 0 <= i < vocabulary]
        self.bias_ids = np.array([i for i, _ in biases], np.int32)
        self.biases = np.array([bias for _, bias in biases], np.float32)
        self.seen: SeenTokens | None = None
        if _penalised(request):
            self.seen = SeenTokens(request, history)
        self._held = request.min_tokens if len(self.stops) else 0
        self.before: float = math.inf if self.seen is not None or len(self.bias_ids) else self._held
        """Anything changes the logits at positions below this one."""

    def holds_stops(self, position: int) -> bool:
        """Whether stop tokens may not be picked at `position` yet."""
        return position < self._held


class SeenTokens:
    """The distinct tokens of a row with how often each was generated: prompt tokens only where repetition counts."""

    def __init__(self, request: Submit, history: Sequence[int]) -> None:
        sampling = request.sampling
        self.repetition = sampling.repetition_penalty
        self.presence = sampling.presence_penalty
        self.frequency = sampling.frequency_penalty
        self.generated = 0
        self._first = _distinct(request.prompt) if self.repetition != 1 else np.empty(0, np.int32)
        self._size = len(self._first)
        self._ids = np.zeros(max(_FIRST_SIZE, 2 * self._size), np.int32)
        self._counts = np.zeros(len(self._ids), np.float32)
        self._ids[: self._size] = self._first
        self._slots: dict[int, int] = {}  # of those that were generated
        for token in history:
            self.add(token)

    @property
    def ids(self) -> npt.NDArray[np.int32]:
        return self._ids[: self._size]

    @property
    def counts(self) -> npt.NDArray[np.float32]:
        """How often each of `ids` was generated; 0 for one that is in the prompt alone."""
        return self._counts[: self._size]

    def add(self, token: int) -> None:
        """Count one generated token."""
        self.generated += 1
        slot = self._slots.get(token)
        if slot is None:
            slot = self._slots[token] = self._slot_of(token)
        self._counts[slot] += 1

    def _slot_of(self, token: int) -> int:
        """Where a token is that is generated for the first time: with the prompt's, or behind all others."""
        at = int(self._first.searchsorted(token))
        if at < len(self._first) and self._first[at] == token:
            return at
        slot = self._size
        if slot == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[slot] = token
        self._size += 1
        return slot

    def minus(self) -> npt.NDArray[np.float32]:
        """What the presence and frequency penalties take off each of `ids`."""
        return np.asarray(self.presence * (self.counts > 0) + self.frequency * self.counts, np.float32)


def process_logits(logits: Any, rows: Sequence[LogitsProcessors], positions: Sequence[int], put: Put = direct) -> Any:
    """`logits` (B, V) with every row's edits, as float32 if there are any; rows without edits keep their values.

    Order: biases and held-back stop tokens, then the repetition penalty, then presence and frequency. `put` makes
    arrays.
    """
    places = [i for i, (row, position) in enumerate(zip(rows, positions, strict=True)) if position < row.before]
    if not places:
        return logits
    logits = _biased(logits.astype(mx.float32), [(i, rows[i], positions[i]) for i in places], put)
    return _penalised_logits(logits, [(i, seen) for i in places if (seen := rows[i].seen) is not None], put)


def _biased(logits: Any, rows: Sequence[tuple[int, LogitsProcessors, int]], put: Put) -> Any:
    ids: list[npt.NDArray[np.int32]] = []
    values: list[npt.NDArray[np.float32]] = []
    where: list[int] = []
    for place, row, position in rows:
        pairs = [(row.bias_ids, row.biases)]
        if row.holds_stops(position):
            pairs.append((row.stops, np.full(len(row.stops), -np.inf, np.float32)))
        for some_ids, some_values in pairs:
            ids.append(some_ids)
            values.append(some_values)
            where.append(place)
    index = np.repeat(np.array(where, np.int32), [len(part) for part in ids])
    if not len(index):
        return logits
    where_to, tokens, biases = put(index, np.concatenate(ids), np.concatenate(values))
    return logits.at[where_to, tokens].add(biases)


def _penalised_logits(logits: Any, rows: Sequence[tuple[int, SeenTokens]], put: Put) -> Any:
    rows = [(place, seen) for place, seen in rows if len(seen.ids)]
    if not rows:
        return logits
    lengths = [len(seen.ids) for _, seen in rows]
    index, repetition, minus, ids = put(
        np.repeat(np.array([place for place, _ in rows], np.int32), lengths),
        np.repeat(np.array([seen.repetition for _, seen in rows], np.float32), lengths),
        np.concatenate([seen.minus() for _, seen in rows]),
        np.concatenate([seen.ids for _, seen in rows]),
    )
    old = logits[index, ids]
    logits[index, ids] = mx.where(old > 0, old / repetition, old * repetition) - minus
    return logits


def _distinct(tokens: Sequence[int]) -> npt.NDArray[np.int32]:
    """Each of `tokens`, none of which is negative, once and in order."""
    numbers = np.frombuffer(array("q", tokens), np.int64)
    return np.flatnonzero(np.bincount(numbers)).astype(np.int32)


def _penalised(request: Submit) -> bool:
    sampling = request.sampling
    return bool(sampling.repetition_penalty != 1 or sampling.presence_penalty or sampling.frequency_penalty)
