"""Positions of tokens apart from their index in the cache, and the cached tokens that each token sees.

The index counts a sequence's cached tokens without gaps; the position is what rotary embeddings turn by. They differ
where only a part of a prompt is computed, and behind images.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .segments import RowSegment

Numbers = npt.NDArray[np.int32]
_FIRST = 64


class SequencePositions:
    """Positions of a sequence's first `count` tokens, by their index: (count,), or (count, 3) where some token has
    three axes. They do not decrease; those behind the last known one follow it."""

    def __init__(self) -> None:
        self.count = 0
        self._known: Numbers = np.zeros(_FIRST, np.int32)

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
        own = self._known[: start + count]
        own = own if own.ndim == 1 else np.arange(start + count, dtype=np.int32)
        return _first(own[start:], own, window, chunk)


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
    known.put(segment.start, positions)
    return positions if positions.ndim == 1 or (positions != positions[:, :1]).any() else positions[:, 0]


def joined(parts: Sequence[Numbers]) -> Numbers:
    """Positions of all segments of a pass: (T,), or (T, 3) where some segment has three axes."""
    axes = max((part.shape[1] for part in parts if part.ndim > 1), default=0)
    if axes:
        parts = [part if part.ndim > 1 else np.repeat(part[:, None], axes, axis=1) for part in parts]
    return np.concatenate(parts)


def visible(segments: Sequence[RowSegment], window: int, chunk: int) -> Numbers | None:
    """The first and the last cached token (T, 2) that each token of a pass sees, in layers with a `window`, or that
    attend within a `chunk`; None where they are those of plain text."""
    if not any(segment.last_visible is not None or _counts_positions(segment, window, chunk) for segment in segments):
        return None
    return np.concatenate([_visible(segment, window, chunk) for segment in segments])


def _counts_positions(segment: RowSegment, window: int, chunk: int) -> bool:
    return bool(window or chunk) and segment.sequence.positions is not None


def _visible(segment: RowSegment, window: int, chunk: int) -> Numbers:
    start, count = segment.start, len(segment.tokens)
    own = np.arange(start, start + count, dtype=np.int32)
    last = own if segment.last_visible is None else np.asarray(segment.last_visible, np.int32)
    assert ((own <= last) & (last < start + count)).all(), "a token sees itself, and none behind its segment"
    if segment.sequence.positions is not None:
        first = segment.sequence.positions.first_within(start, count, window, chunk)
    else:
        first = _first(own, np.arange(start + count, dtype=np.int32), window, chunk)
    return np.stack([first, last], axis=1)


def _first(own: Numbers, known: Numbers, window: int, chunk: int) -> Numbers:
    """The first of the `known` positions that tokens at the positions `own` see."""
    if window:
        return np.searchsorted(known, own - window, side="right").astype(np.int32)
    if chunk:
        return np.searchsorted(known, own // chunk * chunk).astype(np.int32)
    return np.zeros_like(own)
