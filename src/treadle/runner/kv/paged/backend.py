"""The paged KV backend: keys and values in pages of one pool, read in place by kernels, for MLX's CUDA build.

A page holds PAGE tokens of one sequence, or of many that begin alike. Sequences join, grow and leave without a copy,
and a reused prefix costs nothing but its last page, which is copied where it is not full. MLX's own batched caches pay
for the longest sequence, and copy everything when one joins or leaves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ....cache.prefix_index import PrefixIndex
from ....core.messages import Sharing
from ....core.statistics import PrefixStatistics
from ...forward.batch_buckets import PROMPT_SIZES, decode_bucket, mixed_bucket, prompt_bucket
from ...forward.ragged import ForwardPass, RaggedBatch
from ...forward.segments import ForwardOutput, KvSequence, RowSegment, padding
from ...mlxlm import Selection
from ..backend import Clock, LeastMemory, Live, WarmLimits, WarmPass
from ..cost import KvCost
from ..prefix_view import PrefixView
from .copies import PageCopies
from .kernels import Kernels
from .layer import PagedLayer
from .page_allocator import PageAllocator, PageTable
from .paged_pass import PAGE, LayerKind, PagedPass, table_rows
from .tiling import COUNT, FIRST, POSITION
from .warm_passes import compiled_passes, kernel_passes
from .window_pages import WindowPages

SLACK = PAGE
"""Tokens behind a window that are kept: a sequence may go back by so many."""
_LEAST_PAGES = 2
"""Pages that the smallest warm-up steps take: one for each of two sequences."""


@dataclass(slots=True, eq=False)
class _State:
    """A sequence's page table. Its first `committed` tokens are computed and known; once `full` are, another page
    is."""

    table: PageTable
    committed: int = 0
    full: int = PAGE


class LayerConfig(NamedTuple):
    """One layer's `window` (0: none), and the `kernels` that read its heads; layers of one shape have the same."""

    window: int
    kernels: Kernels


def uniform(windows: Iterable[int], kernels: Kernels) -> list[LayerConfig]:
    """Layers of one shape."""
    return [LayerConfig(window, kernels) for window in windows]


@dataclass(frozen=True)
class PagedConfig:
    """`pages` pages for `layers`. `selection` chooses what the model's head sees. `decoder`, if any, computes passes
    with fused layers in place of the model.

    Steps compute at most `step_tokens` tokens of `max_running` sequences (0: not known). Where some layers see all
    tokens, those with a window have pages of their own, for the tokens that such sequences can see.
    """

    layers: Sequence[LayerConfig]
    selection: Selection | None
    pages: int
    keep_prefixes: bool = True
    decoder: Any | None = None
    max_running: int = 0
    step_tokens: int = 0

    name = "paged"

    @property
    def fused(self) -> bool:
        return self.decoder is not None

    @property
    def int8(self) -> bool:
        """Whether keys and values are stored as int8."""
        return self.layers[0].kernels.int8

    @property
    def windows(self) -> list[int]:
        """The windows of groups of layers with pages of their own, ascending."""
        windows = {layer.window for layer in self.layers}
        return sorted(windows - {0}) if 0 in windows else []

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in all layers without pages of their own."""
        return self.page_bytes_of(0) if self.windows else sum(layer.kernels.page_bytes for layer in self.layers)

    @property
    def cost(self) -> KvCost:
        """Memory of a sequence, by the token and at most for its windows."""
        row_bytes = sum(self._seen_pages(window) * self.page_bytes_of(window) for window in self.windows)
        return KvCost(self.page_bytes // PAGE, row_bytes)

    def window_pages(self, window: int) -> int:
        """Pages of the layers with `window`: for all tokens where these are fewer than what sequences see, which is
        enough then, as each token has a page in the other layers."""
        if not self.max_running or not self.step_tokens:
            return self.pages
        return min(self.pages, self._most_pages(window))

    def with_memory(self, budget: int) -> PagedConfig:
        """This backend with as many pages as `budget` bytes hold."""
        each = self.page_bytes + sum(map(self.page_bytes_of, self.windows))
        if self.max_running and self.step_tokens:
            for window in sorted(self.windows, key=self._most_pages):
                most = self._most_pages(window)
                if budget // each > most:
                    budget -= most * self.page_bytes_of(window)
                    each -= self.page_bytes_of(window)
        return replace(self, pages=budget // each)

    def page_bytes_of(self, window: int) -> int:
        """Bytes of a page in all layers with this window."""
        return sum(layer.kernels.page_bytes for layer in self.layers if layer.window == window)

    def _seen_pages(self, window: int) -> int:
        """The most pages that a sequence holds of a window, whatever of its tokens is in flight."""
        return -(-(window + SLACK) // PAGE) + 2

    def _most_pages(self, window: int) -> int:
        """Pages with which sequences never lack one, and as many again to keep the windows of cached prefixes."""
        in_flight = 2 * -(-self.step_tokens // PAGE)
        return 2 * self.max_running * self._seen_pages(window) + in_flight

    def least_memory(self, max_running: int) -> LeastMemory:
        each = self.page_bytes + sum(map(self.page_bytes_of, self.windows))
        return LeastMemory(_LEAST_PAGES * each, f"{_LEAST_PAGES} pages", "give more `memory`")

    def build(self, module: Any, live: Live, clock: Clock = time.monotonic) -> PagedBackend:
        return PagedBackend(self, module, live)


class PagedBackend:
    """The backend that `config` describes, for `module`. The pools take their memory at once. With fused layers, passes
    are compiled and come in buckets; those with prompts only where the pools are not quantized."""

    name = "paged"
    block = PAGE
    lookahead = 1
    prefill_quantum = 0

    def __init__(self, config: PagedConfig, module: Any, live: Live) -> None:
        self._shapes = list({id(layer.kernels): layer.kernels for layer in config.layers}.values())
        self.blocks = config.pages
        self.in_buckets = config.fused
        self._live = live
        self._page_bytes = config.page_bytes
        self._window_bytes = [config.page_bytes_of(window) for window in config.windows]
        self._step = PagedPass(self._shapes)
        self.layers = [self._new_layer(layer, config) for layer in config.layers]
        self._forward = ForwardPass(config.decoder or module, self.layers, config.selection, self._step.put)
        windows = [WindowPages(config.window_pages(window), PAGE, window, SLACK) for window in config.windows]
        self._copies = PageCopies(self.layers, self._step.put)
        self._pages = PageAllocator(
            config.pages, PAGE, self._copies.add, keep_prefixes=config.keep_prefixes, windows=windows
        )

    def _new_layer(self, layer: LayerConfig, config: PagedConfig) -> PagedLayer:
        kernels, windows = layer.kernels, config.windows
        shape = next(i for i, one in enumerate(self._shapes) if one is kernels)
        own = layer.window in windows
        kind = LayerKind(1 + windows.index(layer.window) if own else 0, shape, layer.window)
        pool = kernels.new_pool(config.window_pages(layer.window) if own else config.pages)
        return PagedLayer(kind, kernels, pool, self._step)

    @property
    def sharing(self) -> Sharing:
        return Sharing.HELD_MARKED if self._pages.windows else Sharing.HELD

    @property
    def index(self) -> PrefixIndex | None:
        return self._pages.index

    @property
    def chunk_sizes(self) -> tuple[int, ...]:
        return PROMPT_SIZES if self.in_buckets and not self._step.int8 else ()

    def warm_passes(self, limits: WarmLimits) -> list[WarmPass]:
        passes = kernel_passes(self.chunk_sizes, self.blocks * PAGE, limits)
        return [*passes, *(compiled_passes(self.chunk_sizes, PAGE, self.blocks, limits) if self.in_buckets else ())]

    def least_forced(self, decoding: int) -> int:
        return 1

    def free_blocks(self) -> int:
        return self._pages.free

    def kv_bytes(self) -> int:
        own = zip(self._pages.windows, self._window_bytes, strict=True)
        return self._pages.held * self._page_bytes + sum(pages.held * size for pages, size in own)

    # Sequences ---------------------------------------------------------------------------------------------------

    def match(self, salt: str, tokens: Sequence[int]) -> int:
        return self._pages.match(salt, tokens)

    def reuse(self, wanted: Sequence[tuple[KvSequence, int]]) -> list[int]:
        for sequence, _ in wanted:
            self.admit(sequence)
        tables = [sequence.kv.table for sequence, _ in wanted]
        partial = [
            self._pages.reuse(table, sequence.tokens, count)
            for table, (sequence, count) in zip(tables, wanted, strict=True)
        ]
        found = [self._pages.reuse_partial(table, last) for table, last in zip(tables, partial, strict=True)]
        for table, (sequence, _) in zip(tables, wanted, strict=True):
            self._pages.mark_places(table, sequence.tokens)
        return found

    def admit(self, sequence: KvSequence) -> None:
        if sequence.kv is None:
            sequence.kv = _State(self._pages.new_table(sequence.id, sequence.salt))

    def checkpoint(self, sequence: KvSequence, ends: Sequence[int]) -> None:
        """Mark positions whose windows are kept. In other layers, committed tokens can be reused wherever prompts
        part."""
        state: _State | None = sequence.kv
        if state is not None:
            state.table.marks.extend(ends)

    def commit(self, segments: Iterable[RowSegment]) -> None:
        for segment in segments:
            state: _State | None = segment.sequence.kv
            if state is not None:
                count = state.committed = segment.start + len(segment.tokens)
                if count >= state.full:
                    state.full = count // PAGE * PAGE + PAGE
                    self._pages.commit(state.table, PrefixView(segment.sequence.tokens, count))
                    self._pages.leave_behind(state.table, count)

    def release(self, sequence: KvSequence) -> None:
        state: _State | None = sequence.kv
        if state is not None:
            sequence.kv = None
            self._pages.release(state.table, PrefixView(sequence.tokens, state.committed))

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
        batch = RaggedBatch(self.order(segments), in_buckets=self.in_buckets)
        self.begin(batch)
        done = self._forward.run(batch, previous, hidden=hidden)
        done.arrays = [self.layers[-1].written]  # computed from all other layers'
        return done

    def order(self, segments: Sequence[RowSegment]) -> list[RowSegment]:
        """Short segments first, as they go to another kernel than long ones; both are padded to a bucket."""
        short = self._step.short
        many = [segment for segment in segments if len(segment.tokens) > short]
        few = [segment for segment in segments if len(segment.tokens) <= short] if many else list(segments)
        if not self.in_buckets or (many and self._step.int8):
            return [*few, *many]
        return [*few, *_missing(few, mixed_bucket if many else decode_bucket), *many, *_missing(many, prompt_bucket)]

    def begin(self, batch: RaggedBatch) -> None:
        """Take the pages that the batch needs, and plan its attention. Raises MemoryError where none are left."""
        self._copies.launch()
        segments, positions, grow = batch.real, batch.positions, self._pages.grow
        owned: Any = slice(None) if batch.owned is None else batch.owned
        ends = (batch.starts + batch.counts)[owned].tolist()
        tables = [segment.sequence.kv.table for segment in segments]
        pages = [grow(table, end) for table, end in zip(tables, ends, strict=True)]
        lines = np.zeros((len(segments), 4), np.int32)
        lines[:, FIRST] = batch.firsts[owned]
        lines[:, COUNT] = batch.counts[owned]
        lines[:, POSITION] = batch.starts[owned]
        tokens = owned if batch.owned is None else _tokens_of(batch)
        rows = [table_rows(pages, 0, batch, tokens)]
        for i, window in enumerate(self._pages.windows):
            own = [table.windows[i] for table in tables]
            pages = [window.grow(table, end) for table, end in zip(own, ends, strict=True)]
            skipped = np.array([table.first for table in own], np.int32)
            rows.append(table_rows(pages, skipped, batch, tokens))
        self._step.begin(lines, positions, rows)

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
