"""Passes of synthetic sequences, for the warm-up and for timing. None leaves a sequence behind."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Protocol

from ...core.capabilities import Capabilities
from ...core.messages import Submit
from ...core.plan import Admit, DecodeRow, PrefillChunk, StepPlan, StepResult
from ..kv.backend import WarmPass

SALT = "warm-up"

Clock = Callable[[], float]


class Warmable(Protocol):
    """The part of a runner that the warm-up uses."""

    def capabilities(self) -> Capabilities: ...

    def execute(self, plan: StepPlan) -> StepResult: ...

    def start(self, plan: StepPlan) -> None: ...

    def finish(self) -> StepResult: ...

    def filled_drafts(self) -> AbstractContextManager[None]: ...

    def release(self, row_id: str) -> None: ...

    def trim_memory(self) -> None: ...


def decoders(count: int, max_tokens: int = 1) -> list[Submit]:
    """Requests with prompts of one token: each decodes in its first step."""
    return [Submit(id=f"warm-up {i}", prompt=(0,), max_tokens=max_tokens, salt=SALT) for i in range(count)]


def run_pass(runner: Warmable, one: WarmPass, clock: Clock = time.perf_counter, whole: Submit | None = None) -> float:
    """Run the steps of one pass: the first chunk of the prompt beside all that decode, then the others alone, or a
    step in which those that decode verify drafts. The prompt is that of `whole`, or one of zeros.

    Returns their seconds; 0 where a sequence failed, as a rule for lack of memory.
    """
    decoding = decoders(one.decoding, max_tokens=2 + one.drafts)
    if whole is None:
        prompt = (0,) * (sum(one.chunks) + 1)
        whole = Submit(id="warm-up", prompt=prompt, max_tokens=1, prompt_logprobs=one.scored, salt=SALT)
    requests = [*decoding, whole] if one.chunks else decoding
    admit = tuple(Admit(request=request) for request in requests)
    decode = tuple(DecodeRow(id=request.id, position=0) for request in decoding)
    try:
        began, start, failed = clock(), 0, False
        for size in one.chunks or (0,):
            chunk = PrefillChunk(id=whole.id, start=start, count=min(size, len(whole.prompt) - start))
            result = runner.execute(StepPlan(step=0, admit=admit, prefill=(chunk,) if size else (), decode=decode))
            admit, decode, start, failed = (), (), start + size, failed or bool(result.failures)
        if one.drafts and not failed:
            _verify(runner, decoding, one.drafts)
        return 0.0 if failed else clock() - began
    finally:
        release(runner, requests)


def _verify(runner: Warmable, requests: Iterable[Submit], drafts: int) -> None:
    """Run a step in which the sequences, which have a token each, verify drafts."""
    with runner.filled_drafts():
        decode = tuple(DecodeRow(id=request.id, position=1, drafts=drafts) for request in requests)
        runner.execute(StepPlan(step=0, decode=decode))


def release(runner: Warmable, requests: Iterable[Submit]) -> None:
    """Release the requests and trim memory: passes of all sizes leave more buffers than there may be memory for."""
    for request in requests:
        runner.release(request.id)
    runner.trim_memory()
