"""The scorer of SpecPrefill: a small model that tells which tokens of a long prompt matter.

It runs on the owner's thread, on the same device, over a KV backend of its own. It computes a prompt in chunks; then it
goes on with a few greedy tokens, and compares the queries of these with the prompt's keys, some layers at a time. What
is computed of prompts is kept for others, as by any backend. Passes are launched with the steps that plan them, and
waited for when these are read.

A prompt that it fails on is prefilled whole, and no other is touched.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from ...core.capabilities import SpecPrefillCapabilities, StepCost
from ...core.messages import Submit
from ...core.plan import RowKept, ScoreChunk
from ...core.sparse_prompt import COMPARING_UNITS, LOOK_AHEAD
from ...core.statistics import ScorerStatistics
from ...errors import ConfigError, one_line
from ..base import RunnerBroken
from ..device.owner_thread import OutOfMemory, mlx_runtime
from ..forward.segments import KvSequence, RowSegment
from ..kv.backend import Clock
from ..kv.seen_queries import ObservedBackend, Seen
from ..loading.model import LoadedModel, build_backend
from ..loading.scorer import SCORED_ROWS
from ..loading.step_costs import timed_chunks
from ..step import RunningRow
from .importance import attended, kept_positions

_log = logging.getLogger(__name__)
_SALT = "warm-up"
_TIMED = (64, 256, 1024, 4096)
"""Lengths of chunks that are timed."""


class _Room(NamedTuple):
    """Prompts of up to `longest` tokens, in `blocks` blocks (0: no limit)."""

    longest: int
    blocks: int


@dataclass(slots=True, eq=False)
class _Prompt:
    """A prompt that is being scored, of which `kept` tokens stay behind the first `start`. `seen` are the queries of
    each look-ahead pass so far, `token` (1,) is the one that the last of them has drawn, and `weights` (n, S) are the
    largest ones of the layers that are compared."""

    row: RunningRow
    sequence: KvSequence
    start: int
    kept: int
    seen: list[list[Seen]] = field(default_factory=list)
    token: Any = None
    weights: Any = None

    @property
    def length(self) -> int:
        return len(self.row.request.prompt)


@dataclass
class ScoringStep:
    """What a step scores: `computed` segments, which others may reuse once it is read, prompts that are `done`, and
    `failed` ones with the reasons. `awaited` are arrays to wait for. Those in `evicted` have lost cached tokens."""

    computed: list[tuple[_Prompt, RowSegment]] = field(default_factory=list)
    done: list[_Prompt] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    evicted: set[str] = field(default_factory=set)
    awaited: list[Any] = field(default_factory=list)


def looks_ahead(row: RunningRow, chunk: ScoreChunk) -> bool:
    """Whether a chunk has units of a row's look-ahead, and no tokens of its prompt but the last."""
    return chunk.start >= len(row.request.prompt) - 1


class Scorer:
    """Scores prompts with `model`, which shares its first `vocabulary` tokens with the served one: of those that have
    at least `min_tokens` a share of `keep` stays. The thread that builds it owns it. Raises ConfigError where there is
    nothing to see of the model's attention."""

    def __init__(
        self, model: LoadedModel, vocabulary: int, *, keep: float, min_tokens: int, clock: Clock = time.monotonic
    ) -> None:
        self._model = model
        self._vocabulary = min(vocabulary, model.vocabulary)
        self._keep = keep
        self._min_tokens = min_tokens
        self._live: dict[str, KvSequence] = {}  # the registry of the backend's sequences
        self._backend = build_backend(model, self._live, clock)
        self._prompts: dict[str, _Prompt] = {}
        self._clock = clock
        self._chunks: tuple[StepCost, ...] = ()
        self._last: list[Any] = []  # arrays of the last pass
        self._failed = False
        self._check()

    def capabilities(self) -> SpecPrefillCapabilities:
        """Facts about the scorer, and its limits."""
        backend, room = self._backend, self._room
        return SpecPrefillCapabilities(
            scorer=self._model.name,
            keep=self._keep,
            min_tokens=self._min_tokens,
            longest=room.longest,
            rows=SCORED_ROWS,
            block=backend.block,
            blocks=room.blocks,
            prefill_tokens=self._model.prefill_tokens,
            prefill_quantum=backend.prefill_quantum,
            chunk_sizes=backend.chunk_sizes,
            chunks=self._chunks,
        )

    @property
    def _room(self) -> _Room:
        longest, blocks, block = self._model.context - LOOK_AHEAD, self._backend.blocks, self._backend.block
        return _Room(min(longest, blocks * block - LOOK_AHEAD) if blocks else longest, blocks)

    def match(self, request: Submit) -> int:
        """Return how many tokens of a prompt the prefix cache holds, without its last one."""
        return self._backend.match(request.salt, request.prompt[:-1])

    # Steps ---------------------------------------------------------------------------------------------------------

    def start(self, chunks: Sequence[tuple[RunningRow, ScoreChunk]]) -> ScoringStep:
        """Launch what a step scores. Raises RunnerBroken where MLX's runtime failed."""
        step, tokens = ScoringStep(), []
        for row, chunk in chunks:
            if (prompt := self._prompt(row, chunk, step)) is not None:
                if not looks_ahead(row, chunk):
                    tokens.append((prompt, chunk))
                else:
                    with self._guarded([prompt], step):
                        self._look_ahead(prompt, chunk, step)
        if tokens:
            with self._guarded([prompt for prompt, _ in tokens], step):
                self._compute(tokens, step)
        return step

    def read(self, step: ScoringStep) -> list[RowKept]:
        """Wait for what a step scores; the outcomes of prompts that are done, or have failed."""
        live = [prompt for prompt in {id(one): one for one, _ in step.computed}.values() if self._is_live(prompt)]
        with self._guarded([*live, *filter(self._is_live, step.done)], step):
            mx.eval(step.awaited)
        for prompt, segment in step.computed:
            if self._is_live(prompt):
                self._backend.commit([segment])
        kept = [one for prompt in step.done if self._is_live(prompt) and (one := self._outcome(prompt, step))]
        return [*kept, *(RowKept(id_, failure=reason) for id_, reason in step.failed.items())]

    def _outcome(self, prompt: _Prompt, step: ScoringStep) -> RowKept | None:
        positions: tuple[int, ...] = ()
        with self._guarded([prompt], step):
            weights = np.array(prompt.weights.mean(axis=0), np.float32)
            positions = kept_positions(weights, prompt.start, prompt.kept)
            self.release(prompt.row.id)
        return RowKept(prompt.row.id, positions) if positions else None

    def _is_live(self, prompt: _Prompt) -> bool:
        return self._prompts.get(prompt.row.id) is prompt

    def _prompt(self, row: RunningRow, chunk: ScoreChunk, step: ScoringStep) -> _Prompt | None:
        """Return a row's prompt, which takes its place when it is first seen; None where that failed, now or before."""
        known = self._prompts.get(row.id)
        if known is not None and known.row is row:
            return known
        if row.unscored:
            return None
        self.release(row.id)
        request = row.request
        sequence = self._live[row.id] = KvSequence(row.id, row.salt, request.prompt)
        kept = len(request.prompt) - row.skipped - row.cached
        new = self._prompts[row.id] = _Prompt(row, sequence, row.cached, kept)
        with self._guarded([new], step):
            (found,) = self._backend.reuse([(sequence, chunk.start)])
            if found == chunk.start:
                self._backend.admit(sequence)
            else:
                step.evicted.add(row.id)
                self._drop(new)
        return self._prompts.get(row.id)

    # Passes --------------------------------------------------------------------------------------------------------

    def _compute(self, chunks: Sequence[tuple[_Prompt, ScoreChunk]], step: ScoringStep) -> None:
        """Compute tokens of prompts, in one pass."""
        segments = [
            _segment(prompt, prompt.row.request.prompt[chunk.start : chunk.start + chunk.count], chunk.start)
            for prompt, chunk in chunks
        ]
        step.awaited.append(self._pass(segments, None))
        step.computed += [(prompt, segment) for (prompt, _), segment in zip(chunks, segments, strict=True)]

    def _pass(self, segments: Sequence[RowSegment], previous: Any | None) -> Any:
        """Launch a pass. Return the greedy tokens of its segments."""
        if not self._backend.launches_ahead:
            self._wait()
        done = self._backend.compute(segments, previous)
        assert done.logits is not None
        tokens = mx.argmax(done.logits[:, : self._vocabulary], axis=-1).astype(mx.int32)
        mx.async_eval(tokens, done.arrays)  # type: ignore[no-untyped-call]
        self._last = [tokens]
        return tokens

    def _wait(self) -> None:
        mx.eval(self._last)
        self._last = []

    def _look_ahead(self, prompt: _Prompt, chunk: ScoreChunk, step: ScoringStep) -> None:
        """Do units of a prompt's look-ahead: its passes, then comparisons of some layers each."""
        first = chunk.start - (prompt.length - 1)
        for unit in range(first, first + chunk.count):
            if unit < LOOK_AHEAD:
                self._pass_ahead(prompt, unit)
            else:
                self._compare(prompt, unit - LOOK_AHEAD)
        step.awaited.append([prompt.token, *([] if prompt.weights is None else [prompt.weights])])
        if first + chunk.count == LOOK_AHEAD + COMPARING_UNITS:
            step.done.append(prompt)

    def _pass_ahead(self, prompt: _Prompt, unit: int) -> None:
        """Feed the prompt's last token, or the one that was drawn behind it, and keep the queries."""
        tokens, previous = ((0,), 0) if unit else (prompt.row.request.prompt[-1:], -1)
        segment = _segment(prompt, tokens, prompt.length - 1 + unit, previous)
        with self._observed.seeing() as seen:
            prompt.token = self._pass([segment], prompt.token if unit else None)
        prompt.seen.append([one._replace(queries=one.queries[0, :, 0]) for one in seen])

    def _compare(self, prompt: _Prompt, unit: int) -> None:
        """Compare the queries with the keys of some layers."""
        layers = list(zip(*prompt.seen, strict=True))
        first, end = (len(layers) * i // COMPARING_UNITS for i in (unit, unit + 1))
        for passes in layers[first:end]:
            keys = self._observed.keys(passes[0].cache, prompt.sequence, prompt.length)
            queries = mx.stack([one.queries for one in passes])
            found = attended(queries, keys, passes[0].scale)
            prompt.weights = found if prompt.weights is None else mx.maximum(prompt.weights, found)
        if prompt.weights is not None:
            evaluate: Callable[..., Any] = mx.async_eval if self._backend.launches_ahead else mx.eval
            evaluate(prompt.weights)

    @property
    def _observed(self) -> ObservedBackend:
        assert isinstance(self._backend, ObservedBackend)
        return self._backend

    # The owner's ---------------------------------------------------------------------------------------------------

    def release(self, row_id: str) -> None:
        """Forget a prompt, known or not. What is computed of it may be reused."""
        prompt = self._prompts.pop(row_id, None)
        self._live.pop(row_id, None)
        if prompt is not None:
            with suppress(OutOfMemory), mlx_runtime("keeping what a scored prompt leaves"):
                self._backend.release(prompt.sequence)

    def warm_up(self) -> None:
        """Score a prompt in a chunk of the most tokens, and in as many of other usual sizes as fit behind it; time some
        by themselves. Leaves nothing behind."""
        longest, most = self._room.longest - 1, self._model.prefill_tokens
        chunks = [min(longest, most or 512)]
        for size in self._backend.chunk_sizes:
            if sum(chunks) + size <= longest and (not most or size < most):
                chunks.append(size)
        self._warm(chunks, compare=True)
        longest = min(longest, most or _TIMED[-1])
        self._chunks = tuple(timed_chunks(_TIMED, longest, lambda tokens: self._warm([tokens])))
        self.reset()

    def warm_up_look_ahead(self) -> None:
        """Do what follows a prompt's chunks, for one of a single token. Leaves nothing behind."""
        self._warm([1], compare=True)
        self.reset()

    def _warm(self, chunks: Sequence[int], *, compare: bool = False) -> float:
        """Compute a prompt in chunks, and `compare` a token behind it with all before. Return the chunks' seconds."""
        length = sum(chunks) + 1
        sequence = self._live[_SALT] = KvSequence(_SALT, _SALT, (0,) * length)
        self._backend.admit(sequence)
        try:
            with mlx_runtime("warming up the scorer"):
                began = self._clock()
                self._wait_for_chunks(sequence, chunks)
                seconds = self._clock() - began
                if compare:
                    self._observe(sequence, length - 1, compare=True)
        finally:
            self._backend.invalidate([sequence])
            del self._live[_SALT]
        return seconds

    def _wait_for_chunks(self, sequence: KvSequence, chunks: Sequence[int]) -> None:
        start = 0
        for size in chunks:
            self._pass([RowSegment(sequence, (0,) * size, start, wants=1, picks=True)], None)
            self._wait()
            start += size

    def _observe(self, sequence: KvSequence, place: int, *, compare: bool) -> list[Seen]:
        """Feed one token at `place`, and `compare` it with all before. Return what was seen."""
        with self._observed.seeing() as seen:
            self._pass([RowSegment(sequence, (0,), place, wants=1, picks=True)], None)
        for one in seen if compare else ():
            keys = self._observed.keys(one.cache, sequence, place + 1)
            mx.eval(attended(one.queries[:1, :, 0], keys, one.scale))
        self._wait()
        return seen

    def _check(self) -> None:
        """Raise ConfigError where passes can't be observed, or no layer attends to all tokens."""
        name, backend = self._model.name, self._backend
        reason = f"its {backend.name} KV backend does not show what it attends to"
        if isinstance(backend, ObservedBackend):
            sequence = self._live[_SALT] = KvSequence(_SALT, _SALT, (0, 0))
            backend.admit(sequence)
            reason = "" if self._observe(sequence, 0, compare=False) else "it has no layer with attention to all tokens"
            backend.invalidate([sequence])
            del self._live[_SALT]
        if reason:
            backend.close()
            raise ConfigError(
                f"`spec_prefill` {name} can't score prompts: {reason}; give another model, or leave it out",
                param="spec_prefill",
            )

    def reset(self) -> None:
        """Clear the scorer's prefix cache."""
        self._backend.reset()

    def statistics(self) -> ScorerStatistics:
        """Return what the scorer's cache holds."""
        return ScorerStatistics(len(self._prompts), self._backend.kv_bytes(), self._backend.statistics())

    def close(self) -> None:
        """Free everything."""
        for row_id in list(self._prompts):
            self.release(row_id)
        self._last = []
        self._backend.close()
        del self._backend, self._model

    # Failures ------------------------------------------------------------------------------------------------------

    @contextmanager
    def _guarded(self, prompts: Sequence[_Prompt], step: ScoringStep) -> Iterator[None]:
        """Give up `prompts` where work on them fails. A fault of MLX's runtime comes through: nothing can be trusted
        then."""
        try:
            with mlx_runtime("scoring a prompt"):
                yield
        except RunnerBroken:
            raise
        except Exception as error:  # of the model's code, whatever it raises
            self._last = []
            for prompt in prompts:
                self._drop(prompt)
                prompt.row.unscored, prompt.row.skipped = True, 0
                step.failed[prompt.row.id] = one_line(error)
            if not self._failed:
                self._failed = True
                _log.warning("the scorer failed (%s): prompts that it fails on are prefilled whole", one_line(error))

    def _drop(self, prompt: _Prompt) -> None:
        self._backend.invalidate([prompt.sequence])
        self._prompts.pop(prompt.row.id, None)
        self._live.pop(prompt.row.id, None)


def _segment(prompt: _Prompt, tokens: Sequence[int], start: int, previous: int = -1) -> RowSegment:
    return RowSegment(prompt.sequence, tokens, start, wants=1, picks=True, previous=previous)
