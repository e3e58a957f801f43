"""Counters of the scheduler since its start."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from .messages import FinishReason
from .sequence import Sequence
from .states import State
from .statistics import (
    EngineStatistics,
    RunnerStatistics,
    SpecPrefillStatistics,
    SpeculationStatistics,
    VisionStatistics,
)


@dataclass(slots=True)
class SchedulerCounters:
    """Counters; `EngineStatistics` describes them."""

    steps: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    forced_tokens: int = 0
    finished: int = 0
    cancelled: int = 0
    expired: int = 0
    failed: int = 0
    recovered_steps: int = 0
    preempted: int = 0
    cached_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0

    def count_finish(self, reason: FinishReason) -> None:
        match reason:
            case FinishReason.STOP | FinishReason.LENGTH:
                self.finished += 1
            case FinishReason.CANCELLED:
                self.cancelled += 1
            case FinishReason.EXPIRED:
                self.expired += 1
            case _:
                self.failed += 1

    def statistics(
        self,
        running: Collection[Sequence],
        waits_s: list[float],
        awaiting_grammar: int,
        speculation: SpeculationStatistics,
        spec_prefill: SpecPrefillStatistics,
        vision: VisionStatistics,
        runner: RunnerStatistics,
        step_s: float,
    ) -> EngineStatistics:
        """Return a snapshot that includes the numbers of running and waiting sequences."""
        return EngineStatistics(
            steps=self.steps,
            running=len(running),
            prefilling=sum(seq.state is State.PREFILL for seq in running),
            waiting=len(waits_s),
            awaiting_grammar=awaiting_grammar,
            oldest_wait_s=max(waits_s, default=0.0),
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            forced_tokens=self.forced_tokens,
            finished=self.finished,
            cancelled=self.cancelled,
            expired=self.expired,
            failed=self.failed,
            recovered_steps=self.recovered_steps,
            preempted=self.preempted,
            cached_tokens=self.cached_tokens,
            step_s=step_s,
            prefill_s=self.prefill_s,
            decode_s=self.decode_s,
            speculation=speculation,
            spec_prefill=spec_prefill,
            vision=vision,
            runner=runner,
        )
