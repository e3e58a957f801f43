"""The paged KV backend: keys and values in pages of one pool, read in place by kernels, for MLX's CUDA build.

A page holds PAGE tokens of one sequence, or of many that begin alike. Sequences join, grow and leave without a copy,
and a reused prefix costs nothing but its last page, which is copied where it is not full. MLX's own batched caches pay
for the longest sequence, and copy everything when one joins or leaves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ....cache.prefix_index import PrefixIndex
from ....core.capabilities import Sharing
from ....core.statistics import PrefixStatistics
from ...forward.batch_buckets import PROMPT_SIZES, decode_bucket, mixed_bucket, prompt_bucket
from ...forward.ragged import ForwardPass, RaggedBatch
from ...forward.segments import ForwardOutput, KvSequence, RowSegment, joined_states, padding
from ...mlxlm import Selection
from ...recurrent.kernels import RecurrentKernels
from ...recurrent.layer import Recurrences
from ..backend import MOST_DRAFTS, Clock, Live, WarmLimits, WarmPass
from ..cache_layout import CacheLayout
from ..prefix_view import PrefixView
from ..recurrent_group import RecurrentGroup, RecurrentRow
from ..seen_queries import Seen, seeing
from .copies import PageCopies
from .kernels import Kernels
from .layer import PagedLayer
from .memory import SLACK, LayerConfig, PagedMemory
from .page_allocator import PageAllocator, PageTable
from .paged_pass import PAGE, LayerKind, PagedPass, table_rows
from .pool import Pool
from .tiling import COLUMNS, COUNT, FIRST, POSITION
from .warm_passes import compiled_passes, kernel_passes, short_passes, verifying_passes
from .window_pages import WindowPages


@dataclass(slots=True, eq=False)
class _State:
    """A sequence's page table. Its first `committed` tokens are computed and known; once `full` are, another page
    is."""

    table: PageTable
    committed: int = 0
    full: int = PAGE


@dataclass(frozen=True)
class PagedConfig(PagedMemory):
    """The backend with that memory. `selection` chooses what the model's head sees. `decoder`, if any, computes passes
    with fused layers in place of the model; or, with `compiled`, with the model's own layers, and compiles those that
    only decode. `recurrences` computes recurrent layers. `layout` arranges the caches (None: one for each of the
    layers, in order)."""

    selection: Selection | None
    keep_prefixes: bool = True
    decoder: Any | None = None
    recurrences: Recurrences = field(default_factory=RecurrentKernels)
    compiled: bool = False
    layout: CacheLayout | None = None

    name = "paged"

    @property
    def fused(self) -> bool:
        return self.decoder is not None and not self.compiled

    def build(self, module: Any, live: Live, clock: Clock = time.monotonic) -> PagedBackend:
        return PagedBackend(self, module, live)


class PagedBackend:
    """The backend that `config` describes, for `module`. The pools take their memory at once. With fused layers, passes
    are compiled and come in buckets; those with prompts only where the pools are not quantized, nor if the model's own
    layers are compiled."""

    name = "paged"
    block = PAGE
    lookahead = 1
    launches_ahead = True
    prefill_quantum = 0
    draft_tokens = MOST_DRAFTS
    no_drafts = ""
    no_positions = ""

    def __init__(self, config: PagedConfig, module: Any, live: Live) -> None:
        self._shapes = list({id(layer.kernels): layer.kernels for layer in config.layers}.values())
        self.blocks = config.pages
        self.in_buckets = config.decoder is not None
        self._long_in_buckets = config.fused and not config.int8
        self._live = live
        self._page_bytes = config.page_bytes
        self._window_bytes = [config.page_bytes_of(window) for window in config.windows]
        self._step = PagedPass(self._shapes)
        self.layers = [self._new_layer(layer, config) for layer in config.layers]
        self._recurrent = None
        if config.recurrent is not None:
            self._recurrent = RecurrentGroup(config.recurrent, config.slots, config.recurrences)
        slots = () if self._recurrent is None else self._recurrent.layers
        caches = self.layers if config.layout is None else config.layout.caches(self.layers, slots)
        self._forward = ForwardPass(module, caches, config.selection, self._step.put, config.decoder)
        self.no_features, self.no_axes = self._forward.columns.reasons
        windows = [WindowPages(config.window_pages(window), PAGE, window, SLACK) for window in config.windows]
        self._copies = PageCopies(self.layers, 1 + len(windows), self._step.put)
        self._pages = PageAllocator(
            config.pages,
            PAGE,
            self._copies.add,
            keep_prefixes=config.keep_prefixes,
            windows=windows,
            slots=None if self._recurrent is None else self._recurrent.slots,
        )

    def _new_layer(self, layer: LayerConfig, config: PagedConfig) -> PagedLayer:
        kernels, windows = layer.kernels, config.windows
        shape = next(i for i, one in enumerate(self._shapes) if one is kernels)
        own = layer.window in windows
        window, chunk = (0, layer.window) if layer.chunked else (layer.window, 0)
        kind = LayerKind(1 + windows.index(layer.window) if own else 0, shape, window, chunk)
        pool = kernels.new_pool(config.window_pages(layer.window) if own else config.pages)
        return PagedLayer(kind, kernels, pool, self._step)

    @property
    def sharing(self) -> Sharing:
        return Sharing.HELD_MARKED if self._pages.windows or self._recurrent is not None else Sharing.HELD

    @property
    def replays(self) -> bool:
        return self._recurrent is not None

    @property
    def index(self) -> PrefixIndex | None:
        """None where there are recurrent layers: prefixes are reused where a state is, which no block shows."""
        return self._pages.index if self._recurrent is None else None

    @property
    def chunk_sizes(self) -> tuple[int, ...]:
        return PROMPT_SIZES if self.in_buckets and self._long_in_buckets else ()

    def warm_passes(self, limits: WarmLimits) -> list[WarmPass]:
        passes = kernel_passes(self.chunk_sizes, self.blocks * PAGE, limits)
        if self.in_buckets:
            passes += compiled_passes(self.chunk_sizes, PAGE, self.blocks, limits)
            passes += short_passes(self._step.short, PAGE, self.blocks, limits)
        return [*passes, *verifying_passes(self._step.short, PAGE, self.blocks, limits)]

    def least_forced(self, decoding: int) -> int:
        return 1

    def free_blocks(self) -> int:
        return self._pages.free

    def kv_bytes(self) -> int:
        own = zip(self._pages.windows, self._window_bytes, strict=True)
        held = self._pages.held * self._page_bytes + sum(pages.held * size for pages, size in own)
        return held if self._recurrent is None else held + self._recurrent.slots.held * self._recurrent.slot_bytes

    # Sequences ---------------------------------------------------------------------------------------------------

    def match(self, salt: str, tokens: Sequence[int]) -> int:
        return self._pages.match(salt, tokens)

    def reuse(self, wanted: Sequence[tuple[KvSequence, int]]) -> list[int]:
        for sequence, _ in wanted:
            self.admit(sequence)
        tables = [sequence.kv.table for sequence, _ in wanted]
        partial = [
            self._pages.reuse(table, sequence.keys, count)
            for table, (sequence, count) in zip(tables, wanted, strict=True)
        ]
        found = [self._pages.reuse_partial(table, last) for table, last in zip(tables, partial, strict=True)]
        for table, (sequence, _) in zip(tables, wanted, strict=True):
            self._pages.mark_places(table, sequence.keys)
        return found

    def admit(self, sequence: KvSequence) -> None:
        if sequence.kv is None:
            sequence.kv = _State(self._pages.new_table(sequence.id, sequence.salt))
        if sequence.private:
            sequence.kv.table.shares = False

    def checkpoint(self, sequence: KvSequence, ends: Sequence[int]) -> None:
        """Mark positions whose windows and recurrent states are kept. In other layers, committed tokens can be reused
        wherever prompts part."""
        state: _State | None = sequence.kv
        if state is not None:
            state.table.marks += ends if self._recurrent is None else [end // PAGE * PAGE for end in ends]

    def commit(self, segments: Iterable[RowSegment]) -> None:
        for segment in segments:
            state: _State | None = segment.sequence.kv
            if state is not None:
                count = state.committed = segment.start + len(segment.tokens)
                if count >= state.full:
                    state.full = count // PAGE * PAGE + PAGE
                    self._pages.commit(state.table, PrefixView(segment.sequence.keys, count))
                    self._pages.leave_behind(state.table, count)

    def retract(self, sequence: KvSequence, length: int) -> int:
        state: _State | None = sequence.kv
        return length if state is None else self._pages.shrink(state.table, length, state.committed)

    def release(self, sequence: KvSequence) -> None:
        state: _State | None = sequence.kv
        if state is not None:
            sequence.kv = None
            self._pages.release(state.table, PrefixView(sequence.keys, state.committed))

    def invalidate(self, sequences: Iterable[KvSequence]) -> None:
        """Pages that are shared were complete before, and stay."""
        for sequence in sequences:
            state: _State | None = sequence.kv
            if state is not None:
                sequence.kv = None
                self._pages.release(state.table)

    # Passes ------------------------------------------------------------------------------------------------------

    def compute(self, segments: Sequence[RowSegment], previous: Any | None, *, hidden: bool = False) -> ForwardOutput:
        if not segments:
            return ForwardOutput()
        if self._recurrent is None:
            return self._run(segments, previous, hidden=hidden)
        states: list[_State] = [segment.sequence.kv for segment in segments]
        rows = [RecurrentRow(state.table.slots, state.committed, state.table.marks) for state in states]
        *first, last = self._recurrent.waves(segments, rows)
        parts = []
        for wave in first:
            done = self._run(wave, None, hidden=hidden)
            parts.append(done.hidden)
            mx.async_eval(done.arrays)  # type: ignore[no-untyped-call]
        done = self._run(last, previous, hidden=hidden)
        done.hidden = joined_states([*parts, done.hidden])
        return done

    def _run(self, segments: Sequence[RowSegment], previous: Any | None, *, hidden: bool = False) -> ForwardOutput:
        verifies = any(segment.drafts for segment in segments)
        ordered, in_buckets = self.order(segments, verifies=verifies), self._pads(segments, verifies=verifies)
        batch = RaggedBatch(ordered, in_buckets=in_buckets, verifies=verifies)
        self.begin(batch, ids=previous is None)
        done = self._forward.run(batch, previous, hidden=hidden)
        done.arrays = [self.layers[-1].written] if self.layers else []  # computed from all other layers'
        if self._recurrent is not None:
            done.arrays += self._recurrent.take_written()
        return done

    def prepare(self) -> None:
        self._step.prepare()

    def order(self, segments: Sequence[RowSegment], *, verifies: bool = False) -> list[RowSegment]:
        """Short segments first, as they go to another kernel than long ones; both are padded to a bucket. Where some
        verify drafts, all go to one kernel, and are padded as sequences that decode: products of few tokens are
        faster."""
        pads = self._pads(segments, verifies=verifies)
        if verifies:
            return [*segments, *_missing(segments, decode_bucket)] if pads else list(segments)
        short = self._step.short
        many = [segment for segment in segments if len(segment.tokens) > short]
        few = [segment for segment in segments if len(segment.tokens) <= short] if many else list(segments)
        if not pads:
            return [*few, *many]
        return [*few, *_missing(few, mixed_bucket if many else decode_bucket), *many, *_missing(many, prompt_bucket)]

    def _pads(self, segments: Sequence[RowSegment], *, verifies: bool) -> bool:
        """Whether a pass over `segments` is compiled, and so padded to a bucket."""
        if not self.in_buckets or self._long_in_buckets:
            return self.in_buckets
        counts = np.array([len(one.tokens) for one in segments], np.int32)
        return self._step.decoding(counts, verifies=verifies) == len(counts)

    def begin(self, batch: RaggedBatch, *, ids: bool = False) -> None:
        """Take the pages that the batch needs, and plan its attention; with `ids` put its tokens on the device, too.
        Raises MemoryError where none are left."""
        self._copies.launch()
        segments, grow = batch.real, self._pages.grow
        owned: Any = slice(None) if batch.owned is None else batch.owned
        ends = (batch.starts + batch.counts)[owned].tolist()
        tables = [segment.sequence.kv.table for segment in segments]
        pages = [grow(table, end) for table, end in zip(tables, ends, strict=True)]
        lines = np.zeros((len(segments), COLUMNS), np.int32)
        lines[:, FIRST] = batch.firsts[owned]
        lines[:, COUNT] = batch.counts[owned]
        lines[:, POSITION] = batch.starts[owned]
        tokens = None if batch.owned is None else _tokens_of(batch)
        rows = [table_rows(pages, None, batch, tokens)]
        for i, window in enumerate(self._pages.windows):
            own = [table.windows[i] for table in tables]
            pages = [window.grow(table, end) for table, end in zip(own, ends, strict=True)]
            skipped = np.array([table.first for table in own], np.int32)
            rows.append(table_rows(pages, skipped, batch, tokens))
        others = [batch.tokens] if ids else []
        if self._recurrent is not None:
            slots = [None if segment.padding else segment.sequence.kv.table.slots for segment in batch.segments]
            others += self._recurrent.begin(batch, slots)
        made = self._step.begin(lines, batch, rows, others)
        if ids:
            batch.staged, *made = made
        if self._recurrent is not None:
            self._recurrent.put(*made)

    def seeing(self) -> AbstractContextManager[list[Seen]]:
        return seeing(self._step)

    def keys(self, cache: tuple[Kernels, Pool], sequence: KvSequence, count: int) -> Any:
        (kernels, pool), pages = cache, sequence.kv.table.pages[: -(-count // PAGE)]
        return kernels.keys(pool, self._step.put(pages)[0])[:, :count]

    def copies_pages(self) -> bool:
        """Whether copies of first pages over last ones equal them; destroys what they hold."""
        return self._copies.work()

    # The whole ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Free the pools and the fused weights; the page allocator refers to this backend, which stays in a cycle."""
        del self._forward
        self._copies.clear()
        self._step.close()
        for kernels in self._shapes:
            kernels.close()
        for layer in self.layers:
            layer.pool.free()
            layer.written = None
        if self._recurrent is not None:
            self._recurrent.close()
        mx.clear_cache()  # memory that stays on the host is in it, too

    def reset(self) -> int:
        for sequence in self._live.values():
            if sequence.kv is not None:
                sequence.kv.table.shares = False
        return self._pages.reset()

    def statistics(self) -> PrefixStatistics:
        pages, index = self._pages, self._pages.index
        if index is None:
            return PrefixStatistics()
        return PrefixStatistics(
            looked_up=pages.looked_up,
            reused=pages.reused,
            copied_bytes=pages.copied_pages * self._page_bytes,
            stored=index.stored_tokens,
            evicted=index.evicted_tokens,
            held=index.tokens,
            held_bytes=index.size * self._page_bytes,
        )


def _tokens_of(batch: RaggedBatch) -> npt.NDArray[np.bool_]:
    """Whether each token (T,) of the batch is no padding."""
    owned = np.zeros(len(batch.segments), np.bool_)
    owned[batch.owned] = True
    return np.repeat(owned, batch.counts)


def _missing(segments: Sequence[RowSegment], bucket: Callable[[int], int]) -> list[RowSegment]:
    """Padding that brings `segments`, if there are any, to their bucket."""
    count = sum(len(segment.tokens) for segment in segments)
    missing = bucket(count) - count if count else 0
    return [padding(missing)] if missing else []
