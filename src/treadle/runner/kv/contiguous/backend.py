"""The contiguous KV backend: growing buffers of each sequence's own, which MLX's operations read without masks.

Joining, leaving and growing touch no other sequence, and a sequence takes the memory of the tokens it holds; on a CPU
those that decode together share arrays while they are small (`stack`). Prefixes are cached as copies of blocks, made as
blocks are completed, and of a sequence's last tokens when it leaves; a sequence that reuses them copies them once more.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Self

import mlx.core as mx

from ....cache.block_store import BlockStore
from ....cache.prefix_index import Freed, Match, PrefixIndex
from ....cache.prefix_node import Node
from ....core.capabilities import Sharing
from ....core.statistics import PrefixStatistics
from ...forward.ragged import ForwardPass, RaggedBatch
from ...forward.segments import ForwardOutput, KvSequence, RowSegment, joined_states
from ...mlxlm import Selection
from ...recurrent.operations import RecurrentOperations
from ..backend import MOST_DRAFTS, Clock, LeastMemory, Live, WarmLimits, WarmPass
from ..block_resources import places_to_keep
from ..cache_layout import CacheLayout
from ..cost import KvCost
from ..lookahead import evaluation
from ..planned_attention import UNPLANNED, prefill_quantum, warm_passes
from ..recurrent_group import ROW_SLOTS, TEST_SLOTS, RecurrentConfig, RecurrentGroup, RecurrentRow
from ..seen_queries import Seen, seeing
from ..slot_allocator import SlotTable
from .buffer import STEP, Buffer
from .layer import ContiguousLayer, ContiguousPass
from .placing import place, place_last
from .stack import Stacks

PREFIX_BLOCK = 32
"""Tokens of a block that can be reused."""


class _State:
    """A sequence's buffers, one a layer, its recurrent states, and its place in the index, which has `cached` of its
    tokens. The first `committed` tokens are computed and known. Others may go on from the positions `marks`."""

    def __init__(self, buffers: list[Buffer]) -> None:
        self.buffers = buffers
        self.committed = 0
        self.cached = 0
        self.node: Node | None = None
        self.shares = True
        self.slots = SlotTable()
        self.marks: list[int] = []

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)


@dataclass(frozen=True)
class ContiguousConfig:
    """Buffers for layers with `windows` (0: none) on `device`. `budget` bytes (0: no limit) hold sequences, each of
    which takes `cost`, and cached prefixes. `selection` chooses what the model's head sees. `latent` says of each layer
    whether it holds latents, `chunked` whether its windows begin at multiples of their length (empty: none does).
    `recurrent` layers have slots for `max_running` sequences (0: a few). `layout` arranges the caches (None: one for
    each window, in order). With `narrows` the last layer computes only the tokens that reach the head. `lookahead` is
    `KvBackend.lookahead`.
    """

    windows: Sequence[int]
    selection: Selection | None
    device: str
    cost: KvCost
    budget: int = 0
    blocks: int = 0
    keep_prefixes: bool = True
    latent: Sequence[bool] = ()
    chunked: Sequence[bool] = ()
    recurrent: RecurrentConfig | None = None
    max_running: int = 0
    layout: CacheLayout | None = None
    narrows: bool = False
    lookahead: int = 1

    name = "contiguous"
    fused = False

    @property
    def slots(self) -> int:
        """Slots of recurrent states: those of running sequences, and as many for cached prefixes as a quarter of the
        budget holds, at most as many again."""
        assert self.recurrent is not None
        own = ROW_SLOTS * self.max_running or TEST_SLOTS
        return own + (min(own, self.budget // 4 // self.recurrent.slot_bytes) if self.budget else own)

    def least_memory(self, max_running: int) -> LeastMemory:
        return self.cost.least_memory(max_running, STEP)

    def with_memory(self, budget: int) -> Self:
        return replace(self, budget=budget, blocks=self.cost.blocks(budget, self.max_running, STEP))

    def for_rows(self, max_running: int) -> Self:
        return replace(self, max_running=max_running).with_memory(self.budget)

    def build(self, module: Any, live: Live, clock: Clock = time.monotonic) -> ContiguousBackend:
        return ContiguousBackend(self, module, live)


class ContiguousBackend:
    """The backend that `config` describes, for `module`."""

    name = "contiguous"
    block = STEP
    launches_ahead = False
    chunk_sizes: tuple[int, ...] = ()
    no_positions = ""

    def __init__(self, config: ContiguousConfig, module: Any, live: Live) -> None:
        self.blocks = config.blocks
        self.lookahead = config.lookahead
        self.prefill_quantum = prefill_quantum(config.device)
        self._config = config
        self._live = live
        self._step = ContiguousPass()
        matmuls = config.device == "cpu"
        none = [False] * len(config.windows)
        latent, chunked = config.latent or none, config.chunked or none
        self.layers = [
            ContiguousLayer(i, window, self._step, matmuls=matmuls, latent=latent[i], chunked=chunked[i])
            for i, window in enumerate(config.windows)
        ]
        self._stacks = Stacks([layer.stacks for layer in self.layers])
        self._recurrent = None
        if config.recurrent is not None:
            operations = RecurrentOperations(cpu=config.device == "cpu")
            self._recurrent = RecurrentGroup(config.recurrent, config.slots, operations)
        slots = () if self._recurrent is None else self._recurrent.layers
        caches = self.layers if config.layout is None else config.layout.caches(self.layers, slots)
        self._forward = ForwardPass(module, caches, config.selection)
        self.no_features, self.no_axes = self._forward.columns.reasons
        self._index = PrefixIndex(PREFIX_BLOCK) if config.keep_prefixes else None
        self._evaluate = evaluation(self.lookahead)
        self._store = BlockStore(self._evaluate)
        self._looked_up = self._reused = 0

    @property
    def sharing(self) -> Sharing:
        return Sharing.COPIED if self._recurrent is None else Sharing.MARKED

    @property
    def draft_tokens(self) -> int:
        return 0 if self.no_drafts else MOST_DRAFTS

    @property
    def no_drafts(self) -> str:
        return UNPLANNED if self.prefill_quantum else ""

    @property
    def replays(self) -> bool:
        return self._recurrent is not None

    @property
    def index(self) -> PrefixIndex | None:
        """None where there are recurrent layers: prefixes are reused where a state is, which no block shows."""
        return self._index if self._recurrent is None else None

    def warm_passes(self, limits: WarmLimits) -> list[WarmPass]:
        """On a CPU a sequence alone, for which MLX compiles other functions. Blocks are compiled in its second pass."""
        alone = [WarmPass(decoding=1)] * 2 if self._config.device == "cpu" else []
        return [*alone, *warm_passes(self._config.device, limits)]

    def least_forced(self, decoding: int) -> int:
        """MLX's attention on CUDA takes longer for segments of a new length than for as many single tokens."""
        return 0 if self.prefill_quantum else 1

    def free_blocks(self) -> int:
        held = sum(-(-state.buffers[0].end // STEP) for state in self._states() if state.buffers)
        return max(0, self.blocks - held)

    def kv_bytes(self) -> int:
        held = sum(state.nbytes for state in self._states())
        return held if self._recurrent is None else held + self._recurrent.slots.held * self._recurrent.slot_bytes

    def _states(self) -> list[_State]:
        return [sequence.kv for sequence in self._live.values() if sequence.kv is not None]

    # Sequences ---------------------------------------------------------------------------------------------------

    def match(self, salt: str, tokens: Sequence[int]) -> int:
        return 0 if self._index is None else self._reusable(self._index.find(salt, tokens)).tokens

    def _reusable(self, found: Match) -> Match:
        return found if self._recurrent is None else self._recurrent.slots.reusable(found)

    def reuse(self, wanted: Sequence[tuple[KvSequence, int]]) -> list[int]:
        return [self._reuse(sequence, count) for sequence, count in wanted]

    def _reuse(self, sequence: KvSequence, count: int) -> int:
        assert sequence.kv is None
        sequence.kv = state = self._new_state()
        if self._index is None:
            return 0
        self._looked_up += len(sequence.tokens) - 1
        found = self._reusable(self._index.match(sequence.salt, sequence.keys[:count], sequence.id))
        if found.tokens:
            self._copy_prefix(state, found)
        if self._recurrent is not None:
            blocks = state.cached // PREFIX_BLOCK
            state.marks = places_to_keep(self._index, sequence.salt, sequence.keys, blocks)
        return found.tokens

    def _copy_prefix(self, state: _State, found: Match) -> None:
        sizes = [PREFIX_BLOCK] * len(found.nodes) + ([found.agree] if found.last is not None else [])
        handles = [node.handle for node in found.path]
        for layer, buffer in enumerate(state.buffers):
            first = max(0, found.tokens - (buffer.window - 1 + buffer.slack)) if buffer.window else 0
            skip = first // PREFIX_BLOCK
            keys, values = self._store.parts(layer, handles[skip:], sizes[skip:])
            buffer.begin_with(keys, values, skip * PREFIX_BLOCK)
        self._evaluate([(buffer.keys, buffer.values) for buffer in state.buffers])
        if self._recurrent is not None:
            self._recurrent.slots.reuse(state.slots, handles[-1], found.tokens)
        self._store.copied_bytes += state.nbytes
        state.cached, state.node = len(found.nodes) * PREFIX_BLOCK, found.nodes[-1] if found.nodes else None
        self._reused += found.tokens

    def admit(self, sequence: KvSequence) -> None:
        if sequence.kv is None:
            sequence.kv = self._new_state()
        if sequence.private:
            sequence.kv.shares = False

    def _new_state(self) -> _State:
        return _State([Buffer(window, PREFIX_BLOCK) for window in self._config.windows])

    def checkpoint(self, sequence: KvSequence, ends: Sequence[int]) -> None:
        """Mark positions whose recurrent states are kept. In other layers, committed tokens can be reused wherever
        prompts part."""
        state: _State | None = sequence.kv
        if state is not None and self._recurrent is not None:
            state.marks += [end // PREFIX_BLOCK * PREFIX_BLOCK for end in ends]

    def retract(self, sequence: KvSequence, length: int) -> int:
        state: _State | None = sequence.kv
        if state is None:
            return length
        for buffer in state.buffers:
            buffer.cut(length)
        if self._recurrent is None:
            return length
        return self._recurrent.slots.retract(state.slots, length, state.committed, state.marks)

    def release(self, sequence: KvSequence) -> None:
        """The tokens behind the last whole block are cached as well."""
        state: _State | None = sequence.kv
        sequence.kv = None
        if state is None:
            return
        try:
            self._cache_rest(state, sequence)
        finally:  # also where there is no memory for copies
            self._stacks.release(state.buffers)
            if self._recurrent is not None:
                self._recurrent.slots.release(state.slots)

    def _cache_rest(self, state: _State, sequence: KvSequence) -> None:
        """Cache the tokens of a sequence that are not cached yet, if it shares any."""
        if self._index is None or not state.shares:
            return
        if state.cached < state.committed:
            self._cache(state, sequence, sequence.keys[state.cached : state.committed])
        last = state.node if state.shares else None
        if last is not None and last.tokens == (state.committed - 1) % PREFIX_BLOCK + 1:
            self._attach_state(state, state.committed, last)
        self._store.flush()
        self._trim()

    def invalidate(self, sequences: Iterable[KvSequence]) -> None:
        for sequence in sequences:
            if self._recurrent is not None and sequence.kv is not None:
                self._recurrent.slots.release(sequence.kv.slots)
            sequence.kv = None
        self._stacks.dissolve()
        self._step.clear()  # the pass that failed did not

    # Passes ------------------------------------------------------------------------------------------------------

    def compute(self, segments: Sequence[RowSegment], previous: Any | None, *, hidden: bool = False) -> ForwardOutput:
        if not segments:
            return ForwardOutput()
        if self._recurrent is None:
            return self._run(segments, previous, hidden=hidden)
        states: list[_State] = [segment.sequence.kv for segment in segments]
        rows = [RecurrentRow(state.slots, state.committed, state.marks) for state in states]
        *first, last = self._recurrent.waves(segments, rows)
        parts = []
        for wave in first:
            done = self._run(wave, None, hidden=hidden)
            parts.append(done.hidden)
            self._evaluate(done.arrays)
        done = self._run(last, previous, hidden=hidden)
        done.hidden = joined_states([*parts, done.hidden])
        return done

    def _run(self, segments: Sequence[RowSegment], previous: Any | None, *, hidden: bool = False) -> ForwardOutput:
        batch = RaggedBatch(self.order(segments))
        self.begin(batch)
        done = self._forward.run(batch, previous, hidden=hidden)
        arrays = (array for segment in batch.segments for b in segment.sequence.kv.buffers for array in b.arrays)
        done.arrays = list({id(array): array for array in arrays}.values())
        if self._recurrent is not None:
            done.arrays += self._recurrent.take_written()
        self._step.clear()
        return done

    def order(self, segments: Sequence[RowSegment]) -> list[RowSegment]:
        """Single tokens first."""
        return sorted(segments, key=lambda segment: len(segment.tokens) > 1)

    def begin(self, batch: RaggedBatch) -> None:
        placed = place(batch)
        self._step.singles = [one for one in placed if one.count == 1]
        self._step.longer = [one for one in placed if one.count > 1]
        self._step.positions = mx.array(batch.positions)
        self._narrow(batch)
        if self._recurrent is not None:
            self._recurrent.begin_operations(batch, [segment.sequence.kv.slots for segment in batch.segments])
        for one in placed:  # a pass that is computed again writes over its first results
            for buffer in one.buffers:
                buffer.cut(one.end - one.count)
        stacked = self._step.singles and batch.columns is None
        self._step.stacks = self._stacks.follow([one.buffers for one in self._step.singles]) if stacked else ()

    def _narrow(self, batch: RaggedBatch) -> None:
        """Note the tokens that reach the head: at most one of each segment, where the last layer may be narrowed."""
        self._step.wanted = None
        wants = [segment.wants for segment in batch.segments]
        if self._config.narrows and max(wants) == 1 and sum(wants) < batch.count:
            self._step.wanted, self._step.ends = place_last(batch)

    def seeing(self) -> AbstractContextManager[list[Seen]]:
        return seeing(self._step)

    def keys(self, cache: int, sequence: KvSequence, count: int) -> Any:
        return sequence.kv.buffers[cache].between(0, count)[0][0]

    # Prefixes ----------------------------------------------------------------------------------------------------

    def prepare(self) -> None: ...

    def commit(self, segments: Iterable[RowSegment]) -> None:
        if self._index is None:
            return
        for segment in segments:
            state: _State | None = segment.sequence.kv
            if state is not None:
                full, state.committed = state.committed // PREFIX_BLOCK, segment.end
                if full < segment.end // PREFIX_BLOCK:
                    self._cache_blocks(state, segment.sequence)

    def _cache_blocks(self, state: _State, sequence: KvSequence) -> None:
        while state.shares and state.cached + PREFIX_BLOCK <= state.committed:
            self._cache(state, sequence, sequence.keys[state.cached : state.cached + PREFIX_BLOCK])
        self._store.flush()
        self._trim()

    def _cache(self, state: _State, sequence: KvSequence, tokens: Sequence[int]) -> None:
        """Copy the next block, or the end, unless it is there already."""
        assert self._index is not None
        start, end = state.cached, state.cached + len(tokens)
        if any(buffer.base > start for buffer in state.buffers):
            state.shares = False
            return
        size = max(1, sum(buffer.token_bytes * len(tokens) for buffer in state.buffers))
        handle = self._store.new_handle()
        done = self._index.insert(state.node, sequence.salt, tokens, handle, size, sequence.id)
        self._free(done.freed)
        if done.node is None:
            state.shares = False  # the block before it was evicted: nothing behind can be found
            return
        if done.stored:
            self._store.put(handle, [buffer.between(start, end) for buffer in state.buffers])
        if end in state.marks and done.node.tokens == len(tokens):
            self._attach_state(state, end, done.node)
        state.cached, state.node = end, done.node

    def _attach_state(self, state: _State, end: int, node: Node) -> None:
        """Keep the recurrent state behind a block that ends at `end`."""
        if self._recurrent is not None:
            self._recurrent.slots.attach(state.slots, end, node.handle)

    def _trim(self) -> None:
        """Evict what the budget does not hold beside the live sequences."""
        if self._index is None or not self._config.budget:
            return
        over = self.kv_bytes() + self._index.size - self._config.budget
        if self._recurrent is not None:
            over += self._recurrent.slots.idle * self._recurrent.slot_bytes
        if over > 0:
            self._free(self._index.evict(over))

    def _free(self, freed: Sequence[Freed]) -> None:
        for handle, _ in freed:
            self._store.drop(handle)
        if self._recurrent is not None:
            self._recurrent.slots.detach(handle for handle, _ in freed)

    # The whole ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        self._step.clear()
        if self._index is not None:
            self._free(self._index.clear())

    def reset(self) -> int:
        if self._index is None:
            return 0
        tokens = self._index.tokens
        self._free(self._index.clear())
        for state in self._states():
            state.shares = False
        return tokens

    def statistics(self) -> PrefixStatistics:
        index = self._index
        if index is None:
            return PrefixStatistics()
        return PrefixStatistics(
            looked_up=self._looked_up,
            reused=self._reused,
            copied_bytes=self._store.copied_bytes,
            stored=index.stored_tokens,
            evicted=index.evicted_tokens,
            held=index.tokens,
            held_bytes=index.size,
        )
