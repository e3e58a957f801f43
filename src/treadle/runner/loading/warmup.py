"""Warm-up: every kind of step once, before the first request."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ...core.messages import Pooling, Sampling, Submit
from ...core.plan import Admit, DecodeRow, PrefillChunk, StepPlan
from ..kv.backend import WarmPass
from .synthetic_steps import SALT, Warmable, run_pass

_log = logging.getLogger(__name__)

_PROMPT = (0, 1, 0)
_SLOW_S = 5.0
"""A pass that takes longer compiles kernels, as a rule: a start that takes minutes says for what."""


def warm_up(runner: Warmable, passes: Sequence[WarmPass], drafts: int = 0) -> None:
    """Run the KV backend's `passes`, then prefill and decode two sequences, one greedy and one with every stage of
    sampling, and verify up to `drafts` draft tokens of them. Leaves nothing behind, also when it raises."""
    for one in passes:
        tell_slow(named(one), run_pass(runner, one))
    every = Sampling(temperature=1.0, top_p=0.9, top_k=8, repetition_penalty=1.1)
    requests = [
        Submit(id="warm-up 0", prompt=_PROMPT, max_tokens=8, salt=SALT),
        Submit(id="warm-up 1", prompt=_PROMPT, max_tokens=8, sampling=every, logprobs=1, salt=SALT),
    ]
    try:
        chunks = tuple(PrefillChunk(id=request.id, start=0, count=len(_PROMPT) - 1) for request in requests)
        first = tuple(DecodeRow(id=request.id, position=0) for request in requests)
        admit = tuple(Admit(request=request) for request in requests)
        result = runner.execute(StepPlan(step=0, admit=admit, prefill=chunks, decode=first))
        if result.failures:
            raise ValueError(result.failures[0].message)
        second = tuple(DecodeRow(id=row.id, position=1) for row in result.rows)
        result = runner.execute(StepPlan(step=0, decode=second))
        if drafts:
            with runner.filled_drafts():
                third = tuple(DecodeRow(id=row.id, position=2, drafts=min(drafts, 3)) for row in result.rows)
                runner.execute(StepPlan(step=0, decode=third))
    finally:
        for request in requests:
            runner.release(request.id)


def tell_slow(name: str, seconds: float) -> None:
    """Log what took long for the first time."""
    if seconds > _SLOW_S:
        _log.info("the first %s took %.0f s", name, seconds)


def named(one: WarmPass) -> str:
    """Name a pass for people."""
    decoding = f"step of {one.decoding} sequences" if one.decoding else ""
    drafts = f" with {one.drafts} drafts each" if one.drafts else ""
    chunks = " and ".join(f"{size:,}" for size in one.chunks)
    prompt = f"prompt chunk of {chunks} tokens" if chunks else ""
    return f"{decoding}{drafts}{' beside a ' if decoding and prompt else ''}{prompt}"


def warm_up_pooling(runner: Warmable, pooling: Pooling) -> None:
    """Pool one short prompt, of a model that generates no text. Leaves nothing behind, also when it raises."""
    request = Submit(id="warm-up", prompt=_PROMPT, max_tokens=0, pooling=pooling, salt=SALT)
    try:
        chunk = PrefillChunk(id=request.id, start=0, count=len(_PROMPT))
        result = runner.execute(StepPlan(step=0, admit=(Admit(request=request),), prefill=(chunk,)))
        if result.failures:
            raise ValueError(result.failures[0].message)
    finally:
        runner.release(request.id)
