"""A runner under the engine's own loop, stepped by hand: what is sent and what is heard, by request."""

from __future__ import annotations

import time
from typing import Any

from treadle.core.messages import Cancel, FinishReason, FromOwner, Output, StepReport, Submit
from treadle.engine.loop import EngineLoop
from treadle.engine.mailbox import Mailbox
from treadle.engine.owner import OwnerLimits, scheduler_of
from treadle.runner.kv.padded.backend import PaddedBackend
from treadle.runner.model_runner import ModelRunner


def _stopped() -> float:
    return 0.0


class Looped:
    """`now` is its clock, one second a step. For a runner without a clock of its own, steps take no time: chunks follow
    what steps took, and would differ with how busy the machine is."""

    def __init__(self, runner: ModelRunner, *, max_running: int = 5, prefill_tokens: int = 32) -> None:
        self.runner = runner
        self.now = 0.0
        if runner._clock is time.monotonic:
            runner._clock = _stopped
            if isinstance(runner._backend, PaddedBackend):
                runner._backend._clock = _stopped
        self.outputs: dict[str, list[Output]] = {}
        limits = OwnerLimits(max_running=max_running, prefill_tokens=prefill_tokens)
        self.scheduler = scheduler_of(runner, limits)
        self._loop = EngineLoop(runner, self.scheduler, Mailbox(), self._hear, clock=lambda: self.now)

    @property
    def has_work(self) -> bool:
        return self._loop.has_work

    def submit(self, *requests: Submit) -> None:
        for request in requests:
            self.outputs[request.id] = []
            self._loop.mailbox.put(request)

    def cancel(self, id_: str) -> None:
        self._loop.mailbox.put(Cancel(id=id_))

    def step(self) -> None:
        self.now += 1.0
        self._loop.run_once()
        self.scheduler.check_integrity()

    def run(self, *requests: Submit) -> dict[str, list[int]]:
        """Send `requests` and step until nothing is left; the tokens of all so far."""
        self.submit(*requests)
        self.step()
        while self.has_work:
            self.step()
        return {id_: self.tokens(id_) for id_ in self.outputs}

    def preempt_last(self) -> bool:
        """Preempt the sequence that joined last, with nothing in flight. Whether there is one."""
        while self.scheduler.in_flight:
            outputs = self.scheduler.apply(self.scheduler.oldest_plan, self.runner.finish())
            self._hear(StepReport(step=0, outputs=outputs))
        joined = [seq for seq in self.scheduler._running.values() if seq.joined]
        self.scheduler._preempt(joined[-1:], self.now)
        return bool(joined)

    def tokens(self, id_: str) -> list[int]:
        return [token for output in self.outputs[id_] for token in output.tokens]

    def finish(self, id_: str) -> FinishReason:
        ends = [output.finish for output in self.outputs[id_] if output.finish is not None]
        assert len(ends) == 1, id_
        return ends[0].reason

    def cached(self, id_: str) -> int:
        """Tokens of its prompt that it was told were there before."""
        (found,) = [output.cached_tokens for output in self.outputs[id_] if output.cached_tokens is not None]
        return found

    def everything(self, id_: str) -> list[Any]:
        """All that a request may see of its own, whatever steps it came in."""
        some = self.outputs[id_]
        return [
            self.tokens(id_),
            [one for output in some for one in output.logprobs],
            [one for output in some for one in output.prompt_logprobs],
            self.finish(id_),
        ]

    def _hear(self, message: FromOwner) -> None:
        assert isinstance(message, StepReport), message
        for output in message.outputs:
            self.outputs.setdefault(output.id, []).append(output)
