"""Rotary positions of three axes (M-RoPE; Qwen2-VL, 2024): each pair of a head's dimensions turns by one of them.

mlx-lm's text models turn all pairs by one position. With three equal axes, as of text, that is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from .called_as import called_as
from .injection import text_model

_ROTATIONS = ("mlx.nn.layers.positional_encoding", "mlx_lm.models.rope_utils")
_INTERLEAVED = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
"""mlx-lm's modules of models whose sections are interleaved, whether or not their configuration says so."""


@dataclass(frozen=True)
class RotaryAxes:
    """`sections` are the numbers of pairs for time, height and width: one behind the other; or, `interleaved`, every
    third pair from the second on is for height, every third from the third on for width, up to as many."""

    sections: tuple[int, ...]
    interleaved: bool = False

    @classmethod
    def of(cls, model: Any) -> RotaryAxes | None:
        """The axes of mlx-lm's `model`; None where it has one."""
        arguments = vars(getattr(text_model(model), "args", None) or object)
        for name in ("rope_parameters", "rope_scaling"):
            found = arguments.get(name)
            if isinstance(found, dict) and found.get("mrope_section"):
                kinds = {type(one).__module__.rpartition(".")[2] for one in (model, text_model(model))}
                interleaved = bool(found.get("mrope_interleaved")) or not kinds.isdisjoint(_INTERLEAVED)
                return cls(tuple(map(int, found["mrope_section"])), interleaved)
        return None

    def of_pairs(self, pairs: int) -> npt.NDArray[np.int32]:
        """The axis (pairs,) of each pair of rotated dimensions."""
        if not self.interleaved:
            made = np.repeat(np.arange(len(self.sections), dtype=np.int32), self.sections)
            return np.pad(made, (0, max(0, pairs - len(made))))[:pairs]
        made = np.zeros(pairs, np.int32)
        for axis, count in enumerate(self.sections[1:], 1):
            made[axis : 3 * count : 3] = axis
        return made


@contextmanager
def turning_by(axes: RotaryAxes, rotations: Sequence[Any]) -> Iterator[None]:
    """Let `rotations` take offsets (T, 3) inside the block, of tokens (T, heads, 1, D)."""
    with called_as((rotation, partial(_turned, axes, rotation)) for rotation in rotations):
        yield


def replace_parts(model: Any, made: Callable[[Any], Any]) -> None:
    """Put what `made` returns of each part of `model`'s modules, such as a rotation, in its place."""
    for _, module in model.named_modules():
        for name, one in module.children().items():
            if (other := made(one)) is not one:
                setattr(module, name, other)


def rotations_of(model: Any) -> list[Any]:
    """The modules of `model` that rotate heads."""
    modules = (module for _, module in model.named_modules())
    return [one for one in modules if any(kind.__module__ in _ROTATIONS for kind in type(one).__mro__)]


def _turned(axes: RotaryAxes, rotation: Any, own: Any, x: Any, offset: Any = 0, **more: Any) -> Any:
    if not isinstance(offset, mx.array) or offset.ndim < 2:
        return own(x, offset, **more)
    dims = int(rotation.dims if hasattr(rotation, "dims") else rotation.dim)
    of_pairs = axes.of_pairs(dims // 2)
    repeated = np.repeat(of_pairs, 2) if getattr(rotation, "traditional", False) else np.tile(of_pairs, 2)
    axis = mx.array(np.pad(repeated, (0, x.shape[-1] - dims)))
    turned = [own(x, offset[:, i], **more) for i in range(offset.shape[1])]
    made = turned[0]
    for i, other in enumerate(turned[1:], 1):
        made = mx.where(axis == i, other, made)
    return made
