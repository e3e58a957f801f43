"""Passes of a model over tokens that have features, or positions of three axes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np

from ..device.staging import Put
from ..mlxlm import Injection, RotaryAxes, embedding_of, injecting, rotations_of, turning_by
from .segments import RowSegment


class ColumnPasses:
    """Calls of mlx-lm's `module`, or of its `decoder` if there is one, which takes an injection."""

    def __init__(self, module: Any, decoder: Any | None) -> None:
        self._module = module
        self._decoder = decoder

    @cached_property
    def axes(self) -> RotaryAxes | None:
        """The axes of the model's positions; None where it has one."""
        return RotaryAxes.of(self._module)

    @cached_property
    def _rotations(self) -> list[Any]:
        return rotations_of(self._module)

    def compute(self, tokens: Any, cache: Sequence[Any], injection: Injection | None, *, axes: bool) -> Any:
        """Logits of the selected `tokens` (T, 1), some of which have an `injection`; with positions of three `axes`, or
        of one."""
        with self._turning(axes):
            if self._decoder is not None:
                injected = {} if injection is None else {"injection": injection}
                return self._decoder(tokens, cache=cache, **injected)
            if injection is None:
                return self._module(tokens, cache=cache)
            with injecting(self._module, injection):
                return self._module(tokens, cache=cache)

    @contextmanager
    def _turning(self, axes: bool) -> Iterator[None]:
        if not axes:
            yield
            return
        assert self.axes is not None
        with turning_by(self.axes, self._rotations):
            yield

    @property
    def reasons(self) -> tuple[str, str]:
        """Why tokens can't have features, and why positions can't have three axes; empty where they can."""
        features = "" if embedding_of(self._module) is not None else "the name of the model's embedding is not known"
        return features, "" if self.axes is not None else "the model's positions have one axis"


def injection_of(segments: Sequence[RowSegment], firsts: Sequence[int], count: int, put: Put) -> Injection | None:
    """What takes the place of embeddings of a pass of `count` tokens, in which segments begin at `firsts`; None where
    none has features."""
    sources, parts, total = np.full(count, -1, np.int32), [], 0
    for segment, first in zip(segments, firsts, strict=True):
        if segment.features is not None:
            places = first + np.asarray(segment.features.places)
            sources[places] = np.arange(total, total + len(places))
            total += len(places)
            parts.append(segment.features)
    if not parts:
        return None
    source: Any = put(sources)[0]
    have, at = (source >= 0)[:, None], mx.maximum(source, 0)
    levels = zip(*(part.deepstack for part in parts), strict=True)
    deepstack = [mx.where(have, mx.concatenate(list(level))[at], 0) for level in levels]
    return Injection(have, mx.concatenate([part.rows for part in parts])[at], deepstack)
