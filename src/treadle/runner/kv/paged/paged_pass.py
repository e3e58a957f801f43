"""Data of a step that the layers of the paged backend share: positions, page tables, and the work of its kernels."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ...device.staging import Staging
from ...forward.compiled import CompiledPasses
from ...forward.positions import Columns
from ...forward.ragged import RaggedBatch
from ..seen_queries import Seen
from .kernels import Kernels
from .tiling import COUNT, COUNTERS, FIRST, PAGES, Segments, Tiles, padded, within_chunks

_PAGE_BITS = 5
PAGE = 1 << _PAGE_BITS
_Pages = npt.NDArray[np.int32] | None
NOWHERE = -1
"""The slot of a padding token."""
_LEAST_PAGES = 4096
"""The least length of a step's page table: each length is another compiled pass."""
_LEAST_DEQUANTIZED = 64
"""The same where pages are dequantized for prompts, and nothing is compiled."""


class LayerKind(NamedTuple):
    """Layers whose attention has the same work: the index of their page table, that of their kernels, their window
    (0: none), and the length of chunks that they attend within (0: none)."""

    table: int
    shape: int
    window: int
    chunk: int = 0


class TableRows(NamedTuple):
    """One table's pages of a step: `pages` (P,) of all segments, one sequence after the other, those of segment i from
    `firsts[i]` on, with the place `starts[i]` among them at which the page of its position 0 is, or would be; and the
    `slots` (T,) that tokens are written to."""

    pages: npt.NDArray[np.int32]
    firsts: npt.NDArray[np.int32]
    starts: npt.NDArray[np.int32]
    slots: npt.NDArray[np.int32]


def table_rows(
    pages: Sequence[npt.NDArray[np.int32]], skipped: npt.NDArray[np.int32] | None, batch: RaggedBatch, tokens: Any
) -> TableRows:
    """One table's pages of `batch`: those of each segment that is no padding, the first of which has index `skipped` in
    its sequence (None: 0). `tokens` selects the tokens that are no padding; None: all."""
    every = pages[0] if len(pages) == 1 else np.concatenate(pages)
    firsts = np.array([0, *accumulate(map(len, pages[:-1]))], np.int32)
    starts = firsts if skipped is None else firsts - skipped
    at = batch.indices if tokens is None else batch.indices[tokens]
    counts = batch.counts if batch.owned is None else batch.counts[batch.owned]
    starts_of = starts if len(at) == len(starts) else starts.repeat(counts)
    slots = every[starts_of + (at >> _PAGE_BITS)] << _PAGE_BITS | at & PAGE - 1
    if tokens is not None:
        own, slots = slots, np.full(batch.count, NOWHERE, np.int32)
        slots[tokens] = own
    return TableRows(every, firsts, starts, slots)


@dataclass
class StepTable:
    """One table in a step, on the device: the `slots` (T,) in the pools that tokens are written to, and the page tables
    for prefill and decode. `segments` are those of each kernel, on the host."""

    slots: Any = None
    pages: tuple[Any, Any] = (None, None)
    segments: dict[bool, Segments] = field(default_factory=dict)


@dataclass
class PagedPass:
    """A step's data that all layers share.

    Tokens [0, decode_tokens) of `count` belong to the decode kernel, the rest to the prefill kernel; padding belongs to
    neither. Layers have one of `shapes`. There is one of `tables` for each group of layers whose sequences hold the
    same pages. `tiles` are the attention kernels' work, by (decode, kind of layers). `compiled` caches passes over
    these layers. `columns` are those of tokens that have any.
    """

    shapes: Sequence[Kernels]
    positions: Any = None
    tables: Sequence[StepTable] = ()
    counters: tuple[Any, Any] = (None, None)
    compiled: CompiledPasses = field(default_factory=CompiledPasses)
    columns: Columns | None = None
    seen: list[Seen] | None = None
    count: int = 0
    decode_tokens: int = 0
    tiles: dict[tuple[bool, LayerKind], Tiles] = field(default_factory=dict)
    kinds: set[LayerKind] = field(default_factory=set)
    _staging: Staging = field(default_factory=Staging)

    @cached_property
    def short(self) -> int:
        """The most tokens of a segment for the decode kernels of all shapes."""
        return min((kernels.short for kernels in self.shapes), default=1)

    @cached_property
    def int8(self) -> bool:
        return any(kernels.int8 for kernels in self.shapes)

    @cached_property
    def _no_pages(self) -> Any:
        """The page table of a kernel that has no segments."""
        none = mx.zeros(_LEAST_PAGES, mx.int32)
        mx.eval(none)
        return none

    def begin(
        self,
        segments: Segments,
        batch: RaggedBatch,
        rows: Sequence[TableRows],
        others: Sequence[npt.NDArray[np.int32]] = (),
    ) -> list[Any]:
        """Start the next step over `batch`, whose `segments` begin with the short ones; `rows` are the pages of each
        table. Return `others` on the device: they are copied with the step's own arrays."""
        if self.counters[0] is None:  # one for each kernel: they may run at the same time
            self.counters = (mx.zeros(COUNTERS, mx.int32), mx.zeros(COUNTERS, mx.int32))
            mx.eval(self.counters)
        self._staging.note(batch.verifies)
        self.compiled.note(batch.verifies)
        short = self.decoding(segments[:, COUNT], verifies=batch.verifies)
        self.count, self.columns = batch.count, batch.columns
        self.decode_tokens = int(segments[short, FIRST]) if short < len(segments) else self.count
        self.tables = tables = [StepTable(segments=self._split(segments, of, short)) for of in rows]
        arrays, pages = [batch.positions, *(of.slots for of in rows)], [self._pages(of, short) for of in rows]
        arrays += [some for pair in pages for some in pair if some is not None]
        made = {key: self._plan(*key) for key in self._keys(self.kinds)}
        plans = [array for tiles in made.values() for array in tiles.arrays]
        staged = iter(self._staging.put(*arrays, *plans, *others))
        self.positions = next(staged)
        for table in tables:
            table.slots = next(staged)
        for table, pair in zip(tables, pages, strict=True):
            long, few = (self._no_pages if some is None else next(staged) for some in pair)
            table.pages = long, few
        self.tiles = {key: tiles.filled(staged) for key, tiles in made.items()}
        return list(staged)

    def decoding(self, counts: npt.NDArray[np.int32], *, verifies: bool) -> int:
        """How many segments, of so many tokens each, go to the decode kernel: the short ones, which come first. In a
        pass that verifies drafts it is all of them or none: mixtures would come in too many shapes."""
        if not verifies:
            return int(np.count_nonzero(counts <= self.short))
        return len(counts) if counts.max() <= self.short else 0

    def _split(self, segments: Segments, rows: TableRows, short: int) -> dict[bool, Segments]:
        """The segments of each kernel, with the place at which the page of position 0 of each one is, or would be."""
        lines = segments.copy()
        lines[:, PAGES] = rows.starts
        if short == len(lines):
            return {True: lines}
        many = lines[short:]
        if not short:
            return {False: many}
        many[:, PAGES] -= rows.firsts[short]
        many[:, FIRST] -= self.decode_tokens
        return {True: lines[:short], False: many}

    def _pages(self, rows: TableRows, short: int) -> tuple[_Pages, _Pages]:
        """The padded page tables of the prefill and the decode kernel; None where there are no pages."""
        border = len(rows.pages) if short == len(rows.firsts) else int(rows.firsts[short])
        least = _LEAST_DEQUANTIZED if self.int8 else _LEAST_PAGES
        long, few = rows.pages[border:], rows.pages[:border]
        return padded(long, least) if len(long) else None, padded(few, _LEAST_PAGES) if len(few) else None

    def put(self, *arrays: npt.NDArray[Any]) -> list[Any]:
        """Arrays of a step, on the device."""
        return self._staging.put(*arrays)

    def prepare(self) -> None:
        """Make the graph of a pass like the last compiled one that verified drafts, while the device is busy with
        another. The next pass takes it if it has the same shapes."""
        self.compiled.prepare(self._staging.reserve())

    def close(self) -> None:
        """Drop everything: compiled passes hold the pools."""
        self.compiled.clear()
        self.positions = None
        self.tables = ()
        self.counters = (None, None)
        self.tiles = {}
        self.columns = None
        self._staging = Staging()

    def tiles_of(self, kind: LayerKind, *, decode: bool) -> Tiles:
        """The step's tiles, made once; tokens are counted from the first of their kernel. Those of a kind that an
        earlier step asked for are made when a step begins, and staged with its other arrays."""
        if (decode, kind) not in self.tiles:
            self.kinds.add(kind)
            made = self._plan(decode, kind)
            self.tiles[decode, kind] = made.filled(iter(self._staging.put(*made.arrays)))
        return self.tiles[decode, kind]

    def _plan(self, decode: bool, kind: LayerKind) -> Tiles:
        some, kernels = self.tables[kind.table].segments[decode], self.shapes[kind.shape]
        visible = None if self.columns is None else self.columns.visible(kind.window, kind.chunk)
        if visible is not None:
            own = visible[: self.decode_tokens] if decode else visible[self.decode_tokens :]
            return kernels.plan(some, self.decode_tokens, decode=decode, visible=own)
        if kind.chunk:
            some = within_chunks(some, kind.chunk, PAGE)
        return kernels.plan(some, self.decode_tokens, window=kind.window, decode=decode)

    def _keys(self, kinds: set[LayerKind]) -> list[tuple[bool, LayerKind]]:
        return [(decode, kind) for kind in sorted(kinds) for decode in self.tables[kind.table].segments]

    # Compiled passes -----------------------------------------------------------------------------------------------

    def inputs(self, kinds: set[LayerKind]) -> tuple[Hashable, list[Any]]:
        """The constants of a compiled pass for layers of such `kinds`, and the arrays that it takes each time."""
        keys = self._keys(kinds)
        tiles = [self.tiles_of(kind, decode=decode) for decode, kind in keys]
        shapes = [(of.rows, of.blocks, of.parts, *(array.shape for array in of.arrays)) for of in tiles]
        pages = [array for table in self.tables for array in table.pages]
        constants = (
            self.positions.ndim,
            self.count,
            self.decode_tokens,
            *(array.shape for array in pages),
            *keys,
            *shapes,
        )
        slots = [table.slots for table in self.tables]
        return constants, [self.positions, *slots, *pages, *(array for of in tiles for array in of.arrays)]

    def template(self, kinds: set[LayerKind]) -> PagedPass:
        """The step without its arrays: with other arrays, it is a step with the same constants."""
        bare = {key: self.tiles[key].bare for key in self._keys(kinds)}
        seen = None if self.seen is None else list[Seen]()
        tables = [StepTable() for _ in self.tables]
        return replace(self, positions=None, tables=tables, tiles=bare, columns=None, seen=seen)

    def filled(self, arrays: Sequence[Any]) -> PagedPass:
        """The template with `arrays` as `inputs` returns them."""
        rest = iter(arrays)
        positions, slots = next(rest), [next(rest) for _ in self.tables]
        tables = [StepTable(one, (next(rest), next(rest))) for one in slots]
        tiles = {key: of.filled(rest) for key, of in self.tiles.items()}
        return replace(self, positions=positions, tables=tables, tiles=tiles)
