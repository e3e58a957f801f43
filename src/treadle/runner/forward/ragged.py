"""Ragged batches, and the forward pass over one: the tokens of all sequences of a step side by side.

The model sees T tokens as a batch of T sequences of one token (T, 1), so its linear layers read their weights once for
prompts and decoding sequences alike. Attention alone has to know which token belongs to which sequence; the layers'
caches compute it (`MlxLm.route_attention`), behind which a KV backend keeps keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate, chain
from typing import Any

import mlx.core as mx
import numpy as np

from ..device.staging import Put, direct
from ..mlxlm import FETCHED, Selection, keeping
from .batch_buckets import decode_bucket, head_bucket
from .columns import ColumnPasses, injection_of
from .positions import Columns, Numbers
from .segments import ForwardOutput, RowSegment, with_columns


class RaggedBatch:
    """The tokens of `segments`, in their order.

    Segment i has the `counts[i]` tokens `firsts[i]` to `ends[i]` of the batch, which has `count` (T) in all. In its
    sequence's cache they have indices from `starts[i]` on; `indices` (T,) are those of all tokens. `positions` (T,), or
    (T, 3), are the same array unless some tokens have `columns`. `owned` are the indices of segments that are no
    padding, None where all are. With `in_buckets` the batch was padded to a bucket; with `verifies` some have drafts.
    `staged` are the tokens (T, 1) on the device, where they have been put there with a backend's own arrays.
    """

    __slots__ = (
        *("columns", "count", "counts", "ends", "firsts", "in_buckets", "indices", "owned", "positions"),
        *("segments", "staged", "starts", "verifies"),
    )

    def __init__(self, segments: Sequence[RowSegment], *, in_buckets: bool = False, verifies: bool = False) -> None:
        self.segments = segments
        self.in_buckets = in_buckets
        self.verifies = verifies
        counts = [len(segment.tokens) for segment in segments]
        self.count = sum(counts)
        self.starts: Numbers = np.array([segment.start for segment in segments], np.int32)
        self.counts: Numbers
        self.ends: Numbers
        self.firsts: Numbers
        if self.count == len(counts):  # a segment has a token at least
            self.counts, self.firsts, self.ends = _singles(self.count)
            self.indices = self.positions = self.starts
        else:
            self.counts = np.array(counts, np.int32)
            self.ends = self.counts.cumsum(dtype=np.int32)
            self.firsts = self.ends - self.counts
            own = np.arange(self.count, dtype=np.int32)
            self.indices = self.positions = own + (self.starts - self.firsts).repeat(self.counts)
        self.staged: Any | None = None
        self.columns: Columns | None = None
        if with_columns(segments):
            self.columns = Columns(segments, self.firsts.tolist(), self.indices)
            self.positions = self.columns.positions()
        owned = [i for i, segment in enumerate(segments) if not segment.padding]
        self.owned = None if len(owned) == len(segments) else owned

    @property
    def real(self) -> Sequence[RowSegment]:
        """The segments that are no padding."""
        return self.segments if self.owned is None else [self.segments[i] for i in self.owned]

    @property
    def tokens(self) -> Numbers:
        """The tokens (T, 1), on the host."""
        ids = chain.from_iterable(segment.tokens for segment in self.segments)
        return np.fromiter(ids, np.int32, self.count)[:, None]


class ForwardPass:
    """Runs ragged batches through mlx-lm's `module`, whose caches are `layers`, or through its `decoder`.

    `selection` chooses the tokens that the model's head sees (None: all, and logits are selected afterwards). `put`
    makes device arrays of NumPy's.
    """

    def __init__(
        self,
        module: Any,
        layers: Sequence[Any],
        selection: Selection | None,
        put: Put = direct,
        decoder: Any | None = None,
    ) -> None:
        self._module = module if decoder is None else decoder
        self.columns = ColumnPasses(module, decoder)
        self._layers = layers
        self._selection = selection
        self._put = put

    def run(self, batch: RaggedBatch, previous: Any | None, *, hidden: bool = False) -> ForwardOutput:
        """Logits of all tokens that are wanted, not evaluated. `previous` (P,) are the tokens sampled in the step
        before, where a segment needs them, and maybe zeros behind them. With `hidden` also the hidden states that
        segments need."""
        if hidden:
            return self._run_with_hidden(batch, previous)
        wants = [segment.wants for segment in batch.segments]
        ends = list(accumulate(wants))
        logits = self._logits(batch, self._tokens(batch, previous), self._wanted(batch, wants), ends[-1])
        places = {
            segment.id: (end - segment.wants, segment.wants)
            for segment, end in zip(batch.segments, ends, strict=True)
            if segment.wants
        }
        early = () if self._selection is None else self._selection.take_early()
        return ForwardOutput(logits, places, early=early)

    def _run_with_hidden(self, batch: RaggedBatch, previous: Any | None) -> ForwardOutput:
        assert self._selection is not None, "the model's last norm is known"
        counts = np.array([segment.hidden for segment in batch.segments], np.int32)
        ends = np.cumsum(counts, dtype=np.int32)
        whole = (counts == batch.counts).all()
        with keeping(self._selection, ... if whole else self._put(_ranges(batch.ends - counts, counts))[0]):
            done = self.run(batch, previous)
        of_layers, behind_norm = self._selection.parts(self._selection.take())
        for segment, end in zip(batch.segments, ends.tolist(), strict=True):
            if segment.hidden:
                states = of_layers if segment.observed else behind_norm
                whole = segment.hidden == states.shape[0]
                done.hidden[segment.id] = states if whole else states[end - segment.hidden : end]
        return done

    def _logits(self, batch: RaggedBatch, tokens: Any, wanted: Any | None, count: int) -> Any | None:
        """The first `count` logits of the `wanted` tokens; None where none are. The model's embedding joins tokens with
        the states that segments feed, if there are any."""
        try:
            if self._selection is not None:
                self._selection.rows, self._selection.fed = wanted, _fed(batch)
            logits = self._computed(batch, tokens)
        finally:
            FETCHED.clear()
            if self._selection is not None:
                self._selection.rows, self._selection.narrowed, self._selection.fed = None, False, None
        if not count:
            return None
        logits = logits[:, -1, :]
        if wanted is not None and self._selection is None:
            logits = logits[wanted]
        return logits if logits.shape[0] == count else logits[:count]

    def _computed(self, batch: RaggedBatch, tokens: Any) -> Any:
        if batch.columns is None:
            return self._module(tokens, cache=self._layers)
        injection = injection_of(batch.segments, batch.firsts.tolist(), batch.count, self._put)
        return self.columns.compute(tokens, self._layers, injection, axes=batch.positions.ndim > 1)

    def _wanted(self, batch: RaggedBatch, wants: Sequence[int]) -> Any | None:
        """Indices of the tokens that the head sees, first the last `wants` of each segment; None where it sees all. In
        buckets the number of indices is padded, too, and the head sees all tokens of a batch that only decodes."""
        if not batch.in_buckets and sum(wants) in (0, batch.count):
            return None
        if batch.in_buckets and (wanted := sum(wants)) and decode_bucket(wanted) == batch.count:
            through = max(i for i, count in enumerate(wants) if count)
            if int(batch.ends[through]) == wanted:  # nothing comes before those that are wanted, or between them
                return None
        last = np.array(wants, np.int32)
        rows = _ranges(batch.ends - last, last)
        if not batch.in_buckets:
            return self._put(rows)[0]
        segments = batch.real
        single = sum(len(segment.tokens) == 1 for segment in segments)
        size = head_bucket(single, len(segments), len(rows))
        return self._put(np.pad(rows, (0, size - len(rows))))[0]

    def _tokens(self, batch: RaggedBatch, previous: Any | None) -> Any:
        """The batch's tokens (T, 1) int32, on the device."""
        if previous is not None and _is_previous(batch, previous):
            return (previous if batch.count == previous.shape[0] else previous[: batch.count])[:, None]
        if batch.staged is not None:
            return batch.staged
        tokens = batch.tokens
        if previous is None or all(segment.previous < 0 for segment in batch.segments):
            return self._put(tokens)[0]
        source_of = np.full((batch.count, 1), -1, np.int32)
        source_of[batch.ends - 1, 0] = [segment.previous for segment in batch.segments]
        known, source = self._put(tokens, source_of)
        return mx.where(source >= 0, previous[mx.maximum(source, 0)], known)


def _fed(batch: RaggedBatch) -> Any | None:
    """The states (T, W) that segments feed beside their tokens: all of them or none."""
    if batch.segments[0].states is None:
        return None
    assert batch.owned is None, "a pass of a head is not padded"
    parts = [segment.states for segment in batch.segments]
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)


def _is_previous(batch: RaggedBatch, previous: Any) -> bool:
    """Whether the batch's tokens are the first of `previous`, in order."""
    if batch.count > previous.shape[0]:
        return False
    segments = batch.segments[:-1] if batch.segments[-1].padding else batch.segments
    if [segment.previous for segment in segments] != list(range(len(segments))):
        return False
    return int(batch.ends[len(segments) - 1]) == len(segments)


@cache
def _singles(count: int) -> tuple[Numbers, Numbers, Numbers]:
    """Counts, firsts and ends of as many segments of one token, not to be written to."""
    made = np.ones(count, np.int32), np.arange(count, dtype=np.int32), np.arange(1, count + 1, dtype=np.int32)
    for one in made:
        one.setflags(write=False)
    return made


def _ranges(starts: Numbers, counts: Numbers) -> Numbers:
    """`counts[i]` numbers from `starts[i]` on, for each i, one range behind the other."""
    if (counts == 1).all():
        return starts
    ends = np.cumsum(counts, dtype=np.int32)
    spread: Numbers = np.arange(ends[-1], dtype=np.int32) + np.repeat(starts - (ends - counts), counts)
    return spread
