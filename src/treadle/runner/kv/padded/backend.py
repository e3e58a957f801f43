"""The padded and the serial KV backend: mlx-lm's own caches, which serve every architecture.

The caches can hold anything (recurrent state, rotating windows, lists of caches). Prompts are read one by one, or
several short ones in a padded pass. The padded backend merges the caches of sequences that decode into one batch, at
the cost of a copy whenever one joins or leaves; the serial one decodes one sequence after the other.

Prefixes are cached as snapshots (`snapshots`) of sequences on their way, and of what sequences leave behind.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, Self

import mlx.core as mx

from ....core.capabilities import Sharing
from ....core.statistics import PrefixStatistics
from ... import mlxlm
from ...device.owner_thread import mlx_runtime
from ...forward.segments import ForwardOutput, KvSequence, RowSegment, with_columns
from ...mlxlm import Caches, MlxLm, Selection
from ..backend import Clock, LeastMemory, Live, WarmLimits, WarmPass
from ..cost import KvCost
from ..lookahead import evaluation, lookahead
from ..planned_attention import pad_to, prefill_quantum, warm_passes
from .batch import DecodeBatch, PaddedState
from .cached_model import CachedModel, last_tokens
from .last_step import LastStep
from .parts import head_of, is_repeated, join, parts_of
from .prefill import passes, together
from .snapshots import BLOCK, LEAST, Snapshots

UNKNOWN_BUDGET = 2 << 30
"""Bytes for caches, where nothing says how much memory there is: half of it at most is for snapshots."""
_UNCUT = "mlx-lm's caches can be cut for all sequences of a batch alike, and not for each by itself"
_ONE_BY_ONE = "its requests are decoded one by one, in caches of mlx-lm's, not all of which can be cut"
_COUNTED = "mlx-lm's caches count the tokens that they hold, and take the number for the position"
_NO_CACHE = "the runner holds no cache for this request"


@dataclass(frozen=True)
class PaddedConfig:
    """mlx-lm's caches on `device`, `batched` where they can be merged; `shared_prefill` where several prompts may share
    a pass. `budget` bytes (0: unknown) hold sequences, each of which takes `cost`, and snapshots. `selection` keeps
    hidden states."""

    library: MlxLm
    device: str
    cost: KvCost
    budget: int = 0
    batched: bool = True
    shared_prefill: bool = False
    keep_prefixes: bool = True
    selection: Selection | None = None

    fused = False

    @property
    def name(self) -> str:
        return "padded" if self.batched else "serial"

    def least_memory(self, max_running: int) -> LeastMemory:
        return self.cost.least_memory(max_running, 1)

    def with_memory(self, budget: int) -> Self:
        return replace(self, budget=budget)

    def for_rows(self, max_running: int) -> Self:
        return self

    def build(self, module: Any, live: Live, clock: Clock = time.monotonic) -> PaddedBackend:
        return PaddedBackend(self, module, live, clock)


class PaddedBackend:
    """The backend that `config` describes, for `module`; `clock` times prompts."""

    block = 1
    blocks = 0
    launches_ahead = False
    sharing = Sharing.MARKED
    chunk_sizes: tuple[int, ...] = ()
    draft_tokens = 0
    replays = False
    no_positions = no_features = no_axes = _COUNTED

    def __init__(self, config: PaddedConfig, module: Any, live: Live, clock: Clock) -> None:
        self.name = config.name
        self.no_drafts = _UNCUT if config.batched else _ONE_BY_ONE
        self.prefill_quantum = prefill_quantum(config.device)
        self._config = config
        self._live = live
        self._clock = clock
        self.lookahead = lookahead(config.device)
        evaluate = evaluation(self.lookahead)
        self._model = CachedModel(module, config.library, pad_to(config.device), config.selection, evaluate)
        self._batch = DecodeBatch()
        self._last = LastStep(config.library)
        self._prompts: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
        self._snapshots = _snapshots(config.library, module, evaluate) if config.keep_prefixes else None
        self.index = None  # snapshots are reused whole: routers that compare blocks could not tell what is

    def warm_passes(self, limits: WarmLimits) -> list[WarmPass]:
        return warm_passes(self._config.device, limits)

    def least_forced(self, decoding: int) -> int:
        """They take a pass of their own, in which all others could have gained a token."""
        return 0 if self.prefill_quantum else 1 + (decoding if self._config.batched else 1)

    def free_blocks(self) -> int:
        return 0

    # Sequences ---------------------------------------------------------------------------------------------------

    def match(self, salt: str, tokens: Sequence[int]) -> int:
        return 0 if self._snapshots is None else self._snapshots.match(salt, tokens)

    def reuse(self, wanted: Sequence[tuple[KvSequence, int]]) -> list[int]:
        return [self._reuse(sequence, count) for sequence, count in wanted]

    def _reuse(self, sequence: KvSequence, count: int) -> int:
        assert sequence.kv is None
        if self._snapshots is None:
            return 0
        self._snapshots.looked_up += len(sequence.tokens) - 1
        found = self._snapshots.find(sequence.salt, sequence.keys[:count], sequence.id)
        if found is None:
            return 0
        sequence.kv = PaddedState(found.caches, cached=found.tokens, stored=found.tokens)
        return found.tokens

    def admit(self, sequence: KvSequence) -> None:
        if sequence.kv is None:
            sequence.kv = PaddedState(self._model.new_caches())
        if self._snapshots is not None:
            state: PaddedState = sequence.kv
            tokens = sequence.keys[:-1]
            state.checkpoints = self._snapshots.checkpoints(sequence.salt, tokens, state.cached, sequence.id)
            self._snapshots.shrink(self._snapshot_bytes())

    def checkpoint(self, sequence: KvSequence, ends: Sequence[int]) -> None:
        """Plan snapshots at `ends`, rounded down to whole blocks not yet passed: one serves prompts that differ a few
        tokens later."""
        state: PaddedState | None = sequence.kv
        if state is None:
            return
        checkpoints = set(state.checkpoints)
        for end in ends:
            blocks = end // BLOCK * BLOCK
            if blocks > state.stored:
                checkpoints.add(blocks if blocks > state.cached and blocks >= state.stored + LEAST else end)
        state.checkpoints = sorted(checkpoints)

    def prepare(self) -> None: ...

    def commit(self, segments: Iterable[RowSegment]) -> None:
        for segment in segments:
            if segment.sequence.kv is not None:
                segment.sequence.kv.committed = segment.end

    def retract(self, sequence: KvSequence, length: int) -> int:
        raise AssertionError("no drafts are verified")

    def release(self, sequence: KvSequence) -> None:
        """Release the sequence's caches: at once, or at the next decode step if others share the batch."""
        state: PaddedState | None = sequence.kv
        if state is None:
            return
        caches, count = self._trusted(state, len(sequence.tokens))
        self.invalidate([sequence])
        if caches is not None:
            self._store(state, sequence, sequence.keys[:count], caches)

    def _trusted(self, state: PaddedState, known: int) -> tuple[Caches | None, int]:
        """The caches of a sequence that leaves, of which `known` tokens are known, and the number of tokens that they
        hold: the committed ones, and those of a prompt that are in flight. None where others are in them."""
        if self._snapshots is None or state.committed is None:
            return None, 0
        if state.committed < state.cached:
            if (caches := self._last.caches_before(state)) is not None:
                return caches, state.cached - 1
            if not self.lookahead or state.cached > known:
                return None, 0
        if state.caches is not None:
            return state.caches, state.cached
        return (self._batch.caches_of(state) if state in self._batch else None), state.cached

    def invalidate(self, sequences: Iterable[KvSequence]) -> None:
        """Drop the caches of `sequences`, whose layers a failed pass may have advanced in part: all sequences of the
        batch, if the pass was over the batch."""
        for sequence in sequences:
            if sequence.kv is not None:
                self._batch.forget(sequence.kv)
                self._last.forget(sequence.kv)
                for results in self._prompts:
                    results.pop(sequence.id, None)
                sequence.kv = None

    def reset(self) -> int:
        for state in self._states():
            state.shares = False
        return 0 if self._snapshots is None else self._snapshots.clear()

    def kv_bytes(self) -> int:
        own = (mlxlm.kv_bytes(state.caches) for state in self._states() if state.caches is not None)
        return self._batch.kv_bytes + sum(own)

    def statistics(self) -> PrefixStatistics:
        return PrefixStatistics() if self._snapshots is None else self._snapshots.statistics()

    def close(self) -> None:
        self._batch.drop()
        self._last.clear()
        self._prompts = ({}, {})
        self.reset()

    def _states(self) -> list[PaddedState]:
        return [sequence.kv for sequence in self._live.values() if sequence.kv is not None]

    # Prefixes ----------------------------------------------------------------------------------------------------

    def _snapshot_bytes(self) -> int:
        """Bytes for snapshots: what live sequences leave, and half at most."""
        budget = self._config.budget or UNKNOWN_BUDGET
        return min(budget // 2, budget - self.kv_bytes())

    def _store(self, state: PaddedState, sequence: KvSequence, tokens: Sequence[int], caches: Caches) -> None:
        """Store a snapshot of `caches`, which nothing else writes to, if reusing it saves LEAST tokens."""
        if self._snapshots is None or not state.shares or len(tokens) < max(BLOCK, state.stored + LEAST):
            return
        self._snapshots.store(sequence.salt, tokens, caches, self._snapshot_bytes(), sequence.id)
        state.stored = len(tokens)

    def _store_checkpoint(self, segment: RowSegment) -> None:
        """Store a sequence that has come to one of its checkpoints."""
        sequence, state = segment.sequence, segment.sequence.kv
        if state is not None and state.cached == segment.end and segment.end in state.checkpoints:
            self._store(state, sequence, sequence.keys[: segment.end], mlxlm.shallow_copies(state.caches))

    # Passes ------------------------------------------------------------------------------------------------------

    def compute(self, segments: Sequence[RowSegment], previous: Any | None, *, hidden: bool = False) -> ForwardOutput:
        """Prompts are computed at once, up to the tokens whose logits are sampled from; those share a pass, and are all
        that is computed when it is run again."""
        assert not with_columns(segments), self.no_positions
        done = ForwardOutput()
        if self.lookahead and is_repeated(segments):
            self._take_back(segments)
            scores, done.hidden = map(dict, self._prompts)
        else:
            scores = self._compute_prompts(segments, done)
        self._sample_from(segments, scores, previous, done)
        if self._snapshots is not None:
            self._snapshots.shrink(self._snapshot_bytes())
        return done

    def _take_back(self, segments: Sequence[RowSegment]) -> None:
        """Take back the tokens that were decoded last."""
        self._last.take_back()
        for segment in segments:
            if segment.picks and segment.sequence.kv is not None:
                segment.sequence.kv.cached = segment.end - 1

    def _compute_prompts(self, segments: Sequence[RowSegment], done: ForwardOutput) -> dict[str, Any]:
        """Compute what stands before tokens to sample from; logits of those to be scored, by id."""
        began = self._clock()
        self._last.clear()
        heads = [head for segment in segments if (head := head_of(segment)) is not None]
        if heads:
            with mlx_runtime("leaving a batch"):
                self._batch.take_out([head.sequence.kv for head in heads])
        scores = self._read_all(heads, done)
        if self.lookahead:
            self._prompts = dict(scores), dict(done.hidden)
            done.arrays += [mlxlm.states(head.sequence.kv.caches) for head in heads if head.id not in done.refused]
        elif heads:
            done.prefill_s = self._clock() - began
        return scores

    def _sample_from(
        self, segments: Sequence[RowSegment], scores: dict[str, Any], previous: Any | None, done: ForwardOutput
    ) -> None:
        """Compute the tokens to sample from, and put their logits beside those to be scored."""
        last = [segment for segment in segments if segment.picks and segment.id not in done.refused]
        ids, logits = self._decode(last, previous, done)
        if scores:
            picked = {} if logits is None else {id_: logits[i : i + 1] for i, id_ in enumerate(ids)}
            join(segments, scores, picked, done)
        else:
            done.logits, done.places = logits, {id_: (i, 1) for i, id_ in enumerate(ids)}

    def _read_all(self, heads: Sequence[RowSegment], done: ForwardOutput) -> dict[str, Any]:
        """Compute prompts, from one checkpoint to the next; logits of those to be scored, by id."""
        scores: dict[str, Any] = {}
        for parts in zip_longest(*(parts_of(segment) for segment in heads)):
            some = [part for part in parts if part is not None and part.id not in done.refused]
            self._read_some(some, scores, done)
            for part in some:
                self._store_checkpoint(part)
        return scores

    def _read_some(self, heads: Sequence[RowSegment], scores: dict[str, Any], done: ForwardOutput) -> None:
        """Several short chunks in one pass where the model can, the others one by one."""
        shared = [one for one in heads if not (one.wants or one.hidden)] if self._config.shared_prefill else []
        for group in passes(shared):
            if len(group) == 1 or not self._read_together(group):
                for segment in group:
                    self._read(segment, scores, done)
        for segment in heads:
            if segment not in shared:
                self._read(segment, scores, done)

    def _read_together(self, segments: Sequence[RowSegment]) -> bool:
        """Compute `segments` in one pass. False, with nothing changed, where one of them has to be computed alone."""
        states = [segment.sequence.kv for segment in segments]
        own = [state.caches for state in states if state is not None and state.caches is not None]
        if len(own) < len(segments):
            return False
        try:
            with mlx_runtime("reading prompts"):
                prompts = [segment.known for segment in segments]
                model = self._model
                caches = together(model.module, prompts, own, pad_to=model.pad_to, evaluate=model.evaluate)
        except (ValueError, TypeError, IndexError, OverflowError):
            return False
        for segment, state, new in zip(segments, states, caches, strict=True):
            state.caches, state.cached = new, segment.end
        return True

    def _read(self, segment: RowSegment, scores: dict[str, Any], done: ForwardOutput) -> None:
        state: PaddedState | None = segment.sequence.kv
        if state is None or state.caches is None:
            done.refused[segment.id] = _NO_CACHE
            return
        assert segment.start == state.cached, f"chunk at {segment.start}, cached {state.cached}"
        try:
            with mlx_runtime("reading a prompt"):
                if segment.wants:
                    scores[segment.id] = self._model.score(segment.known, state.caches)
                elif segment.hidden:
                    done.hidden[segment.id] = self._model.hidden(segment.known, state.caches, segment.hidden)
                else:
                    self._model.prefill(segment.known, state.caches)
        except (ValueError, TypeError, IndexError, OverflowError) as error:
            done.refused[segment.id] = f"the prompt can't be read: {error}"
            state.committed = None  # some layers may have advanced
            return
        state.cached = segment.end

    # Decoding ----------------------------------------------------------------------------------------------------

    def _decode(
        self, segments: Sequence[RowSegment], previous: Any | None, done: ForwardOutput
    ) -> tuple[list[str], Any | None]:
        """Ids of sequences, and logits (B, V) of their last tokens, not evaluated."""
        wanted: dict[PaddedState, RowSegment] = {}
        for segment in segments:
            state: PaddedState | None = segment.sequence.kv
            if state is None or (state.caches is None and state not in self._batch):
                done.refused[segment.id] = _NO_CACHE
                continue
            assert segment.end == state.cached + 1, "the prompt must be in the cache"
            wanted[state] = segment
        if not wanted:
            return [], None
        for state, segment in wanted.items():
            state.cached = segment.end
        with mlx_runtime("decoding"):
            decode = self._decode_batch if self._config.batched else self._decode_serially
            return decode(wanted, previous, done)

    def _decode_batch(
        self, wanted: dict[PaddedState, RowSegment], previous: Any | None, done: ForwardOutput
    ) -> tuple[list[str], Any]:
        self._batch.arrange(list(wanted))
        ordered = [wanted[state] for state in self._batch.members if state is not None]
        logits = self._decode_token(self._batch.members, self._batch.caches, last_tokens(ordered, previous), done)
        return [segment.id for segment in ordered], logits

    def _decode_serially(
        self, wanted: dict[PaddedState, RowSegment], previous: Any | None, done: ForwardOutput
    ) -> tuple[list[str], Any]:
        logits = []
        for state, segment in wanted.items():
            assert state.caches is not None, "nothing is batched"
            logits.append(self._decode_token([state], state.caches, last_tokens([segment], previous), done))
        return [segment.id for segment in wanted.values()], mx.concatenate(logits)

    def _decode_token(
        self, members: Sequence[PaddedState | None], caches: Caches, tokens: Any, done: ForwardOutput
    ) -> Any:
        """Logits (B, V) of one token a sequence; with lookahead it can be taken back."""
        if self.lookahead:
            self._last.begin(members, caches)
        logits = self._model.decode(tokens, caches)
        done.arrays.extend(mlxlm.states(caches))
        return logits


def _snapshots(library: MlxLm, module: Any, evaluate: Callable[[Any], None]) -> Snapshots:
    """Snapshots that can be cut where the caches hold every token and nothing else."""
    windows = library.windows(module)
    return Snapshots(library, cuts=windows is not None and not any(windows), evaluate=evaluate)
