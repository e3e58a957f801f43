"""A runner that computes hashes and holds the scheduler to its contract, and a loop around both on a clock of our own.

The token at a position is a hash of everything before it, so a row that lost, doubled or mixed up a token shows it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from treadle.core.messages import Cancel, CancelReason, Finish, FinishReason, Output, RunnerStatistics, Submit
from treadle.core.messages import EngineStatistics as Statistics
from treadle.core.plan import PrefillChunk, RowFailure, RowTokens, StepPlan, StepResult
from treadle.core.scheduler import Scheduler, SchedulerLimits

VOCABULARY = 1000


class Boom(Exception):
    """What a step raises in these tests."""


def next_token(sequence: Iterable[int]) -> int:
    return zlib.crc32(repr(tuple(sequence)).encode()) % VOCABULARY


def expected(request: Submit) -> tuple[tuple[int, ...], Finish]:
    """What a request gains and how it ends when nothing disturbs it: the oracle, one sequence alone."""
    tokens: list[int] = []
    while True:
        token = next_token((*request.prompt, *tokens))
        tokens.append(token)
        if token in request.stop_token_ids and len(tokens) > request.min_tokens:
            return tuple(tokens), Finish(reason=FinishReason.STOP, stop_token_id=token)
        if len(tokens) == request.max_tokens:
            return tuple(tokens), Finish(reason=FinishReason.LENGTH)


@dataclass
class _Held:
    request: Submit
    fed: list[int] = field(default_factory=list)
    history: int = 0


class HashRunner:
    """Keeps, for each row, the tokens it was fed. `raises` looks at a plan and says whether the step raises."""

    def __init__(self, max_running: int, *, per_step: int = 1) -> None:
        self.rows: dict[str, _Held] = {}
        self.raises: Callable[[StepPlan], bool] = lambda plan: False
        self.failures: dict[str, str] = {}
        self.cost: Callable[[int, int], tuple[float, float]] = lambda prefill, decode: (0.0, 0.0)
        self.lost: set[str] = set()
        self._max_running = max_running
        self._per_step = per_step

    def release(self, row_id: str) -> None:
        self.rows.pop(row_id, None)
        self.lost.discard(row_id)

    def execute(self, plan: StepPlan) -> StepResult:
        ids = {a.request.id for a in plan.admit} | {c.id for c in plan.prefill} | {d.id for d in plan.decode}
        if self.raises(plan):
            for admit in plan.admit:
                self.rows[admit.request.id] = _Held(admit.request)
            self.lost |= ids
            raise Boom("the step raised")
        for admit in plan.admit:
            assert admit.request.id not in self.rows, "admitted twice without a release"
            self.rows[admit.request.id] = _Held(admit.request, history=len(admit.history))
        assert len(self.rows) <= self._max_running, "more rows than slots"
        assert not ids & self.lost, "a lost row was used before it was released"
        assert len({chunk.id for chunk in plan.prefill}) == len(plan.prefill), "two chunks for one row"
        for chunk in plan.prefill:
            self._prefill(chunk)
        failed = tuple(RowFailure(id=i, message=self.failures.pop(i)) for i in sorted(ids) if i in self.failures)
        for failure in failed:
            self.release(failure.id)
        prefill_s, decode_s = self.cost(sum(len(chunk.tokens) for chunk in plan.prefill), len(plan.decode))
        rows = tuple(self._decode(row.id, row.token, row.position) for row in plan.decode if row.id in self.rows)
        return StepResult(rows=rows, failures=failed, prefill_s=prefill_s, decode_s=decode_s)

    def _prefill(self, chunk: PrefillChunk) -> None:
        row = self.rows[chunk.id]
        assert chunk.tokens, "an empty chunk"
        assert chunk.start == len(row.fed), f"chunk starts at {chunk.start}, the cache holds {len(row.fed)}"
        row.fed += chunk.tokens

    def _decode(self, row_id: str, token: int, position: int) -> RowTokens:
        row = self.rows[row_id]
        row.fed.append(token)
        assert tuple(row.fed[: len(row.request.prompt)]) == row.request.prompt, "another prompt than its own"
        assert len(row.fed) == len(row.request.prompt) + position, "the cache holds all before this position"
        tokens: list[int] = []
        for _ in range(self._per_step):
            tokens.append(next_token((*row.fed, *tokens)))
        row.fed += tokens[:-1]
        return RowTokens(id=row_id, tokens=tuple(tokens))


@dataclass
class Heard:
    """Everything that was told about one submission."""

    admitted: int = 0
    wait_s: float = 0.0
    tokens: list[int] = field(default_factory=list)
    finish: Finish | None = None
    first_token: float | None = None
    prompt_done: list[int] = field(default_factory=list)


class Bench:
    """Scheduler and runner, stepped by hand. `heard` is by id; `step` checks the books and that each ends once."""

    def __init__(
        self, max_running: int = 4, prefill_tokens: int = 512, kv_tokens: int = 0, *, per_step: int = 1
    ) -> None:
        self.scheduler = Scheduler(SchedulerLimits(max_running, prefill_tokens, kv_tokens))
        self.runner = HashRunner(max_running, per_step=per_step)
        self.now = 0.0
        self.heard: dict[str, Heard] = {}
        self.plan = StepPlan(step=0)
        self.raised = 0

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
        self.plan = self.scheduler.plan(self.now)
        self.scheduler.check_integrity()
        assert len(set(self.plan.release)) == len(self.plan.release), "released twice"
        for row_id in self.plan.release:
            self.runner.release(row_id)
        took = seconds
        if not (self.plan.admit or self.plan.prefill or self.plan.decode):
            outputs = self.scheduler.flush()
        else:
            try:
                result = self.runner.execute(self.plan)
            except Boom as error:
                self.raised += 1
                outputs = self.scheduler.recover(self.plan, str(error))
            else:
                outputs = self.scheduler.apply(self.plan, result)
                took = result.prefill_s + result.decode_s or seconds
        self.now += took
        self.hear(outputs)
        self.scheduler.check_integrity()
        return outputs

    def hear(self, outputs: Iterable[Output]) -> None:
        for output in outputs:
            heard = self.heard[output.id]
            assert heard.finish is None, f"{output.id} heard of after its end"
            if output.admitted:
                heard.admitted += 1
                heard.wait_s = output.wait_s
            if output.tokens and heard.first_token is None:
                heard.first_token = self.now
            if output.prompt_tokens_done is not None:
                heard.prompt_done.append(output.prompt_tokens_done)
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
        kept = (scheduler._rows, scheduler._waiting, scheduler._running, scheduler._groups, scheduler._release)
        assert not any(kept), kept
        assert not scheduler._outputs
        assert scheduler._reserved == 0
        assert not self.runner.rows
        assert not self.runner.lost

    def assert_undisturbed(self, request: Submit) -> None:
        """The request got what it would have got alone."""
        heard = self.heard[request.id]
        assert (tuple(heard.tokens), heard.finish) == expected(request)
