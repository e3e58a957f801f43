"""Runner that computes nothing: its tokens come from a script, and it checks its calls.

It keeps to the whole contract of `runner/base`, and checks its plans: the tokens of a row come in order and without a
gap; rows are released before they are admitted again; blocks never exceed their number.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from treadle.cache.prefix_index import PrefixIndex
from treadle.core.capabilities import Capabilities
from treadle.core.grammar_state import READY, GrammarStatus
from treadle.core.messages import BlockEvent, Constraint, Pooling, Submit, TokenLogprob
from treadle.core.plan import Admit, DecodeRow, PrefillChunk, RowScores, RowTokens, RowVector, StepPlan, StepResult
from treadle.core.pooling import EmbeddingCapabilities
from treadle.core.statistics import RunnerStatistics
from treadle.runner.base import Job

Script = Callable[[Submit, int], int]
"""Token of a request at a position."""


@dataclass(eq=False)
class Held:
    """A row of the runner: all of its `tokens`, the first `cached` of which are in its cache."""

    request: Submit
    tokens: list[int]
    cached: int = 0
    settled: int = 0  # of those in the cache, what finished steps computed


class ScriptedRunner:
    """`script` samples the tokens. `fail` is raised by every step while it is set.

    With `prefix_cache` among its capabilities it reuses, in whole blocks, the tokens of ended rows and those of running
    rows from finished steps. `computed` counts prompt tokens that were prefilled. With `kv_blocks` it counts blocks, as
    if nothing were shared.

    `grammars` are the states of grammars by text, READY for others; `grammar_changed` tells the loop of a change.
    """

    def __init__(self, script: Script, *, vocabulary: int, context: int = 4096) -> None:
        self.script = script
        self.held: dict[str, Held] = {}
        self.seen: list[Submit] = []
        self.plans: list[StepPlan] = []
        self.fail: Exception | None = None
        self.in_flight: deque[StepResult] = deque()
        self.computed = 0
        self.rests = 0
        self._began: deque[list[tuple[Held, int]]] = deque()
        self.most_in_flight = 0
        self._cached: list[tuple[str, tuple[int, ...]]] = []
        self.index: PrefixIndex | None = None  # of ended rows, for block events
        self.grammars: dict[str, GrammarStatus] = {}
        self.grammar_changed: Callable[[], None] = lambda: None
        self._can = Capabilities(
            model="scripted",
            architecture="none",
            vocabulary=vocabulary,
            context=context,
            device="cpu",
            dtype="float32",
            embedding=EmbeddingCapabilities(dimensions=4, poolings=tuple(Pooling)),
        )

    @property
    def rows(self) -> dict[str, Submit]:
        """Requests of its rows."""
        return {row_id: held.request for row_id, held in self.held.items()}

    def capabilities(self) -> Capabilities:
        return self._can

    def warm_up(self) -> None:
        return

    def free_blocks(self) -> int:
        block = self._can.kv.block
        return self._can.kv.blocks - sum(-(-row.cached // block) for row in self.held.values())

    def match_scored(self, request: Submit) -> int:
        raise AssertionError("it has no scorer")

    def match_prefix(self, admit: Admit) -> int:
        if not self._can.steps.prefix_cache:
            return 0
        tokens = (*admit.request.prompt, *admit.history)[:-1]
        found = max((_shared(tokens, old) for salt, old in self._kept() if salt == admit.request.salt), default=0)
        if self._can.kv.blocks:
            found = min(found, max(0, self.free_blocks()) * self._can.kv.block)
        return found - found % self._can.kv.block

    def _kept(self) -> Iterator[tuple[str, Sequence[int]]]:
        """Yield salts and tokens that can be reused."""
        yield from self._cached
        for row in self.held.values():
            yield row.request.salt, row.tokens[: row.settled]

    def grammar_state(self, constraint: Constraint) -> GrammarStatus:
        return self.grammars.get(constraint.grammar, READY)

    def has_features(self, hash_: bytes) -> bool:
        return False

    def notify_grammars(self, changed: Callable[[], None]) -> None:
        self.grammar_changed = changed

    def start(self, plan: StepPlan) -> None:
        self.in_flight.append(self.execute(plan))
        self._began.append([(row, row.cached) for row in self.held.values()])
        self.most_in_flight = max(self.most_in_flight, len(self.in_flight))
        assert len(self.in_flight) <= 1 + self._can.steps.lookahead, "more steps in flight than it can look ahead"

    def finish(self) -> StepResult:
        for row, tokens in self._began.popleft():
            row.settled = tokens
        return self.in_flight.popleft()

    def void(self) -> None:
        """Drop all steps in flight."""
        self.in_flight.clear()
        self._began.clear()

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute the step's result at once; `finish` returns it."""
        self.plans.append(plan)
        if self.fail is not None:
            raise self.fail
        for admit in plan.admit:
            self._admit(admit)
        scores = tuple(scores for chunk in plan.prefill if (scores := self._prefill(chunk)) is not None)
        vectors = tuple(vector for chunk in plan.prefill if (vector := self._pooled(chunk)) is not None)
        rows = tuple(self._decode(row) for row in plan.decode)
        assert not self._can.kv.blocks or self.free_blocks() >= 0, "more blocks than there are"
        return StepResult(rows=rows, scores=scores, vectors=vectors)

    def _admit(self, admit: Admit) -> None:
        request, cached = admit.request, admit.cached_tokens
        assert request.id not in self.held, "admitted again without a release"
        assert cached == 0 or cached <= self.match_prefix(admit), "admitted with what is not cached"
        self.held[request.id] = Held(request, [*request.prompt, *admit.history], cached, settled=cached)
        self.seen.append(request)

    def _prefill(self, chunk: PrefillChunk) -> RowScores | None:
        row = self.held[chunk.id]
        assert chunk.start == row.cached, "a chunk begins where the cache ends"
        row.cached += chunk.count
        fed = int(row.request.pooling is None)
        assert row.cached <= len(row.tokens) - fed, "the last token is left for a decode row"
        self.computed += chunk.count
        asked, prompt = row.request.prompt_logprobs, row.request.prompt
        if asked is None:
            return None
        new = prompt[chunk.start + 1 : chunk.start + 1 + chunk.count]
        return RowScores(id=chunk.id, logprobs=tuple(_logprob(token, asked) for token in new))

    def _pooled(self, chunk: PrefillChunk) -> RowVector | None:
        row = self.held[chunk.id]
        if row.request.pooling is None or row.cached < len(row.tokens):
            return None
        return RowVector(id=chunk.id, data=array("f", vector_of(row.request)).tobytes())

    def _decode(self, decode: DecodeRow) -> RowTokens:
        row, position = self.held[decode.id], decode.position
        assert row.cached == len(row.tokens) - 1, "the cache holds all but the last token"
        assert len(row.tokens) == len(row.request.prompt) + position, "the next token is at this position"
        tokens = self.sample(row.request, position, 1 + decode.drafts)
        row.cached += len(tokens)
        row.tokens += tokens
        asked = row.request.logprobs
        logprobs = () if asked is None else tuple(_logprob(token, asked) for token in tokens)
        return RowTokens(id=decode.id, tokens=tokens, logprobs=logprobs, drafted=decode.drafts)

    def sample(self, request: Submit, position: int, most: int) -> tuple[int, ...]:
        """Return the tokens of a step from `position` on, at most `most`."""
        return (self.script(request, position),)

    def release(self, row_id: str) -> None:
        row = self.held.pop(row_id, None)
        if row is not None and self._can.steps.prefix_cache:
            self._cached.append((row.request.salt, tuple(row.tokens[: row.cached])))
        if row is not None and self.index is not None:
            self._keep(self.index, row)

    def _keep(self, index: PrefixIndex, row: Held) -> None:
        node, tokens = None, row.tokens[: row.cached]
        for start in range(0, len(tokens) - index.block + 1, index.block):
            node = index.insert(node, row.request.salt, tokens[start : start + index.block], 1, 1).node

    def watch_blocks(self, salt: str, on: bool) -> None:
        assert self.index is not None, "watched without blocks"
        self.index.watch(salt, on)

    def block_events(self) -> tuple[BlockEvent, ...]:
        assert self.index is not None, "nothing was watched"
        return self.index.drain_events()

    def trim_memory(self) -> None:
        self.rests += 1

    def statistics(self) -> RunnerStatistics:
        return RunnerStatistics()

    def jobs(self) -> Mapping[str, Job]:
        return {}

    def close(self) -> None:
        self.held.clear()


def vector_of(request: Submit) -> list[float]:
    """Return the vector of a request that is pooled: it tells prompts and poolings apart."""
    kind = list(Pooling).index(request.pooling) if request.pooling else -1
    return [float(len(request.prompt)), float(sum(request.prompt) % 1000), float(request.prompt[-1]), float(kind)]


def _logprob(token: int, top: int) -> TokenLogprob:
    return TokenLogprob(logprob=-0.5, top=tuple((token + i, -0.5 - i) for i in range(top)))


def _shared(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
