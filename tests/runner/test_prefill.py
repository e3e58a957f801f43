"""Prompts that share a pass over the model."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.core.messages import Submit
from treadle.core.plan import Admit, DecodeRow, PrefillChunk, StepPlan
from treadle.runner.forward.segments import RowSegment
from treadle.runner.kv.padded.prefill import MAX_PADDED, MAX_SHARED_TOKENS, passes
from treadle.runner.kv.planned_attention import pad_to
from treadle.runner.model_runner import ModelRunner

from .backends import configured, segment
from .conftest import Tiny


def chunk(name: str, start: int, length: int) -> RowSegment:
    return segment(name, tuple(range(1, length + 1)), start)


@given(st.lists(st.tuples(st.integers(0, 600), st.integers(1, 600)), max_size=12))
def test_each_chunk_is_in_one_pass_and_a_shared_pass_is_short_and_even(sizes: list[tuple[int, int]]) -> None:
    chunks = [chunk(str(i), start, length) for i, (start, length) in enumerate(sizes)]
    found = passes(chunks)
    assert sorted(c.id for group in found for c in group) == sorted(c.id for c in chunks)
    for group in found:
        lengths = [len(c.tokens) for c in group]
        assert len(group) == 1 or max(lengths) <= MAX_PADDED * min(lengths)
        assert len(group) == 1 or max(c.start + len(c.tokens) for c in group) <= MAX_SHARED_TOKENS


def steps(runner: ModelRunner, prompts: dict[str, tuple[int, ...]], cut: int) -> dict[str, list[int]]:
    """Prefill all prompts in two steps, the first `cut` tokens and the rest, then decode 12 tokens each."""
    admits = tuple(Admit(request=Submit(id=name, prompt=prompt, max_tokens=12)) for name, prompt in prompts.items())
    first = tuple(PrefillChunk(id=n, start=0, count=cut) for n, p in prompts.items())
    rest = tuple(PrefillChunk(id=n, start=cut, count=len(p) - 1 - cut) for n, p in prompts.items())
    runner.execute(StepPlan(step=1, admit=admits, prefill=first))
    tokens: dict[str, list[int]] = {name: [] for name in prompts}
    last = {name: prompt[-1] for name, prompt in prompts.items()}
    for position in range(12):
        decode = tuple(DecodeRow(id=name, position=position) for name in prompts)
        result = runner.execute(StepPlan(step=2 + position, prefill=() if position else rest, decode=decode))
        assert not result.failures
        for row in result.rows:
            tokens[row.id].extend(row.tokens)
            last[row.id] = row.tokens[-1]
    return tokens


PROMPTS = {"a": tuple(range(3, 50)), "b": tuple(range(90, 60, -1)), "c": (9, 8, 7, 6, 5, 4, 3), "d": (5, 1, 5, 1, 5, 2)}


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "qwen3_moe"])
def test_prompts_read_in_one_pass_give_the_tokens_of_prompts_read_alone(tiny: Tiny, family: str) -> None:
    """Greedy, token for token, with a sliding window shorter than the prompts (gemma3)."""
    model = tiny(family, padded=True)
    assert model.choice.config.shared_prefill  # type: ignore[attr-defined]
    shared = steps(ModelRunner(model), PROMPTS, 4)
    alone = {
        name: steps(ModelRunner(configured(model, shared_prefill=False)), {name: prompt}, 4)[name]
        for name, prompt in PROMPTS.items()
    }
    assert shared == alone


def test_a_bad_prompt_among_those_of_a_pass_fails_alone(either: Tiny) -> None:
    model = either("llama")
    runner = ModelRunner(model)
    good, bad = (
        Submit(id="good", prompt=(1, 2, 3, 4), max_tokens=12),
        Submit(id="bad", prompt=(1, model.vocabulary, 3, 4), max_tokens=12),
    )
    chunks = (
        PrefillChunk(id="good", start=0, count=3),
        PrefillChunk(id="bad", start=0, count=3),
    )
    plan = StepPlan(step=1, admit=(Admit(request=good), Admit(request=bad)), prefill=chunks)
    result = runner.execute(plan)
    assert [failure.id for failure in result.failures] == ["bad"]
    decode = (DecodeRow(id="good", position=0),)
    alone = steps(ModelRunner(model), {"good": good.prompt}, 1)["good"]
    assert runner.execute(StepPlan(step=2, decode=decode)).rows[0].tokens[0] == alone[0]


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "qwen3_moe"])
def test_passes_that_are_padded_for_cuda_give_the_same_tokens(tiny: Tiny, family: str, shared: bool) -> None:
    """Few lengths for the device to plan for; sliding windows are read as they are where they can't be padded."""
    model = configured(tiny(family, padded=True), shared_prefill=shared)
    runner = ModelRunner(configured(replace(model, device="cuda"), device="cuda"))
    assert (runner.capabilities().steps.prefill_quantum, pad_to("cuda")) == (256, 64)
    assert (ModelRunner(model).capabilities().steps.prefill_quantum, pad_to("cpu")) == (0, 1)
    runner.warm_up()
    assert steps(runner, PROMPTS, 4) == steps(ModelRunner(model), PROMPTS, 4)
