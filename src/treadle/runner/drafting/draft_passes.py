"""Passes of a draft model over its own KV backend, and greedy chains of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from ..forward.segments import RowSegment
from ..kv.backend import KvBackend


class _Launched(NamedTuple):
    """The greedy `tokens` of a pass, not evaluated (None: no logits were wanted), the index of each segment's, and its
    hidden states by id."""

    tokens: Any | None
    places: list[int]
    states: dict[str, Any]


class DraftPasses:
    """Passes over `backend`. A pass is launched while the device runs the one before, whose tokens it takes there.

    Drafts are ids below `vocabulary`: behind the tokens that models share, each may have logits of padding. With `ids`
    (`vocabulary`,) they are the model's ids of what the logits are for. Where segments need hidden states, a pass of a
    chain is fed with those of the one before, beside its tokens, multiplied by `scale` (None: not).
    """

    def __init__(self, backend: KvBackend, vocabulary: int, scale: Any | None = None, ids: Any | None = None) -> None:
        self._backend = backend
        self._vocabulary = vocabulary
        self._scale = scale
        self._ids = ids
        self._in_flight: deque[Any] = deque()

    def compute(self, segments: Sequence[RowSegment]) -> None:
        """Compute `segments`. Does not wait for the device."""
        self._launch(segments, None)

    def chain(self, segments: Sequence[RowSegment], counts: Sequence[int]) -> list[list[int]]:
        """Compute `segments`, which want their last token's logits, and `counts[i]` greedy tokens behind the i-th, all
        but the last of which are computed, too. `counts` descend. Waits for the device once, at the end."""
        drawn: list[_Launched] = []
        going, previous = list(segments), None
        for turn in range(counts[0]):
            done = self._launch(going, previous)
            drawn.append(done)
            more = sum(count > turn + 1 for count in counts)
            going = [
                _next(segment, place, self._fed(done.states.get(segment.id)))
                for segment, place in zip(going[:more], done.places[:more], strict=True)
            ]
            previous = done.tokens
        found: list[list[int]] = [[] for _ in segments]
        of_passes = [one.tokens for one in drawn if one.tokens is not None]
        numbers: Any = mx.concatenate(of_passes).tolist()  # each array that is read holds up the host
        first = 0
        for one, tokens in zip(drawn, of_passes, strict=True):
            for i, place in enumerate(one.places):
                found[i].append(numbers[first + place])
            first += tokens.shape[0]
        self._in_flight.clear()
        return found

    def _fed(self, states: Any | None) -> Any | None:
        return states if states is None or self._scale is None else states * self._scale

    def wait(self) -> None:
        """Wait for all passes."""
        while self._in_flight:
            mx.eval(self._in_flight.popleft())

    def forget(self) -> None:
        """Forget the passes in flight, after one failed."""
        self._in_flight.clear()

    def _launch(self, segments: Sequence[RowSegment], previous: Any | None) -> _Launched:
        """Launch a pass. One that wants no logits is not waited for later: its arrays are those of the caches."""
        while len(self._in_flight) > self._backend.lookahead:
            mx.eval(self._in_flight.popleft())
        done = self._backend.compute(segments, previous, hidden=any(segment.hidden for segment in segments))
        if not self._backend.launches_ahead:
            self.wait()
        if done.logits is None:
            mx.async_eval(done.arrays)  # type: ignore[no-untyped-call]
            return _Launched(None, [], {})
        tokens = mx.argmax(done.logits[:, : self._vocabulary], axis=-1).astype(mx.int32)
        tokens = tokens if self._ids is None else self._ids[tokens]
        mx.async_eval(tokens, done.arrays, done.hidden)  # type: ignore[no-untyped-call]
        self._in_flight.append(tokens)
        return _Launched(tokens, [done.places[segment.id][0] for segment in segments], done.hidden)


def _next(segment: RowSegment, place: int, states: Any | None) -> RowSegment:
    """The segment of the token behind `segment`, which is at `place` of the tokens of its pass, with the hidden states
    that it is fed with."""
    return RowSegment(
        segment.sequence,
        (0,),
        segment.end,
        wants=1,
        picks=True,
        previous=place,
        hidden=int(states is not None),
        states=states,
    )
