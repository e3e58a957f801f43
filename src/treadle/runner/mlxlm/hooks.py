"""Where this server puts itself into a model of mlx-lm: its attention, and what goes on to its head."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.nn as nn

_NORMS = (
    "model.norm",
    "language_model.model.norm",
    "model.final_layernorm",
    "model.embedding_norm",
    "transformer.ln_f",
)


@dataclass(frozen=True)
class Window:
    """Stands for a mask where a layer's cache attends itself: each token sees the last `size` up to itself."""

    size: int


@dataclass
class Selection:
    """The tokens of a pass, (T, 1, D) or of one sequence (1, T, D), that go on to the model's head: those at `rows`, or
    all."""

    rows: Any | None = None


@contextmanager
def selected(selection: Selection | None, rows: Any | None) -> Iterator[None]:
    """Let the head see only the tokens at `rows`, while it lasts, where there is a selection."""
    if selection is None:
        yield
        return
    selection.rows = rows
    try:
        yield
    finally:
        selection.rows = None


class SelectingNorm(nn.Module):  # type: ignore[misc]
    """A model's last norm, which lets only a selection through: the head behind it is the largest layer, and most
    tokens of a prompt need nothing of it."""

    def __init__(self, norm: Any, selection: Selection) -> None:
        super().__init__()
        self.norm = norm
        self._selection = selection

    def __call__(self, x: Any) -> Any:
        x, rows = self.norm(x), self._selection.rows
        if rows is None:
            return x
        return x[rows] if x.shape[1] == 1 else x[:, rows]

    @property
    def selection(self) -> Selection:
        return self._selection


def select(model: Any) -> Selection | None:
    """Put a `SelectingNorm` before the model's head, if it has none; None where it is not known what comes there."""
    for path in _NORMS:
        *parents, name = path.split(".")
        parent = model
        for part in parents:
            parent = getattr(parent, part, None)
        norm = getattr(parent, name, None)
        if isinstance(norm, SelectingNorm):
            return norm.selection
        if isinstance(norm, nn.Module):
            selection = Selection()
            setattr(parent, name, SelectingNorm(norm, selection))
            return selection
    return None


def routed(shared: Callable[..., Any]) -> Callable[..., Any]:
    """mlx-lm's attention function, for caches that do not attend themselves; the others are asked."""

    def attention(
        queries: Any, keys: Any, values: Any, cache: Any, scale: float, mask: Any, sinks: Any | None = None
    ) -> Any:
        attend = getattr(cache, "attend", None)
        if attend is None:
            return shared(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)
        if mask is not None and not isinstance(mask, Window):
            raise NotImplementedError("the model makes a mask of its own")
        return attend(queries, keys, values, scale, mask.size if mask is not None else 0, sinks)

    attention.routes = True  # type: ignore[attr-defined]
    return attention
