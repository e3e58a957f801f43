"""A runner that computes hashes and holds the scheduler to its contract, and a loop around both on a clock of our own.

The token at a position is a hash of everything before it, so a row that lost, doubled or mixed up a token shows it.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from tests.core.hash_tower import HashTower
from tests.core.scoring import HashScorer, chosen
from treadle.core.capabilities import Sharing, SpecPrefillCapabilities, StepCost
from treadle.core.draft_budget import DraftBudget
from treadle.core.grammar_state import PENDING, READY, GrammarState, GrammarStatus
from treadle.core.image import VisionCapabilities, keyed
from treadle.core.messages import (
    Cancel,
    CancelReason,
    Constraint,
    Finish,
    FinishReason,
    Output,
    Pooling,
    Submit,
    TokenLogprob,
    WaitReason,
)
from treadle.core.plan import (
    Admit,
    DecodeRow,
    PrefillChunk,
    RowFailure,
    RowKept,
    RowScores,
    RowTokens,
    RowVector,
    ScoreChunk,
    StepPlan,
    StepResult,
)
from treadle.core.scheduler import MIN_SHARED_TOKENS, Scheduler, SchedulerLimits
from treadle.core.sequence import Sequence
from treadle.core.states import State
from treadle.core.statistics import EngineStatistics as Statistics
from treadle.core.statistics import RunnerStatistics
from treadle.core.verify_costs import VerifyCosts

VOCABULARY = 1000
NO_VISION = VisionCapabilities()
PLAIN = (StepCost(1, 1, 1.0), StepCost(4, 4, 1.2))
VERIFYING = (StepCost(1, 1, 1.1), StepCost(1, 5, 1.2), StepCost(4, 4, 1.3), StepCost(4, 20, 2.0))
"""Costs by which drafts pay for few sequences, and where most are accepted."""


class Boom(Exception):
    """What a step raises in these tests."""


def next_token(sequence: Iterable[int]) -> int:
    return zlib.crc32(repr(tuple(sequence)).encode()) % VOCABULARY


def vector_of(request: Submit) -> bytes:
    """The vector of a request that is pooled."""
    return repr((request.pooling, request.prompt)).encode()


def alike(a: Submit, b: Submit) -> int:
    """How many tokens two rows could share: all but the last of each prompt at most."""
    if a.salt != b.salt:
        return 0
    one, other = keys_of(a), keys_of(b)
    most = min(len(one), len(other)) - 1
    return next((i for i in range(most) if one[i] != other[i]), most)


def keys_of(request: Submit) -> tuple[int, ...]:
    """What tells prompts apart: tokens, and pictures."""
    return keyed(request.prompt, request.images)


def pop_head(scheduler: Scheduler) -> None:
    """Take the first sequence out of the queue."""
    head = scheduler._queue.head()
    assert head is not None
    scheduler._queue.pop(head)


def expected(request: Submit, keep: float = 1.0) -> tuple[tuple[int, ...], Finish]:
    """What a request gains and how it ends when nothing disturbs it: the oracle, one sequence alone. Of its prompt a
    share of `keep` is prefilled."""
    tokens: list[int] = []
    prompt = keys_of(request)
    if keep < 1 and not request.images:
        prompt = tuple(prompt[i] for i in chosen(prompt, 0, keep))
    if request.pooling is not None:
        return (), Finish(reason=FinishReason.STOP, vector=vector_of(request))
    if request.max_tokens == 0:
        return (), Finish(reason=FinishReason.LENGTH)
    while True:
        token = next_token((*prompt, *tokens))
        tokens.append(token)
        if token in request.stop_token_ids and len(tokens) > request.min_tokens:
            return tuple(tokens), Finish(reason=FinishReason.STOP, stop_token_id=token)
        if len(tokens) == request.max_tokens:
            return tuple(tokens), Finish(reason=FinishReason.LENGTH)


@dataclass(eq=False)
class _Held:
    """`tokens` are all of a row, those that steps in flight pick included; its cache holds the first `cached`, and
    memory is taken for `bound`: steps in flight may be found to have taken too much."""

    request: Submit
    tokens: list[int] = field(default_factory=list)
    cached: int = 0
    bound: int = 0
    computed: int = 0  # by chunks
    settled: int = 0  # of those in the cache, what finished steps computed
    shared: int = 0  # blocks that it holds together with the prefix cache
    marks: set[int] = field(default_factory=set)  # where others were said to wait for it
    sparse: bool = False  # a part of its prompt is prefilled: all that it shares is what it reuses
    start: int = 0  # cached tokens, with which it began
    kept: int = 0  # tokens of its prompt

    def fill(self, positions: Iterable[int], start: int) -> None:
        """Put tokens of prompt and history to where they are in the cache, from `start` on."""
        history = self.tokens[self.kept :]
        known = [*self.request.prompt, *history]
        for place, position in enumerate(positions, start):
            assert self.tokens[place] in (-1, known[position]), "a token in the wrong place"
            self.tokens[place] = known[position]


@dataclass(frozen=True)
class Shape:
    """What the runner of a bench can do. `blocks` 0: memory is not counted. `share`: rows that reuse a prefix hold it
    together; else each has a copy. `cache`: whether prefixes are reused at all. `marked`: of rows that run, only up to
    where a plan asked for it. `drafts`: a step samples up to so many tokens more of a row, of which it rejects some;
    with `guarded` only where they pay, and nothing is in flight beside it. `scorer` scores prompts."""

    lookahead: int = 0
    block: int = 4
    blocks: int = 0
    cache: bool = False
    share: bool = False
    marked: bool = False
    drafts: int = 0
    guarded: bool = False
    scorer: SpecPrefillCapabilities = field(default_factory=SpecPrefillCapabilities)
    vision: VisionCapabilities = NO_VISION

    @property
    def sharing(self) -> Sharing:
        return Sharing.MARKED if self.marked else Sharing.HELD if self.share else Sharing.COPIED


class HashRunner:
    """Keeps, for each row, the tokens it was fed. `raises` looks at a plan and says whether its start raises;
    `raises_late` whether its finish does."""

    def __init__(self, max_running: int, shape: Shape) -> None:
        self.rows: dict[str, _Held] = {}
        self.raises: Callable[[StepPlan], bool] = lambda plan: False
        self.raises_late: Callable[[StepPlan], bool] = lambda plan: False
        self.failures: dict[str, str] = {}
        self.cost: Callable[[int, int], tuple[float, float]] = lambda prefill, decode: (0.0, 0.0)
        self.lost: set[str] = set()
        self.failed: set[str] = set()
        self.accepts: Callable[[list[int]], int] = lambda tokens: zlib.crc32(repr(tokens[-3:]).encode())
        self.forces: Callable[[list[int]], int] = lambda tokens: 0  # how many tokens are forced behind these
        self.evicts: set[str] = set()  # rows whose cached tokens are gone when they are to be taken over
        self.grammars: dict[str, GrammarStatus] = {}  # in its cache
        self.asked: list[str] = []
        self.shape = shape
        self.tower = HashTower(shape.vision)
        self.encode_s: Callable[[int], float] = lambda layers: 0.0
        self.in_flight: deque[tuple[StepPlan, StepResult, list[tuple[_Held, int, int]]]] = deque()
        self.computed = 0  # prompt tokens
        self.stored: dict[tuple[str, tuple[int, ...]], None] = {}
        self.least_room = shape.blocks
        self.scorer = HashScorer(shape.scorer, shape.block)
        self._max_running = max_running

    # Grammars

    def grammar_state(self, constraint: Constraint) -> GrammarStatus:
        self.asked.append(constraint.grammar)
        return self.grammars.setdefault(constraint.grammar, PENDING)

    def compile(self, grammar: str, error: str = "") -> None:
        """End the compiling of a grammar that was asked for."""
        assert self.grammars[grammar] is PENDING, "only what is being compiled can be done"
        self.grammars[grammar] = GrammarStatus(GrammarState.FAILED, error) if error else READY

    def has_features(self, hash_: bytes) -> bool:
        return self.tower.has_features(hash_)

    # Memory

    def free_blocks(self) -> int:
        return self.shape.blocks - self._used()

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.shape.block)

    def _used(self) -> int:
        """Blocks that rows hold; a shared one counts once."""
        own = sum(self._blocks(row.bound) - row.shared for row in self.rows.values())
        return own + len(self._shared())

    def _shared(self) -> set[tuple[str, tuple[int, ...]]]:
        block = self.shape.block
        return {
            (row.request.salt, tuple(row.tokens[: (i + 1) * block]))
            for row in self.rows.values()
            for i in range(row.shared)
        }

    def match_prefix(self, admit: Admit) -> int:
        """Whole blocks of what was stored, no more than there is room for beside those that are held anyway."""
        assert admit.request.id not in self.rows, "asked for a row that is still here"
        if not self.shape.cache:
            return 0
        tokens, block, blocks = (*keys_of(admit.request), *admit.history)[:-1], self.shape.block, 0
        tokens = tokens if admit.reusable < 0 else tokens[: admit.reusable]
        most, held = (
            self.free_blocks() if self.shape.blocks else len(tokens),
            self._shared() if self.shape.share else set(),
        )
        while (blocks + 1) * block <= len(tokens):
            part = (admit.request.salt, tokens[: (blocks + 1) * block])
            most -= part not in held
            if part not in self.stored or most < 0:
                break
            blocks += 1
        return blocks * block

    def _settle(self, row: _Held, tokens: int) -> None:
        """The row's first `tokens` are computed: others may reuse them."""
        before, row.settled = row.settled, tokens
        if row.sparse:
            return
        if self.shape.marked:
            before, tokens = 0, max((mark for mark in row.marks if mark <= tokens), default=0)
        full = tokens // self.shape.block if self.shape.cache else 0
        for i in range(before // self.shape.block, full):
            self.stored[row.request.salt, tuple(row.tokens[: (i + 1) * self.shape.block])] = None
        if self.shape.share:
            row.shared = max(row.shared, full)

    def release(self, row_id: str) -> None:
        row = self.rows.pop(row_id, None)
        self.scorer.release(row_id)
        if row is not None and self.shape.marked and row_id not in self.lost | self.failed:
            row.marks.add(row.settled)
            self._settle(row, row.settled)
        self.lost.discard(row_id)
        self.failed.discard(row_id)

    # Steps

    def execute(self, plan: StepPlan) -> StepResult:
        """A step by itself."""
        self.start(plan)
        return self.finish()

    def start(self, plan: StepPlan) -> None:
        ids = set(plan.sequence_ids)
        assert ids, "a step without work"
        if self.raises(plan):
            for admit in plan.admit:
                self.rows.setdefault(admit.request.id, _Held(admit.request))
            self.lost |= ids
            raise Boom("the step raised")
        evicted = {admit.request.id for admit in plan.admit if not self._admit(admit)}
        assert len(self.rows) <= self._max_running, "more rows than slots"
        assert not ids & self.lost, "a lost row was used before it was released"
        assert len({chunk.id for chunk in plan.prefill}) == len(plan.prefill), "two chunks for one row"
        assert self.in_flight or not ids & self.failed, "a row that is known to have failed"
        self.failed |= evicted
        evicted |= self._without_features(plan)
        assert sum(map(bool, (plan.prefill, plan.score, plan.encode))) <= 1, "a step prefills, scores or encodes"
        kept = [self._score(chunk, evicted) for chunk in plan.score if chunk.id not in self.failed]
        self.failed |= evicted
        scores = [self._prefill(chunk) for chunk in plan.prefill if chunk.id not in self.failed]
        vectors = tuple(vector for chunk in plan.prefill if (vector := self._pooled(chunk)) is not None)
        failed = tuple(RowFailure(id=i, message=self.failures.pop(i)) for i in sorted(ids) if i in self.failures)
        self.failed.update(failure.id for failure in failed)
        rows = tuple(self._decode(row) for row in plan.decode if row.id not in self.failed)
        if self.shape.blocks:
            self.least_room = min(self.least_room, self.free_blocks())
            assert self.least_room >= 0, "more blocks than there are"
        self.tower.trim((row.request, row.cached) for row in self.rows.values())
        units = sum(chunk.count for chunk in (*plan.prefill, *plan.score))  # type: ignore[attr-defined]
        prefill_s, decode_s = self.cost(units, len(plan.decode))
        told = tuple(score for score in scores if score is not None)
        result = StepResult(
            rows=rows,
            scores=told,
            kept=tuple(one for one in kept if one is not None),
            vectors=tuple(vector for vector in vectors if vector.id not in self.failed),
            failures=failed,
            evicted=tuple(sorted(evicted)),
            prefill_s=prefill_s + self.encode_s(sum(encode.count for encode in plan.encode)),
            decode_s=decode_s,
        )
        rejected = self._rejected(plan, rows)
        fed = [(row, row.cached, rejected.get(row.request.id, 0)) for row in self.rows.values()]
        self.in_flight.append((plan, result, fed))
        assert len(self.in_flight) <= 1 + self.shape.lookahead, "more in flight than it can look ahead"

    def finish(self) -> StepResult:
        plan, result, fed = self.in_flight.popleft()
        if self.raises_late(plan):
            for void in (plan, *(flight[0] for flight in self.in_flight)):
                self.lost |= set(void.sequence_ids) - {admit.request.id for admit in void.admit}
                self.tower.drop(void)
            self.lost &= self.rows.keys()
            self.in_flight.clear()
            raise Boom("the step raised late")
        for row, tokens, rejected in fed:
            row.bound -= rejected
            if self.rows.get(row.request.id) is row and row.request.id not in self.lost | self.failed:
                self._settle(row, tokens)
        return result

    def _admit(self, admit: Admit) -> bool:
        """Whether the row has got what it was to reuse."""
        request, cached = admit.request, admit.cached_tokens
        assert request.id not in self.rows, "admitted twice without a release"
        if cached and request.id in self.evicts:
            self.evicts.remove(request.id)
            return False
        if request.constraint is not None and self.grammars.get(request.constraint.grammar) is not READY:
            return False
        tokens, block = [*keys_of(request), *admit.history], self.shape.block
        parts = (tuple(tokens[: (i + 1) * block]) for i in range(cached // block))
        assert all((request.salt, part) in self.stored for part in parts), "admitted with what is not cached"
        shared = cached // block if self.shape.share else 0
        row = self.rows[request.id] = _Held(request, tokens, cached, cached, settled=cached, shared=shared)
        row.sparse = admit.skipped > 0 or admit.reusable >= 0
        row.start, row.kept = cached, len(request.prompt) - admit.skipped
        if row.sparse:
            assert admit.reusable < 0 or cached <= admit.reusable, "it reuses what is not in its cache"
            row.tokens = [*([-1] * (row.kept - 1)), request.prompt[-1], *admit.history]
            row.fill(range(cached), 0)
        return True

    def _score(self, chunk: ScoreChunk, evicted: set[str]) -> RowKept | None:
        row = self.rows[chunk.id]
        assert row.cached == row.start, "a prompt is scored before it is prefilled"
        try:
            kept = self.scorer.score(chunk, row.request, row.start)
        except KeyError:
            evicted.add(chunk.id)
            return None
        if kept is not None and kept.failure:
            history = row.tokens[row.kept :]
            row.tokens, row.sparse, row.kept = [*row.request.prompt, *history], False, len(row.request.prompt)
        elif kept is not None:
            row.sparse = True
            assert len(kept.positions) == row.kept - row.start, "room was taken for what is kept"
        return kept

    def _without_features(self, plan: StepPlan) -> set[str]:
        """Encode images; the rows that lack layers of them, or features."""
        lacking = set()
        encodes = [encode for encode in plan.encode if encode.id in self.rows]
        hashes = [self.rows[encode.id].request.images[encode.image].hash for encode in encodes]
        assert len(set(hashes)) == len(hashes), "an image twice"
        assert not (plan.encode and plan.prefill), "images and prompts in one step"
        for encode in encodes:
            if encode.id not in self.failed and not self.tower.encode(self.rows[encode.id].request, encode):
                lacking.add(encode.id)
        for chunk in plan.prefill:
            images = self.rows[chunk.id].request.images if chunk.id in self.rows else ()
            if chunk.id not in self.failed and not self.tower.serves(images, chunk.start, chunk.count):
                lacking.add(chunk.id)
        return lacking

    def _prefill(self, chunk: PrefillChunk) -> RowScores | None:
        row = self.rows[chunk.id]
        assert chunk.count > 0, "an empty chunk"
        assert chunk.start == row.cached, f"chunk starts at {chunk.start}, the cache holds {row.cached}"
        fed = int(row.request.pooling is None)
        assert chunk.start + chunk.count <= len(row.tokens) - fed, "the last token is left for a decode row"
        assert all(mark > chunk.start for mark in chunk.checkpoints), "what is there already can't be kept any more"
        assert self.shape.marked or not chunk.checkpoints, "nobody asked for that"
        row.marks |= set(chunk.checkpoints)
        assert bool(chunk.positions) == row.sparse, "positions of what is kept"
        if row.sparse:
            assert len(chunk.positions) == chunk.count
            assert not chunk.checkpoints
            row.fill(chunk.positions, chunk.start)
        row.cached += chunk.count
        row.bound += chunk.count
        row.computed += chunk.count
        self.computed += chunk.count
        if row.request.prompt_logprobs is None:
            return None
        prompt = row.request.prompt
        scored = prompt[chunk.start + 1 : chunk.start + 1 + chunk.count]
        return RowScores(id=chunk.id, logprobs=tuple(TokenLogprob(logprob=-float(token)) for token in scored))

    def _pooled(self, chunk: PrefillChunk) -> RowVector | None:
        row = self.rows.get(chunk.id)
        if row is None or row.request.pooling is None or row.cached < len(row.tokens) or chunk.id in self.failed:
            return None
        assert row.computed == len(row.tokens) or row.request.pooling is Pooling.LAST, "states of tokens were reused"
        return RowVector(id=chunk.id, data=vector_of(row.request))

    def _decode(self, decode: DecodeRow) -> RowTokens:
        row = self.rows[decode.id]
        if decode.position < len(row.tokens) - row.kept:
            return self._superseded(row, decode)
        assert -1 not in row.tokens, "the prompt is complete"
        assert row.cached == len(row.tokens) - 1, "the cache holds all but the last token"
        assert row.bound == row.kept + decode.position - 1, "the next token is at this position at most"
        assert self.shape.drafts or row.bound == row.cached, "the position is known"
        assert decode.position + decode.drafts < row.request.max_tokens, "a token beyond the last"
        count = 1 + self.accepts(row.tokens) % (1 + decode.drafts)
        for _ in range(count):
            row.tokens.append(next_token(row.tokens))
        row.cached += count
        row.bound += 1 + decode.drafts
        forced = 0 if decode.drafts else self.forces(row.tokens)
        for _ in range(forced):
            row.tokens.append(next_token(row.tokens))
        tokens = tuple(row.tokens[-count - forced :])
        ready = 0 if forced else self.accepts(row.tokens) % (1 + self.shape.drafts)
        return RowTokens(id=decode.id, tokens=tokens, forced=forced, drafted=decode.drafts, ready=ready)

    def _superseded(self, row: _Held, decode: DecodeRow) -> RowTokens:
        """A step that was planned before it was known that its token is forced: it computes what it feeds."""
        assert self.in_flight, "no step in flight has forced its token"
        assert row.cached == row.kept + decode.position - 1, "it feeds the token behind the cache"
        row.cached += 1
        row.bound += 1
        return RowTokens(id=decode.id, tokens=())

    def _rejected(self, plan: StepPlan, rows: Iterable[RowTokens]) -> dict[str, int]:
        """Draft tokens of each row that the step has no use for."""
        gained = {row.id: len(row.tokens) - row.forced for row in rows if row.tokens}
        return {d.id: 1 + d.drafts - gained[d.id] for d in plan.decode if d.id in gained}


@dataclass
class Heard:
    """Everything that was told about one submission."""

    admitted: int = 0
    wait_s: float = 0.0
    waits_for: list[WaitReason] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    finish: Finish | None = None
    first_token: float | None = None
    prompt_done: list[int] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    kept: list[tuple[int | None, int | None]] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)


class Bench:
    """Scheduler and runner, stepped by hand. `heard` is by id; `step` checks the books and that each ends once."""

    def __init__(
        self,
        max_running: int = 4,
        prefill_tokens: int = 512,
        kv_tokens: int = 0,
        *,
        match: Callable[[Admit], int] | None = None,
        **shape: Any,
    ) -> None:
        self.shape = Shape(**shape)
        limits = SchedulerLimits(
            max_running,
            prefill_tokens,
            kv_tokens,
            kv_block=self.shape.block,
            kv_blocks=self.shape.blocks,
            lookahead=self.shape.lookahead,
            draft_tokens=self.shape.drafts,
            drafts_resolved=not self.shape.guarded,
            spec_prefill=self.shape.scorer,
            prefix_cache=self.shape.cache,
            sharing=self.shape.sharing,
            vision=self.shape.vision,
        )
        self.runner = HashRunner(max_running, self.shape)
        self.budget = DraftBudget(VerifyCosts(PLAIN, VERIFYING), self.shape.drafts) if self.shape.guarded else None
        grammars = self.runner.grammar_state
        self.scheduler = Scheduler(
            limits,
            match or self.runner.match_prefix,
            grammars,
            self.budget,
            self.runner.scorer.match,
            self.runner.has_features,
        )
        self.now = 0.0
        self.heard: dict[str, Heard] = {}
        self.plan = StepPlan(step=0)
        self.released: tuple[str, ...] = ()
        self.preempted: tuple[str, ...] = ()  # of those, in the last plan
        self.raised = 0
        self.waits = 0  # steps of rows that wait for what others compute

    def submit(self, id_: str, prompt: int | tuple[int, ...] = 4, max_tokens: int = 4, **options: object) -> Submit:
        tokens = (
            tuple((zlib.crc32(id_.encode()) + i) % VOCABULARY for i in range(prompt))
            if isinstance(prompt, int)
            else prompt
        )
        options.setdefault("max_wait_s", 1000.0)
        request = Submit(id=id_, prompt=tokens, max_tokens=max_tokens, **options)  # type: ignore[arg-type]
        self.send(request)
        return request

    def send(self, request: Submit) -> None:
        self.scheduler.submit(request, self.now)
        self.heard.setdefault(request.id, Heard())

    def cancel(self, id_: str, reason: CancelReason = CancelReason.CLIENT) -> None:
        self.scheduler.cancel(Cancel(id=id_, reason=reason), self.now)

    def step(self, seconds: float = 0.01) -> tuple[Output, ...]:
        """One iteration as the engine's loop does it."""
        ended = self.scheduler.take_released_ids()
        self.release(ended)
        self.plan = self.scheduler.plan(self.now, self.runner.free_blocks() if self.shape.blocks else None)
        self.preempted = self.scheduler.take_released_ids()
        self.release(self.preempted)
        self.released = ended + self.preempted
        self.scheduler.check_integrity()
        self._check_joins()
        began, outputs = self.now, self._advance()
        if self.now == began:
            self.now += seconds
        self.hear(outputs)
        self.scheduler.check_integrity()
        return outputs

    def _check_joins(self) -> None:
        """Nobody who joins could have waited for what another one is about to compute; but in a trial nobody waits."""
        running = self.scheduler._running
        if not self.shape.cache or any(row.suspect for row in running.values()):
            return
        ids = [admit.request.id for admit in self.plan.admit]
        before = [row for row in running.values() if row.joined and row.id not in ids]
        for row in (running[id_] for id_ in ids):
            if not row.request.computes_whole_prompt and row.sparse is None:
                assert not [lead.id for lead in before if self._worth(row, lead, before)], "it computes what others do"
            before.append(row)
        waiting = [
            (row, row.prefix_leader) for row in running.values() if not row.joined and row.prefix_leader is not None
        ]
        assert all(alike(row.request, lead.request) >= row.awaited_tokens for row, lead in waiting)
        self.waits += len(waiting)

    def _worth(self, row: Sequence, lead: Sequence, joined: list[Sequence]) -> bool:
        """Whether `lead`, one of those who have `joined`, still computes enough that `row` begins with."""
        if lead.state is not State.PREFILL or lead.request.computes_whole_prompt or lead.sparse is not None:
            return False
        shared = alike(row.request, lead.request)
        dense = [other for other in joined if other is not lead and other.sparse is None]
        others = [] if self.shape.marked else dense
        kept = [min(alike(row.request, other.request), self._settled(other)) for other in others]
        return self._settled(lead) < shared and shared - max(lead.cached_tokens, *kept, 0) >= MIN_SHARED_TOKENS

    def _settled(self, row: Sequence) -> int:
        """Tokens that the runner has of a row; the plan at hand is not started yet."""
        new = next((admit.cached_tokens for admit in self.plan.admit if admit.request.id == row.id), 0)
        return self.runner.rows[row.id].settled if row.id in self.runner.rows else new

    def release(self, ids: tuple[str, ...]) -> None:
        assert len(set(ids)) == len(ids), "released twice"
        for row_id in ids:
            self.runner.release(row_id)

    def _advance(self) -> tuple[Output, ...]:
        scheduler = self.scheduler
        if self.plan.idle:
            return self._finish_until(max(0, scheduler.in_flight - 1))
        try:
            self.runner.start(self.plan)
        except Boom as error:
            self.raised += 1
            outputs = self._finish_until(1)
            return outputs + scheduler.recover(self.plan, str(error)) if scheduler.in_flight else outputs
        return self._finish_until(self.shape.lookahead)

    def _finish_until(self, in_flight: int) -> tuple[Output, ...]:
        scheduler = self.scheduler
        outputs: tuple[Output, ...] = ()
        while scheduler.in_flight > in_flight:
            plan = scheduler.oldest_plan
            try:
                result = self.runner.finish()
            except Boom as error:
                self.raised += 1
                outputs += scheduler.recover(plan, str(error))
            else:
                self.now += result.prefill_s + result.decode_s
                outputs += scheduler.apply(plan, result)
        return outputs + scheduler.flush()

    def hear(self, outputs: Iterable[Output]) -> None:
        for output in outputs:
            heard = self.heard[output.id]
            assert heard.finish is None, f"{output.id} heard of after its end"
            if output.waits_for is not None:
                heard.waits_for.append(output.waits_for)
            if output.admitted:
                heard.admitted += 1
                heard.wait_s = output.wait_s
            if output.tokens and heard.first_token is None:
                heard.first_token = self.now
            if output.prompt_tokens_done is not None:
                heard.prompt_done.append(output.prompt_tokens_done)
            if output.cached_tokens is not None:
                heard.cached.append(output.cached_tokens)
            if output.scored_tokens is not None:
                heard.kept.append((output.scored_tokens, output.kept_tokens))
            heard.scores += [score.logprob for score in output.prompt_logprobs]
            heard.tokens += output.tokens
            heard.finish = output.finish

    def run(self, steps: int = 10_000) -> int:
        """Step until nothing is left to do; how many steps that took."""
        for done in range(steps):
            if not self.scheduler.has_work:
                return done
            self.step()
        raise AssertionError(f"still at work after {steps} steps")

    def until(self, holds: Callable[[], bool], steps: int = 10_000) -> None:
        for _ in range(steps):
            if holds():
                return
            self.step()
        raise AssertionError(f"not reached within {steps} steps")

    def statistics(self) -> Statistics:
        return self.scheduler.statistics(self.now, RunnerStatistics())

    def assert_idle(self) -> None:
        """Nothing is left, neither here nor in the runner."""
        scheduler = self.scheduler
        scheduler.check_integrity()
        kept = (
            scheduler._sequences,
            scheduler._running,
            scheduler._released_ids,
            scheduler._in_flight,
            scheduler._outputs,
            scheduler._encodings._open,
        )
        assert not any(kept), kept
        assert not scheduler._queue._tenants
        assert not scheduler._queue._entries
        assert not scheduler._queue.held
        assert not self.runner.rows
        assert not self.runner.scorer.rows
        assert not self.runner.lost | self.runner.failed

    def assert_undisturbed(self, request: Submit, keep: float = 1.0) -> None:
        """The request got what it would have got alone, where a share of `keep` of its prompt is prefilled."""
        heard = self.heard[request.id]
        assert (tuple(heard.tokens), heard.finish) == expected(request, keep)
