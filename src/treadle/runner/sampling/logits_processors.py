"""Logits processors: biases, held-back stop tokens and penalties, applied before a token is sampled.

All are sparse. One scatter applies the biases of all rows, another all penalties. Token counts live on the host and end
with their row (F7).
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from copy import copy
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ...core.messages import Submit
from ..device.staging import Put, direct
from .constraints import RowConstraint

_FIRST_SIZE = 64


class LogitsProcessors:
    """The processors of one row. Ids of `vocabulary` and above can't be sampled and are ignored."""

    def __init__(
        self, request: Submit, history: Sequence[int], vocabulary: int, constraint: RowConstraint | None = None
    ) -> None:
        sampling = request.sampling
        self.stops = np.array(sorted({i for i in request.stop_token_ids if 0 <= i < vocabulary}), np.int32)
        biases = [(i, bias) for i, bias in sampling.logit_bias if 0 <= i < vocabulary]
        self.bias_ids = np.array([i for i, _ in biases], np.int32)
        self.biases = np.array([bias for _, bias in biases], np.float32)
        self.seen: SeenTokens | None = None
        if _penalised(request):
            self.seen = SeenTokens(request, history)
        self.constraint = constraint
        self._held = request.min_tokens if len(self.stops) else 0
        self._end_position: float = math.inf if self.seen is not None or len(self.bias_ids) else self._held

    def fork(self, constraint: RowConstraint | None) -> LogitsProcessors:
        """Return processors that count tokens from here by themselves, beside a fork of the row's `constraint`."""
        made = copy(self)
        made.seen = None if self.seen is None else self.seen.fork()
        made.constraint = constraint
        return made

    def apply(self, position: int) -> bool:
        """Whether any of them changes the logits at `position`."""
        return position < self._end_position or (self.constraint is not None and bool(self.constraint.held))

    def held(self, position: int) -> npt.NDArray[np.int32]:
        """Return the stop tokens that are excluded at `position`. A constraint that allows nothing else goes first."""
        if position < self._held and not (self.constraint is not None and self.constraint.only_stops):
            return self.stops
        return np.array([] if self.constraint is None else self.constraint.held, np.int32)


class SeenTokens:
    """Distinct tokens of a row and their counts among generated tokens. Prompt tokens are included if the repetition
    penalty is on."""

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
        self._slots: dict[int, int] = {}  # of generated tokens
        for token in history:
            self.add(token)

    def fork(self) -> SeenTokens:
        """Return counts that go on from here by themselves."""
        made = copy(self)
        made._ids, made._counts, made._slots = self._ids.copy(), self._counts.copy(), self._slots.copy()
        return made

    @property
    def ids(self) -> npt.NDArray[np.int32]:
        return self._ids[: self._size]

    @property
    def counts(self) -> npt.NDArray[np.float32]:
        """Count of each of `ids` among generated tokens; 0 for tokens of the prompt alone."""
        return self._counts[: self._size]

    def add(self, token: int) -> None:
        """Count one generated token."""
        self.generated += 1
        slot = self._slots.get(token)
        if slot is None:
            slot = self._slots[token] = self._slot_of(token)
        self._counts[slot] += 1

    def _slot_of(self, token: int) -> int:
        """Return the slot of a newly generated token: that of the prompt, if it is there, else a new one at the end."""
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

    def deduction(self) -> npt.NDArray[np.float32]:
        """Amounts (n,) that the presence and frequency penalties subtract from the logits of `ids`."""
        return np.asarray(self.presence * (self.counts > 0) + self.frequency * self.counts, np.float32)


def process_logits(logits: Any, rows: Sequence[LogitsProcessors], positions: Sequence[int], put: Put = direct) -> Any:
    """Return `logits` (B, V) after all rows' processors, in float32 if any applies. Other rows keep their values.

    Order: biases and held-back stop tokens, repetition penalty, presence and frequency penalties. `put` uploads arrays.
    """
    places = [i for i, (row, position) in enumerate(zip(rows, positions, strict=True)) if row.apply(position)]
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
        if len(held := row.held(position)):
            pairs.append((held, np.full(len(held), -np.inf, np.float32)))
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
    index, repetition, deduction, ids = put(
        np.repeat(np.array([place for place, _ in rows], np.int32), lengths),
        np.repeat(np.array([seen.repetition for _, seen in rows], np.float32), lengths),
        np.concatenate([seen.deduction() for _, seen in rows]),
        np.concatenate([seen.ids for _, seen in rows]),
    )
    old = logits[index, ids]
    logits[index, ids] = mx.where(old > 0, old / repetition, old * repetition) - deduction
    return logits


def _distinct(tokens: Sequence[int]) -> npt.NDArray[np.int32]:
    """Return the distinct `tokens`, which are not negative, sorted."""
    numbers = np.frombuffer(array("q", tokens), np.int64)
    return np.flatnonzero(np.bincount(numbers)).astype(np.int32)


def _penalised(request: Submit) -> bool:
    sampling = request.sampling
    return bool(sampling.repetition_penalty != 1 or sampling.presence_penalty or sampling.frequency_penalty)
