"""The encoder backend: whole prompts in one pass, each token attending to tokens before and behind it.

For embedding models with bidirectional attention. Nothing is kept of a prompt, so chunks of it can't be computed one
after the other: its last chunk computes all of it, and those before it compute nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import mlx.core as mx
from msgspec.structs import replace

from ....core.capabilities import Sharing
from ....core.statistics import PrefixStatistics
from ...forward.ragged import ForwardPass, RaggedBatch
from ...forward.segments import ForwardOutput, KvSequence, RowSegment, with_columns
from ...mlxlm import Selection
from ..backend import Clock, LeastMemory, Live, WarmLimits, WarmPass
from .layer import EncoderLayer, EncoderPass, Placed

NO_TEXT = "this model generates no text: its tokens attend to those behind them"


@dataclass(frozen=True)
class EncoderConfig:
    """Layers with `windows` (0: none), for prompts of up to `longest` tokens. `selection` keeps hidden states."""

    windows: Sequence[int]
    selection: Selection
    longest: int

    name = "encoder"
    fused = False
    keep_prefixes = False

    def least_memory(self, max_running: int) -> LeastMemory:
        return LeastMemory(0, "nothing", "")

    def with_memory(self, budget: int) -> Self:
        return self

    def for_rows(self, max_running: int) -> Self:
        return self

    def build(self, module: Any, live: Live, clock: Clock = time.monotonic) -> EncoderBackend:
        return EncoderBackend(self, module)


class EncoderBackend:
    """The backend that `config` describes, for `module`."""

    name = "encoder"
    block = 1
    blocks = 0
    lookahead = 0
    launches_ahead = False
    sharing = Sharing.COPIED
    index = None
    chunk_sizes: tuple[int, ...] = ()
    draft_tokens = 0
    no_drafts = no_positions = no_features = no_axes = NO_TEXT
    replays = False

    def __init__(self, config: EncoderConfig, module: Any) -> None:
        self.prefill_quantum = config.longest  # so that most prompts are one chunk
        self._step = EncoderPass()
        layers = [EncoderLayer(window, self._step) for window in config.windows]
        self._forward = ForwardPass(module, layers, config.selection)

    def compute(self, segments: Sequence[RowSegment], previous: Any | None, *, hidden: bool = False) -> ForwardOutput:
        assert not with_columns(segments), self.no_positions
        refused = {segment.id: NO_TEXT for segment in segments if segment.picks or segment.wants}
        whole = [
            replace(segment, tokens=segment.sequence.tokens[: segment.end], start=0)
            for segment in segments
            if segment.hidden and segment.id not in refused
        ]
        if not whole:
            return ForwardOutput(refused=refused)
        batch = RaggedBatch(whole)
        counts, firsts = batch.counts.tolist(), batch.firsts.tolist()
        self._step.prompts = [Placed(first, count) for first, count in zip(firsts, counts, strict=True)]
        self._step.positions = mx.array(batch.positions)
        done = self._forward.run(batch, None, hidden=True)
        done.refused = refused
        return done

    # Nothing is kept of sequences --------------------------------------------------------------------------------

    def warm_passes(self, limits: WarmLimits) -> list[WarmPass]:
        return []

    def least_forced(self, decoding: int) -> int:
        return 0

    def free_blocks(self) -> int:
        return 0

    def match(self, salt: str, tokens: Sequence[int]) -> int:
        return 0

    def reuse(self, wanted: Sequence[tuple[KvSequence, int]]) -> list[int]:
        return [0] * len(wanted)

    def admit(self, sequence: KvSequence) -> None:
        """Nothing to do, as in those below."""

    def checkpoint(self, sequence: KvSequence, ends: Sequence[int]) -> None: ...

    def prepare(self) -> None: ...

    def commit(self, segments: Iterable[RowSegment]) -> None: ...

    def retract(self, sequence: KvSequence, length: int) -> int:
        return length

    def release(self, sequence: KvSequence) -> None: ...

    def invalidate(self, sequences: Iterable[KvSequence]) -> None: ...

    def reset(self) -> int:
        return 0

    def kv_bytes(self) -> int:
        return 0

    def statistics(self) -> PrefixStatistics:
        return PrefixStatistics()

    def close(self) -> None: ...
