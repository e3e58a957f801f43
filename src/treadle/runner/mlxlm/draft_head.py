"""Heads for drafts, which read hidden states of a model beside tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


class NoHead(Exception):
    """A model without a head that can be used; the text is the reason."""


@dataclass(frozen=True)
class DraftHead:
    """A head as a model: `module` is called like the model, and `own` are its modules that are not the model's. Before
    states are fed, those of the model are multiplied by `scale`, and its own by `own_scale` (None: not). Its logits are
    for tokens `ids` of the model (None: for all, in order)."""

    module: Any
    own: tuple[Any, ...]
    scale: Any | None = None
    own_scale: Any | None = None
    ids: Any | None = None
