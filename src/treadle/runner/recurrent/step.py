"""Segments of a step for recurrent layers: the slots that hold their states before and after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

FRESH = -1
"""Source of a segment whose sequence begins with it. As a target: the state is not kept."""
PADDING = -2
"""Source of a segment of padding tokens: its outputs are finite, and mean nothing."""

Numbers = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class SlotSegment:
    """The `count` tokens of one sequence in a batch, from index `first` on. The state before them is in slot `source`,
    and goes to slot `target` with them; after the first `split` of them it also goes to slot `aside`. No segment of a
    pass reads a slot that another one, or itself, writes."""

    first: int
    count: int
    source: int = FRESH
    target: int = FRESH
    split: int = 0
    aside: int = FRESH


@dataclass(frozen=True)
class Norm:
    """Normalization of queries and keys before a gated delta rule, as mlx-lm's `normalize_qk`: each is divided by its
    length, and queries are scaled by `inverse_scale`, the key's dimension to the power of -1/2."""

    inverse_scale: float
    epsilon: float

    @property
    def scales(self) -> tuple[float, float, float]:
        """Factors of queries and keys divided by their root mean squares, and what is added to the mean squares."""
        return self.inverse_scale**2, self.inverse_scale, self.epsilon * self.inverse_scale**2


class Part(NamedTuple):
    """`length` tokens of a run from index `first` on, and the slots of the states behind them."""

    first: int
    length: int
    targets: list[int]


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive segments that are computed together: one of several tokens, or all of one token each."""

    first: int
    count: int
    segments: Sequence[SlotSegment]

    @property
    def singles(self) -> bool:
        return self.count == len(self.segments)

    @property
    def parts(self) -> list[Part]:
        """The run, split where a state goes to a slot."""
        last = self.segments[-1]
        if last.aside == FRESH:
            return [Part(self.first, self.count, [one.target for one in self.segments])]
        first = Part(self.first, last.split, [last.aside])
        return [first, Part(self.first + last.split, self.count - last.split, [last.target])]


@dataclass
class RecurrentPass:
    """A step's data that all recurrent layers share.

    The batch's tokens belong to `segments`, which cover them in order. On the device `table` (segments, 6) int32 has
    the numbers of each, and `rows` (T,) int32 has each token's segment; both may have more lines:
    those of a `count` of 0 do nothing. MLX's operations need neither. `count` is T.
    """

    segments: Sequence[SlotSegment] = ()
    table: Any = None
    rows: Any = None
    count: int = 0
    _runs: list[Run] | None = field(default=None, repr=False)
    _singles: tuple[list[int], list[int]] | None = field(default=None, repr=False)
    _empty: dict[tuple[int, Any], Any] = field(default_factory=dict, repr=False)

    def begin(self, segments: Sequence[SlotSegment], table: Any | None = None, rows: Any | None = None) -> None:
        """Take a step's segments, and their arrays on the device where there are kernels."""
        self.segments, self.table, self.rows = segments, table, rows
        self._runs = self._singles = None
        count = sum(one.count for one in segments) if rows is None else int(rows.shape[0])
        if self.count != count:
            self._empty.clear()
            self.count = count

    def replace(self, table: Any, rows: Any) -> None:
        """Put other arrays in the place of the step's, as for a trace. Nothing that was made with those stays."""
        self.table, self.rows = table, rows
        self._empty.clear()

    @property
    def runs(self) -> list[Run]:
        """The segments, in their order, as few runs."""
        if self._runs is None:
            own = [one for one in self.segments if one.count]
            self._runs = [
                _run(list(group)) for _, group in groupby(own, lambda one: -1 if one.count == 1 else one.first)
            ]
        return self._runs

    @property
    def singles(self) -> tuple[list[int], list[int]] | None:
        """The slots that are read and written, where all segments are of one token; None where one has more."""
        if self.count != len(self.segments):
            return None
        if self._singles is None:
            self._singles = [one.source for one in self.segments], [one.target for one in self.segments]
        return self._singles

    @property
    def begins(self) -> Any:
        """Whether each token (T,) is its sequence's first."""
        if self.table is None:
            first = np.zeros(self.count, np.bool_)
            first[[one.first for one in self.segments if one.count and one.source == FRESH]] = True
            return mx.array(first)
        lines = self.table[self.rows]
        return (lines[:, 2] == FRESH) & (lines[:, 0] == mx.arange(self.count))

    def empty(self, channels: int, dtype: Any) -> Any:
        """An array (T, 0, channels): a convolution's state that adds nothing to the inputs that it is put before."""
        key = channels, dtype
        if key not in self._empty:
            self._empty[key] = mx.zeros((self.count, 0, channels), dtype)
            mx.eval(self._empty[key])  # it must not belong to the program that is traced now
        return self._empty[key]


def _run(segments: list[SlotSegment]) -> Run:
    return Run(segments[0].first, sum(one.count for one in segments), segments)


def tables(segments: Sequence[SlotSegment]) -> tuple[Numbers, Numbers]:
    """Return `RecurrentPass.table` and `rows` of segments, for the copy to the device."""
    lines = [(one.first, one.count, one.source, one.target, one.split, one.aside) for one in segments]
    table = np.array(lines, np.int32).reshape(-1, 6)
    return table, np.repeat(np.arange(len(segments), dtype=np.int32), table[:, 1])
