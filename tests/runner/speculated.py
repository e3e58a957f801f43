"""Runs requests with drafts in lock-step, as a scheduler that always speculates, and checks the rules of results."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from tests.runner.drive import Going
from treadle.core.messages import Submit
from treadle.core.plan import Admit, DecodeRow, PrefillChunk, RowTokens, StepPlan, StepResult
from treadle.runner.model_runner import ModelRunner


@dataclass(eq=False)
class Row(Going):
    """A request on its way, which may have ended before its last token."""

    over: bool = False


class Speculated:
    """Asks for `drafts` draft tokens of each of `running` rows in each step. `drafted` and `accepted` count tokens, and
    `verifying` steps."""

    def __init__(
        self,
        runner: ModelRunner,
        requests: Sequence[Submit],
        *,
        drafts: int = 3,
        chunk: int = 10_000,
        running: int = 8,
    ) -> None:
        self.runner = runner
        self.rows = {request.id: Row(request) for request in requests}
        self.failures: dict[str, str] = {}
        self.drafts = drafts
        self.chunk = chunk
        self.running = running
        self.steps = self.drafted = self.accepted = self.verifying = 0
        self.results: list[StepResult] = []

    @property
    def live(self) -> list[Row]:
        """The rows that may be in the next step: those that have joined, first."""
        left = [row for row in self.rows.values() if not row.over]
        return sorted(left, key=lambda row: not row.joined)[: self.running]

    def run(self, *, preempt: int | None = None, cancel: Sequence[str] = ()) -> dict[str, list[int]]:
        """Step until all have ended; the tokens of each. With a seed to `preempt` some are released and go on later;
        those to `cancel` leave in the middle."""
        dice = random.Random(preempt)
        while self.live:
            self.step()
            for row in self.live:
                if row.id in cancel and len(row.tokens) > 3:
                    self.release(row, over=True)
                elif preempt is not None and row.joined and dice.random() < 1 / 20:
                    self.release(row)
        return {id_: row.tokens for id_, row in self.rows.items()}

    def release(self, row: Row, *, over: bool = False) -> None:
        self.runner.release(row.id)
        row.cached, row.joined, row.over = 0, False, over

    def step(self, rows: Sequence[Row] | None = None, *, drafts: int | None = None) -> StepResult:
        self.steps += 1
        plan = self.plan(self.live if rows is None else rows, self.drafts if drafts is None else drafts)
        result = self.runner.execute(plan)
        self.apply(plan, result)
        self.results.append(result)
        return result

    def plan(self, rows: Sequence[Row], drafts: int) -> StepPlan:
        admit, prefill, decode = [], [], []
        for row in rows:
            if not row.joined:
                joins = Admit(row.request, tuple(row.tokens))
                cached = 0 if row.request.computes_whole_prompt else self.runner.match_prefix(joins)
                admit.append(Admit(row.request, tuple(row.tokens), cached))
                row.joined, row.cached = True, cached
            if row.prefill_left:
                count = min(self.chunk, row.prefill_left)
                prefill.append(PrefillChunk(row.id, row.cached, count))
                row.cached += count
            if not row.prefill_left:
                decode.append(DecodeRow(row.id, len(row.tokens)))
        if drafts and not prefill and not admit:
            decode = [DecodeRow(one.id, one.position, drafts) for one in decode]
        return StepPlan(self.steps, tuple(admit), tuple(prefill), tuple(decode), propose=True)

    def apply(self, plan: StepPlan, result: StepResult) -> None:
        assert not result.evicted
        for failure in result.failures:
            self.failures[failure.id] = failure.message
            self.release(self.rows[failure.id], over=True)
        most = {one.id: one.drafts for one in plan.decode}
        assert {row.id for row in result.rows} | self.failures.keys() >= most.keys()
        for gained in result.rows:
            self._gain(self.rows[gained.id], gained, most[gained.id])
        self.verifying += any(row.drafted for row in result.rows)

    def _gain(self, row: Row, gained: RowTokens, most: int) -> None:
        accepted = len(gained.tokens) - gained.forced - 1
        assert 0 <= accepted <= gained.drafted <= most
        self.drafted += gained.drafted
        self.accepted += accepted
        row.cached += 1 + accepted
        for token in gained.tokens:
            row.tokens.append(token)
            request, count = row.request, len(row.tokens)
            if count == request.max_tokens or (token in request.stop_token_ids and count > request.min_tokens):
                assert token == gained.tokens[-1] or gained.forced, "no token behind the end is sampled"
                row.over = True
                break
        row.over = row.over or gained.ended
        row.logprobs += gained.logprobs
        if row.request.logprobs is not None:
            assert len(row.logprobs) == len(row.tokens)
        if row.over:
            self.release(row, over=True)
