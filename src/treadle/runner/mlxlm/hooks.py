"""Hooks into mlx-lm's models: attention by the KV backend's caches, and the tokens that reach the output head."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .fetched import FETCHED
from .latent import is_latent

_NORMS = (
    "model.norm",
    "language_model.model.norm",
    "model.final_layernorm",
    "model.final_norm",
    "model.output_norm",
    "model.embedding_norm",
    "language_model.model.embedding_norm",
    "backbone.norm_f",
    "transformer.ln_f",
)


Rules = Callable[[dict[str, Any]], Mapping[str, Any]]
"""What mlx-lm makes of a model's weights: a model's `sanitize`."""


@dataclass(frozen=True)
class Window:
    """Attention mask of a cache that attends itself: each token sees the last `size` tokens, its own included."""

    size: int


@dataclass
class Selection:
    """The tokens of a pass, (T, 1, D) or (1, T, D), that reach the model's head: those at `rows`, or all. With `keep`,
    the hidden states (n, D) of n tokens, or of all (...), are kept in `states`, one array for each time the norm was
    computed. `narrowed` says that the last layer has computed the selected tokens alone. `fed` are hidden states (T, W)
    that the embedding of a head for drafts joins with the tokens.

    Kept states are those behind the norm, or `before_norm`. With `layers`, in ascending order, the residual streams in
    front of these layers, which `tapped` has during a pass, stand before them, side by side.

    `early` are arrays of the last pass that may be evaluated before the rest of it, in their order.
    """

    rows: Any | None = None
    narrowed: bool = False
    keep: Any | None = None
    states: list[Any] = field(default_factory=list)
    fed: Any | None = None
    before_norm: bool = False
    layers: tuple[int, ...] = ()
    tapped: dict[int, Any] = field(default_factory=dict)
    early: Sequence[Any] = ()

    def take_early(self) -> Sequence[Any]:
        """Return the early arrays of the last pass, once."""
        early, self.early = self.early, ()
        return early

    def take(self) -> Any:
        """Return the kept hidden states, once. Raises ValueError where the norm was not computed exactly once."""
        (states,), self.states = self.states, []
        return states

    def kept_of(self, states: Any) -> Any:
        """Return those of the `states` (..., D) of all tokens that are to be kept."""
        return states.reshape(-1, states.shape[-1])[self.keep]

    def add(self, states: Any) -> None:
        """Keep the last `states` (..., D) of a pass, behind those of `layers`. Raises KeyError where a layer was not
        computed."""
        parts = [*(self.tapped.pop(layer) for layer in self.layers), self.kept_of(states)]
        self.states.append(parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1))

    def parts(self, states: Any) -> tuple[Any, Any]:
        """Return the kept `states` (n, W) of layers, and those behind the norm, which are the same without layers."""
        if not self.layers:
            return states, states
        first = states.shape[-1] // (len(self.layers) + 1) * len(self.layers)
        return states[:, :first], states[:, first:]


@contextmanager
def keeping(selection: Selection, tokens: Any) -> Iterator[None]:
    """Keep the hidden states of `tokens`, by their index, inside the block; `Selection.take` returns them."""
    selection.keep, selection.states = tokens, []
    try:
        yield
    finally:
        selection.keep = None


@contextmanager
def kept(selection: Selection | None, tokens: Any | None) -> Iterator[list[Any]]:
    """Keep the hidden states of `tokens` in the list that is returned, inside the block, in place of those that were to
    be kept before; none without tokens. No effect without a selection."""
    states: list[Any] = []
    if selection is None:
        yield states
        return
    before = selection.keep, selection.states
    selection.keep, selection.states = tokens, states
    try:
        yield states
    finally:
        selection.keep, selection.states = before


@contextmanager
def selected(selection: Selection | None, rows: Any | None) -> Iterator[None]:
    """Let the head compute only the tokens at `rows` inside the block. No effect without a selection."""
    if selection is None:
        yield
        return
    selection.rows = rows
    try:
        yield
    finally:
        selection.rows = None


class SelectingNorm(nn.Module):  # type: ignore[misc]
    """A model's last norm that passes on a selection of tokens. The head after it is the largest layer, and most tokens
    of a prompt do not need it."""

    def __init__(self, norm: Any, selection: Selection) -> None:
        super().__init__()
        self.norm = norm
        self._selection = selection

    def __call__(self, x: Any) -> Any:
        before, x, rows = x, self.norm(x), self._selection.rows
        if self._selection.keep is not None:
            self._selection.add(before if self._selection.before_norm else x)
        if rows is None or self._selection.narrowed:
            return x
        return x[rows] if x.shape[1] == 1 else x[:, rows]

    @property
    def selection(self) -> Selection:
        return self._selection


def derived(model: Any, members: Mapping[str, Any]) -> Any:
    """Return the class `model` with other `members`. It has the name and the module of `model`, by which its kind is
    known."""
    return type(model.__name__, (model,), {**members, "__module__": model.__module__})


def sanitizing(model: Any, sanitized: Callable[[Any, Rules, dict[str, Any]], Mapping[str, Any]]) -> Any:
    """Return the class `model`, whose weights are `sanitized`: made from the module, from mlx-lm's own rules for them
    (none: they stay as they are), and from those that were read."""

    def sanitize(self: Any, weights: dict[str, Any]) -> dict[str, Any]:
        return dict(sanitized(self, getattr(super(made, self), "sanitize", dict), weights))

    made = derived(model, {"sanitize": sanitize})
    return made


def without_head(model: Any) -> Any:
    """Return the class `model` of a decoder, for weights that may be named without the decoder's prefix."""

    def sanitized(module: Any, own: Rules, weights: dict[str, Any]) -> Mapping[str, Any]:
        prefixed = any(name.startswith(("model.", "language_model.")) for name in weights)
        return own(weights if prefixed else {f"model.{name}": value for name, value in weights.items()})

    return sanitizing(model, sanitized)


def reading_others(model: Any, weights: Mapping[str, Any]) -> Any:
    """Return the class `model`, for other `weights` than those that mlx-lm reads."""
    return sanitizing(model, lambda module, own, read: own(dict(weights)))


def select(model: Any) -> Selection | None:
    """Put a `SelectingNorm` before the model's head, unless it has one. None if the last norm is not known."""
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
    """Wrap mlx-lm's attention function: a cache with `attend` computes attention over the keys and values that it
    returned itself, also for a layer with another cache, or without one."""

    def attention(
        queries: Any, keys: Any, values: Any, cache: Any, scale: float, mask: Any, sinks: Any | None = None
    ) -> Any:
        owner = FETCHED.cache_of(keys)
        cache = cache if owner is None else owner
        attend = getattr(cache, "attend", None)
        if attend is None:
            return shared(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)
        if is_latent(keys, values, mask, cache):
            return cache.attend_latent(queries, mask, keys, scale)
        if mask is not None and not isinstance(mask, Window):
            raise NotImplementedError("the model makes a mask of its own")
        return attend(queries, keys, values, scale, mask.size if mask is not None else 0, sinks)

    attention.routes = True  # type: ignore[attr-defined]
    return attention
