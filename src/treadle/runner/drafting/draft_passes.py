"""Passes of a draft model over its own KV backend, and greedy chains of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..forward.segments import RowSegment
from ..kv.backend import KvBackend


class DraftPasses:
    """Passes over `backend`. A pass is launched while the device runs the one before, whose tokens it takes there.

    Drafts are ids below `vocabulary`: behind the tokens that models share, each may have logits of padding.
    """

    def __init__(self, backend: KvBackend, vocabulary: int) -> None:
        self._backend = backend
        self._vocabulary = vocabulary
        self._in_flight: deque[Any] = deque()

    def compute(self, segments: Sequence[RowSegment]) -> None:
        """Compute `segments`, each of which wants its last token's logits. Does not wait for the device."""
        self._launch(segments, None)

    def chain(self, segments: Sequence[RowSegment], counts: Sequence[int]) -> list[list[int]]:
        """Compute `segments`, and `counts[i]` greedy tokens behind the i-th, all but the last of which are computed,
        too. `counts` descend. Waits for the device once, at the end."""
        drawn: list[tuple[Any, list[int]]] = []
        going, previous = list(segments), None
        for turn in range(counts[0]):
            tokens, places = self._launch(going, previous)
            drawn.append((tokens, places))
            more = sum(count > turn + 1 for count in counts)
            going = [_next(segment, place) for segment, place in zip(going[:more], places[:more], strict=True)]
            previous = tokens
        found: list[list[int]] = [[] for _ in segments]
        for tokens, places in drawn:
            numbers = tokens.tolist()
            for i, place in enumerate(places):
                found[i].append(numbers[place])
        self._in_flight.clear()
        return found

    def wait(self) -> None:
        """Wait for all passes."""
        while self._in_flight:
            mx.eval(self._in_flight.popleft())

    def forget(self) -> None:
        """Forget the passes in flight, after one failed."""
        self._in_flight.clear()

    def _launch(self, segments: Sequence[RowSegment], previous: Any | None) -> tuple[Any, list[int]]:
        """Launch a pass. Return its greedy tokens, not evaluated, and the index of each segment's."""
        while len(self._in_flight) > self._backend.lookahead:
            mx.eval(self._in_flight.popleft())
        done = self._backend.compute(segments, previous)
        assert done.logits is not None
        tokens = mx.argmax(done.logits[:, : self._vocabulary], axis=-1).astype(mx.int32)
        if not self._backend.launches_ahead:
            self.wait()
        mx.async_eval(tokens, done.arrays)  # type: ignore[no-untyped-call]
        self._in_flight.append(tokens)
        return tokens, [done.places[segment.id][0] for segment in segments]


def _next(segment: RowSegment, place: int) -> RowSegment:
    """The segment of the token behind `segment`, which is at `place` of the tokens of its pass."""
    return RowSegment(segment.sequence, (0,), segment.end, wants=1, picks=True, previous=place)
