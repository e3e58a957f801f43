"""A mixture's experts with its shared expert behind them: one more that every token chooses."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .replace import full_name

_SWITCH = "mlx_lm.models.switch_layers"
_PROJECTIONS, _ARRAYS = ("gate_proj", "up_proj", "down_proj"), ("weight", "scales", "biases", "bias")
_KINDS = {f"{_SWITCH}.SwitchLinear": nn.Linear, f"{_SWITCH}.QuantizedSwitchLinear": nn.QuantizedLinear}


@dataclass(frozen=True)
class JoinedExperts:
    """A SwitchGLU `module` of the experts of `own`, and of `shared` behind them, by whose arrays both compute."""

    module: Any
    own: Any
    shared: Any

    @classmethod
    def of(cls, experts: Any, shared: Any | None) -> JoinedExperts | None:
        """The experts of a mixture together; None where they differ in more than their weights."""
        if shared is None or full_name(type(experts)) != f"{_SWITCH}.SwitchGLU" or not _is_silu(experts):
            return None
        if set(shared.children()) != {*_PROJECTIONS}:
            return None
        if not all(_alike(experts[name], shared[name]) for name in _PROJECTIONS):
            return None
        module = copy.copy(experts)
        for name in _PROJECTIONS:
            module[name] = _joined(experts[name], shared[name])
        return cls(module, experts, shared)

    def share(self) -> None:
        """Let the layers' own arrays be views of those of all experts."""
        for name in _PROJECTIONS:
            joined, own, shared = (layer[name] for layer in (self.module, self.own, self.shared))
            for array in _names(joined):
                _share(joined[array], own, shared, array)


def _is_silu(experts: Any) -> bool:
    return full_name(type(experts.activation)) == f"{_SWITCH}.SwiGLU"


def _alike(own: Any, shared: Any) -> bool:
    """Whether a linear layer of experts and one of a shared expert have weights of the same kind and shape."""
    if _KINDS.get(full_name(type(own))) is not type(shared) or _names(own) != _names(shared):
        return False
    if "scales" in own and (own.bits, own.group_size, own.mode) != (shared.bits, shared.group_size, shared.mode):
        return False
    pairs = [(own[name], shared[name]) for name in _names(own)]
    return all(one.shape[1:] == other.shape and one.dtype == other.dtype for one, other in pairs)


def _joined(own: Any, shared: Any) -> Any:
    """A layer like `own` with one more expert."""
    made = copy.copy(own)
    for name in _names(own):
        made[name] = mx.concatenate([own[name], shared[name][None]])
        mx.eval(made[name])
        _share(made[name], own, shared, name)  # so that the memory of both is free
    return made


def _share(whole: Any, own: Any, shared: Any, name: str) -> None:
    """Let arrays of that name be views of `whole`. An index would make a copy."""
    own[name], shared[name] = whole[:-1], whole[-1:].squeeze(0)
    mx.eval(own[name], shared[name])


def _names(layer: Any) -> Sequence[str]:
    return [name for name in _ARRAYS if layer.get(name) is not None]
