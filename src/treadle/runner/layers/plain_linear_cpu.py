"""Plain linear layers on the CPU: one product of few tokens for all layers that read the same input.

Around a product of a small model are operations that take longer: views of weights and input, and the start of each.
For few tokens, an attention's projections of its input, or the two of a gated MLP, are one product.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import mlx.core as mx

from .replace import Faster, Makers, full_name

_LINEAR = "mlx.nn.layers.linear.Linear"
_NAMES = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkvz", "in_proj_ba"),
)
"""Names of layers beside each other that read the same input, in most modules."""
MOST_TOKENS = 32
"""The most tokens of one product. Its parts have gaps between tokens, by which MLX reads many of them slower."""
_MOST_LEFT_OUT = 8
"""Inputs in a row that not all layers were given, after which they are computed apart."""


class PlainLinearMakers:
    """Makers for the linear layers in float32 of `module`."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._siblings: dict[int, tuple[Siblings, int]] | None = None

    @property
    def makers(self) -> Makers:
        return {_LINEAR: self._linear}

    def _linear(self, layer: Any) -> Faster | None:
        if not _is_plain(layer):
            return None
        if self._siblings is None:
            groups = [(layers, Siblings(layers)) for layers in _groups(self._module)]
            self._siblings = {id(one): (group, i) for layers, group in groups for i, one in enumerate(layers)}
        shape, examples = layer.weight.shape, partial(_examples, layer.weight.shape[1])
        if id(layer) not in self._siblings:
            call = partial(_product, layer.weight.T, layer.get("bias"))
            return Faster({"__call__": call}, (shape, "bias" in layer), "linear layers", examples)
        group, place = self._siblings[id(layer)]
        kind = group.shapes, place, "bias" in layer
        label = "linear layers in one product with others"
        call = partial(group.compute, place)
        return Faster({"__call__": call}, kind, label, examples, prepare=group.expect_all)


class Siblings:
    """Linear `layers` that are given the same input one after the other: the first one computes all of them.

    Their weights become parts of one array. Where some are left out, they are computed apart from then on. The layers
    themselves are not kept: they compute by this, and would be freed by the garbage collector alone.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        self.shapes = tuple(one.weight.shape for one in layers)
        self._ends = list(accumulate(rows for rows, _ in self.shapes))
        weight, weights = self._joined(layers, "weight")
        bias, biases = self._joined(layers, "bias") if "bias" in layers[0] else (None, [None] * len(layers))
        self._whole = weight.T, bias
        self._parts = [(one.T, own) for one, own in zip(weights, biases, strict=True)]
        self._input: Any = None
        self._left: dict[int, Any] = {}
        self._left_out = 0

    def _joined(self, layers: Sequence[Any], name: str) -> tuple[Any, list[Any]]:
        """One array of all layers' arrays, and its parts, which take their place."""
        whole = mx.concatenate([one[name] for one in layers])
        parts = [whole[a:b] for a, b in pairwise([0, *self._ends])]
        mx.eval(whole, parts)
        for one, part in zip(layers, parts, strict=True):
            one[name] = part
        return whole, parts

    def expect_all(self) -> None:
        """Compute all layers in one product, until some are left out."""
        self._input, self._left, self._left_out = None, {}, 0

    def compute(self, place: int, x: Any) -> Any:
        """Return the output (..., N) of the layer at `place` for `x` (..., K)."""
        if x.size > MOST_TOKENS * x.shape[-1] or self._left_out >= _MOST_LEFT_OUT:
            return _product(*self._parts[place], x)
        if x is not self._input or place not in self._left:
            self._left_out = self._left_out + 1 if self._left else 0
            self._input = x
            self._left = dict(enumerate(mx.split(_product(*self._whole, x), self._ends[:-1], axis=-1)))
        part = self._left.pop(place)
        if not self._left:
            self._input = None
        return part


def _groups(module: Any) -> Iterator[list[Any]]:
    """The layers of `module` that are given the same input."""
    for parent in module.modules():
        for names in _NAMES:
            layers = [parent.get(name) for name in names]
            if all(_is_plain(one) for one in layers) and _alike(layers):
                yield layers


def _alike(layers: Sequence[Any]) -> bool:
    return len({(one.weight.shape[1], "bias" in one) for one in layers}) == 1


def _is_plain(layer: Any) -> bool:
    return full_name(type(layer)) == _LINEAR and bool(layer.weight.dtype == mx.float32)


def _product(weight: Any, bias: Any | None, x: Any) -> Any:
    return x @ weight if bias is None else mx.addmm(bias, x, weight)


def _examples(columns: int) -> Iterator[tuple[Any]]:
    for rows in (1, 3, MOST_TOKENS + 1):
        yield (mx.random.normal((rows, 1, columns), key=mx.random.key(rows)),)
