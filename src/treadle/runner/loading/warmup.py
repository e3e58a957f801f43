"""Warm-up: every kind of step once, before the first request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ...core.messages import Sampling, Submit
from ...core.plan import Admit, DecodeRow, PrefillChunk, StepPlan, StepResult
from ..kv.backend import WarmPass

_PROMPT = (0, 1, 0)


class Warmable(Protocol):
    """A runner that can be warmed up."""

    def execute(self, plan: StepPlan) -> StepResult: ...

    def release(self, row_id: str) -> None: ...

    def trim_memory(self) -> None: ...


def warm_up(runner: Warmable, passes: Sequence[WarmPass]) -> None:
    """Run the KV backend's `passes`, then prefill and decode two sequences, one greedy and one with every stage of
    sampling. Leaves nothing behind, also when it raises."""
    for one in passes:
        warm_pass(runner, one)
    every = Sampling(temperature=1.0, top_p=0.9, top_k=8, repetition_penalty=1.1)
    requests = [
        Submit(id="warm-up 0", prompt=_PROMPT, max_tokens=3, salt="warm-up"),
        Submit(id="warm-up 1", prompt=_PROMPT, max_tokens=3, sampling=every, logprobs=1, salt="warm-up"),
    ]
    try:
        chunks = tuple(PrefillChunk(id=request.id, start=0, count=len(_PROMPT) - 1) for request in requests)
        first = tuple(DecodeRow(id=request.id, position=0) for request in requests)
        admit = tuple(Admit(request=request) for request in requests)
        result = runner.execute(StepPlan(step=0, admit=admit, prefill=chunks, decode=first))
        if result.failures:
            raise ValueError(result.failures[0].message)
        second = tuple(DecodeRow(id=row.id, position=1) for row in result.rows)
        runner.execute(StepPlan(step=0, decode=second))
    finally:
        for request in requests:
            runner.release(request.id)


def warm_pass(runner: Warmable, one: WarmPass) -> None:
    """Run the steps of one pass: the first chunk of the prompt beside all that decode, then the others alone."""
    decoding = [Submit(id=f"warm-up {i}", prompt=(0,), max_tokens=1, salt="warm-up") for i in range(one.decoding)]
    prompt = (0,) * (sum(one.chunks) + 1)
    whole = Submit(id="warm-up", prompt=prompt, max_tokens=1, prompt_logprobs=one.scored, salt="warm-up")
    requests = [*decoding, whole] if one.chunks else decoding
    admit = tuple(Admit(request=request) for request in requests)
    decode = tuple(DecodeRow(id=request.id, position=0) for request in decoding)
    try:
        start = 0
        for size in one.chunks or (0,):
            chunk = PrefillChunk(id=whole.id, start=start, count=min(size, len(prompt) - start))
            prefill = (chunk,) if size else ()
            runner.execute(StepPlan(step=0, admit=admit, prefill=prefill, decode=decode))
            admit, decode, start = (), (), start + size
    finally:
        for request in requests:
            runner.release(request.id)
        runner.trim_memory()  # passes of all sizes leave more buffers than there may be memory for
