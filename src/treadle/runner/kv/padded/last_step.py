"""The last decode step over mlx-lm's caches, so that it can be taken back: these change in place.

Keys and values are not copied: a step writes them behind those that were there, into arrays that grow, or over a token
that has left a window. States of recurrent layers are replaced, so that the ones before are there as long as they are
referred to. Small arrays are updated in place, and are kept as arrays of their own.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from ... import mlxlm
from ...mlxlm import Caches, MlxLm
from .batch import PaddedState


class _Batch(NamedTuple):
    """Sequences that decode together, their caches, and the fields that those had before."""

    members: list[PaddedState | None]
    caches: Caches
    before: list[dict[str, Any]]


class LastStep:
    """Batches of a decode step, one a sequence where nothing is batched."""

    def __init__(self, library: MlxLm) -> None:
        self._library = library
        self._batches: list[_Batch] = []

    def clear(self) -> None:
        self._batches = []

    def begin(self, members: Sequence[PaddedState | None], caches: Caches) -> None:
        """Keep the state of `caches`, in which `members` are about to decode a token."""
        before = [{name: _kept(value) for name, value in vars(leaf).items()} for leaf in self._library.leaves(caches)]
        self._batches.append(_Batch(list(members), caches, before))

    def forget(self, state: PaddedState) -> None:
        """Forget a sequence that leaves, and the caches of a batch that all have left."""
        for batch in self._batches:
            batch.members[:] = [None if member is state else member for member in batch.members]
        self._batches = [batch for batch in self._batches if any(batch.members)]

    def take_back(self) -> None:
        """Give all caches the state that they had before the step."""
        for batch in self._batches:
            self._restore(batch.caches, batch.before)
        self.clear()

    def caches_before(self, state: PaddedState) -> Caches | None:
        """Return a sequence's caches as they were before the step, lazily; None if it was not in it."""
        for batch in self._batches:
            if state in batch.members:
                caches = mlxlm.shallow_copies(batch.caches)
                self._restore(caches, copy.deepcopy(batch.before))  # changes of either do not reach the other
                row = batch.members.index(state)
                return mlxlm.extract(caches, row) if len(batch.members) > 1 else caches
        return None

    def _restore(self, caches: Caches, before: list[dict[str, Any]]) -> None:
        for leaf, fields in zip(self._library.leaves(caches), before, strict=True):
            vars(leaf).update(fields)


def _kept(value: Any) -> Any:
    if isinstance(value, mx.array) and value.ndim < 2:
        return copy.copy(value)
    return list(value) if isinstance(value, list) else value
