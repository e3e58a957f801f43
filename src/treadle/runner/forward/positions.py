"""Positions of tokens apart from their index in the cache, and the cached tokens that each token sees.

The index counts a sequence's cached tokens without gaps; the position is what rotary embeddings turn by. They differ
where only a part of a prompt is computed, and behind images.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .segments import RowSegment, with_columns

Numbers = npt.NDArray[np.int32]
_FIRST = 64


class SequencePositions:
    """Positions of a sequence's first `count` tokens, by their index: (count,), or (count, 3) where some token has
    three axes. They do not decrease; those behind the last known one follow it."""

    def __init__(self, known: Numbers | None = None) -> None:
        self.count = 0
        self._known: Numbers = np.zeros(_FIRST, np.int32)
        if known is not None:
            self.put(0, known)

    def put(self, start: int, positions: Numbers) -> None:
        """Set the positions of tokens from index `start` on, behind which none is known any more."""
        if start > self.count:
            positions = joined([self._following(start), positions])
            start = self.count
        if positions.ndim > self._known.ndim:
            self._known = np.repeat(self._known[:, None], positions.shape[1], axis=1)
        self.count = start + len(positions)
        if self.count > len(self._known):
            room = np.zeros((2 * self.count, *self._known.shape[1:]), np.int32)
            self._known = np.concatenate([self._known[:start], room])
        self._known[start : self.count] = positions if positions.ndim == self._known.ndim else positions[:, None]

    def _following(self, end: int) -> Numbers:
        """Positions of text behind the known tokens, up to index `end`."""
        first = int(self._known[self.count - 1].max()) + 1 if self.count else 0
        return np.arange(first, first + end - self.count, dtype=np.int32)

    def of(self, start: int, count: int) -> Numbers:
        """Positions of `count` tokens from index `start` on, which are known or follow those that are."""
        end = start + count
        if end <= self.count:
            return self._known[start:end].copy()
        following = self._following(end)
        if start >= self.count:
            return following[start - self.count :]
        return joined([self._known[start : self.count], following])

    def first_within(self, start: int, count: int, window: int, chunk: int) -> Numbers:
        """The first index (count,) that each of `count` tokens from index `start` on sees with a `window`, or from the
        beginning of its `chunk`, of so many positions (0: none). Where there are three axes, they count indices."""
        known = self._known[: start + count]
        if known.ndim > 1 or not (window or chunk):
            return _first(np.arange(start, start + count, dtype=np.int32), window, chunk)
        own = known[start:]
        if window:
            return np.searchsorted(known, own - window, side="right").astype(np.int32)
        return np.searchsorted(known, own // chunk * chunk).astype(np.int32)


class Columns:
    """The segments of a pass whose tokens have columns, and the tokens of the batch that each one begins at; `indices`
    (T,) are those of all tokens."""

    def __init__(self, segments: Sequence[RowSegment], firsts: Sequence[int], indices: Numbers) -> None:
        self._own = [
            (segment, first) for segment, first in zip(segments, firsts, strict=True) if with_columns([segment])
        ]
        self._indices = indices
        self._visible: dict[tuple[int, int], Numbers | None] = {}

    @classmethod
    def of(cls, segment: RowSegment) -> Columns | None:
        """Those of a segment by itself, if it has any."""
        indices = np.arange(segment.start, segment.end, dtype=np.int32)
        return cls([segment], [0], indices) if with_columns([segment]) else None

    def positions(self) -> Numbers:
        """Positions (T,) of all tokens, or (T, 3) where some have three axes."""
        made = self._indices.copy()
        for segment, first in self._own:
            positions = positions_of(segment)
            if positions.ndim > made.ndim:
                made = np.repeat(made[:, None], positions.shape[1], axis=1)
            of_axes = positions if positions.ndim == made.ndim else positions[:, None]
            made[first : first + len(positions)] = of_axes
        return made

    def visible(self, window: int, chunk: int = 0) -> Numbers | None:
        """The first and the last cached token (T, 2) that each token sees, in layers with a `window`, or that attend
        within a `chunk`; None where they are those of plain text."""
        key = window, chunk
        if key not in self._visible:
            others = any(_sees_others(segment, window, chunk) for segment, _ in self._own)
            self._visible[key] = self._seen(window, chunk) if others else None
        return self._visible[key]

    def _seen(self, window: int, chunk: int) -> Numbers:
        made = np.stack([_first(self._indices, window, chunk), self._indices], axis=1)
        for segment, first in self._own:
            own = made[first : first + len(segment.tokens)]
            if segment.sequence.positions is not None:
                own[:, 0] = segment.sequence.positions.first_within(segment.start, len(own), window, chunk)
            if segment.last_visible is not None:
                last = np.asarray(segment.last_visible, np.int32)
                assert ((own[:, 1] <= last) & (last < segment.end)).all(), (
                    "a token sees itself, none behind its segment"
                )
                own[:, 1] = last
        return made


def _sees_others(segment: RowSegment, window: int, chunk: int) -> bool:
    return segment.last_visible is not None or (bool(window or chunk) and segment.sequence.positions is not None)


def _first(indices: Numbers, window: int, chunk: int) -> Numbers:
    """The first index that tokens at `indices` see, counted in indices."""
    if window:
        return np.maximum(indices - window + 1, 0)
    return indices // chunk * chunk if chunk else np.zeros_like(indices)


def positions_of(segment: RowSegment) -> Numbers:
    """The positions (n,) or (n, 3) of a segment's tokens, which its sequence remembers from now on."""
    count, known = len(segment.tokens), segment.sequence.positions
    positions: Numbers
    if segment.positions is None:
        if known is None:
            return np.arange(segment.start, segment.start + count, dtype=np.int32)
        positions = known.of(segment.start, count)
    else:
        positions = np.asarray(segment.positions, np.int32)
        assert len(positions) == count, "a position for each token"
    if known is None:
        known = segment.sequence.positions = SequencePositions()
    if segment.positions is not None or segment.end > known.count:
        known.put(segment.start, positions)
    return positions if positions.ndim == 1 or (positions != positions[:, :1]).any() else positions[:, 0]


def joined(parts: Sequence[Numbers]) -> Numbers:
    """Positions of parts, one behind the other: (T,), or (T, 3) where some part has three axes."""
    axes = max((part.shape[1] for part in parts if part.ndim > 1), default=0)
    if axes:
        parts = [part if part.ndim > 1 else np.repeat(part[:, None], axes, axis=1) for part in parts]
    return np.concatenate(parts)
