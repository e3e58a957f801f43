"""Every kind of step once, before anyone waits for one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ...core.messages import Sampling, Submit
from ...core.plan import Admit, DecodeRow, PrefillChunk, StepPlan, StepResult
from ..forward.batch_buckets import decode_bucket, mixed_bucket
from ..kv.paged.backend import PAGE
from .model import LoadedModel

WARM_UP_ROWS = 2
_PROMPT = (0, 1, 0)
_KERNEL_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96)
_PASS_SIZES = (128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
_LONG = 2048
"""The longest chunk for which passes are compiled ahead."""
_MOST_BESIDE = 400
"""Passes of rows beside a chunk, of which fewer than there are programs are compiled ahead."""


class Warmable(Protocol):
    """What is warmed up."""

    def execute(self, plan: StepPlan) -> StepResult: ...

    def release(self, row_id: str) -> None: ...

    def rest(self) -> None: ...


def warm_up(runner: Warmable, model: LoadedModel) -> None:
    """Prefill and decode two rows, one greedy and one with every stage of sampling; leaves nothing behind, also when it
    raises. Passes of usual lengths are run, too, where they have such, and where kernels or whole passes are compiled
    those that are usual, so that nobody waits for them."""
    _warm_passes(runner, model)
    _warm_kernels(runner, model)
    _warm_programs(runner, model)
    every = Sampling(temperature=1.0, top_p=0.9, top_k=8, repetition_penalty=1.1)
    requests = [
        Submit(id="warm-up 0", prompt=_PROMPT, max_tokens=3, salt="warm-up"),
        Submit(id="warm-up 1", prompt=_PROMPT, max_tokens=3, sampling=every, logprobs=1, salt="warm-up"),
    ]
    try:
        chunks = tuple(PrefillChunk(id=request.id, start=0, tokens=_PROMPT[:-1]) for request in requests)
        first = tuple(DecodeRow(id=request.id, token=_PROMPT[-1], position=0) for request in requests)
        admit = tuple(Admit(request=request) for request in requests)
        result = runner.execute(StepPlan(step=0, admit=admit, prefill=chunks, decode=first))
        if result.failures:
            raise ValueError(result.failures[0].message)
        second = tuple(DecodeRow(id=row.id, token=row.tokens[0], position=1) for row in result.rows)
        runner.execute(StepPlan(step=0, decode=second))
    finally:
        for request in requests:
            runner.release(request.id)


def _warm_passes(runner: Warmable, model: LoadedModel) -> None:
    quantum = model.prefill_quantum
    sizes = (quantum, quantum, model.pad_to)
    if not quantum or sum(sizes) >= model.context:
        return
    request = Submit(id="warm-up", prompt=(0,) * (sum(sizes) + 1), max_tokens=2, salt="warm-up")
    try:
        start = 0
        for size in sizes:
            chunk = PrefillChunk(id=request.id, start=start, tokens=request.prompt[start : start + size])
            runner.execute(StepPlan(step=0, admit=() if start else (Admit(request=request),), prefill=(chunk,)))
            start += size
    finally:
        runner.release(request.id)


def _warm_kernels(runner: Warmable, model: LoadedModel) -> None:
    """Prompts of as many tokens as kernels differ for; the logits of few are wanted too. A matrix product's kernel is
    loaded when it is first used, which takes a pass 10 ms and more. What MLX compiles it keeps on disk: it is the first
    start on a machine that takes long."""
    if model.own is None or not model.own.page_bytes:
        return
    most = min(model.context, model.kv_budget_bytes // model.own.page_bytes * PAGE) - 1
    longest = model.prefill_tokens or _PASS_SIZES[-1]
    prompts = [*((size, 1) for size in _KERNEL_SIZES), *((size, None) for size in model.chunk_sizes or _PASS_SIZES)]
    for count, scored in (prompt for prompt in prompts if prompt[0] <= min(most, longest)):
        _warm_pass(runner, 0, count, scored)


def _warm_programs(runner: Warmable, model: LoadedModel) -> None:
    """Rows that decode, and those beside a chunk of a prompt. A pass that was not compiled yet takes 10 to 20 ms
    longer."""
    if model.own is None or model.own.decoder is None:
        return
    pages = model.kv_budget_bytes // model.own.page_bytes
    longest = min(_LONG, model.prefill_tokens or _LONG, model.context - 1)
    chunks = [size for size in model.chunk_sizes if size <= longest]
    passes = [(rows, chunk) for rows in _sizes(mixed_bucket, model.max_running) for chunk in chunks]
    passes = passes[:_MOST_BESIDE] + [(rows, 0) for rows in _sizes(decode_bucket, model.max_running)]
    for rows, chunk in passes:
        if rows + -(-chunk // PAGE) <= pages:
            _warm_pass(runner, rows, chunk)


def _sizes(size: Callable[[int], int], most: int) -> list[int]:
    """What up to `most` rows come in."""
    return sorted({size(count) for count in range(1, most + 1)})


def _warm_pass(runner: Warmable, rows: int, chunk: int, scored: int | None = None) -> None:
    """So many rows that decode, beside a chunk of a prompt if it has tokens, whose scores are wanted if `scored`."""
    some = [Submit(id=f"warm-up {i}", prompt=(0,), max_tokens=1, salt="warm-up") for i in range(rows)]
    prompt = (0,) * (chunk + 1)
    whole = Submit(id="warm-up", prompt=prompt, max_tokens=1, prompt_logprobs=scored, salt="warm-up")
    long = [whole] if chunk else []
    try:
        admit = tuple(Admit(request=request) for request in [*some, *long])
        prefill = tuple(PrefillChunk(id=request.id, start=0, tokens=prompt[:-1]) for request in long)
        decode = tuple(DecodeRow(id=request.id, token=0, position=0) for request in some)
        runner.execute(StepPlan(step=0, admit=admit, prefill=prefill, decode=decode))
    finally:
        for request in [*some, *long]:
            runner.release(request.id)
        runner.rest()  # what passes of all sizes leave is more than there may be room for
