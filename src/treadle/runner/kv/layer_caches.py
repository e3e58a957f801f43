"""A model's layer caches as a paged backend arranges them, for passes that are traced."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..mlxlm import FETCHED
from ..recurrent.layer import RecurrentLayer
from .paged.layer import PagedLayer
from .paged.paged_pass import PagedPass


@dataclass(frozen=True)
class LayerCaches:
    """A model's caches in their `arrangement`: those of layers with pages, and with slots."""

    arrangement: Sequence[Any]
    paged: Sequence[PagedLayer]
    recurrent: Sequence[RecurrentLayer]

    @classmethod
    def of(cls, cache: Sequence[Any]) -> LayerCaches:
        leaves = [leaf for one in cache for leaf in (one if isinstance(one, list) else [one])]
        paged = [leaf for leaf in leaves if isinstance(leaf, PagedLayer)]
        return cls(cache, paged, [leaf for leaf in leaves if isinstance(leaf, RecurrentLayer)])

    @property
    def step(self) -> PagedPass:
        return self.paged[0].step

    @property
    def slots(self) -> list[Any]:
        """The step's arrays for recurrent layers."""
        return [] if not self.recurrent else [self.recurrent[0].step.table, self.recurrent[0].step.rows]

    @contextmanager
    def tracing(self, slots: Sequence[Any]) -> Iterator[None]:
        """Let recurrent layers have the arrays `slots` inside the block, and nothing that is made there stay."""
        before = self.slots
        try:
            self._put(slots)
            yield
        finally:
            self._put(before)
            FETCHED.clear()

    def _put(self, slots: Sequence[Any]) -> None:
        if self.recurrent:
            self.recurrent[0].step.replace(*slots)
            for layer in self.recurrent:
                layer.take_written()  # arrays of a trace are no arrays
