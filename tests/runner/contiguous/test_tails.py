"""What rows leave behind their last whole block, in the layout of stock operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.runner.conftest import Tiny
from tests.runner.looped import Looped
from tests.runner.reference import reference
from tests.runner.test_snapshots import FailsAt
from treadle.core.messages import Submit
from treadle.core.plan import Admit, PrefillChunk, StepPlan
from treadle.runner.model_runner import ModelRunner


def asked(id_: str, prompt: Sequence[int], max_tokens: int = 5) -> Submit:
    return Submit(id=id_, prompt=tuple(prompt), max_tokens=max_tokens)


def read(runner: ModelRunner, request: Submit, end: int, start: int = 0) -> None:
    """Compute the request's prompt from `start` to `end`."""
    admit = () if start else (Admit(request=request),)
    chunk = PrefillChunk(request.id, start, len(request.prompt[start:end]))
    runner.execute(StepPlan(step=1, admit=admit, prefill=(chunk,)))


def found(runner: ModelRunner, prompt: Sequence[int]) -> int:
    """How much of `prompt` is kept."""
    count = runner.match_prefix(Admit(request=asked("finds", [*prompt, 0])))
    runner.release("finds")
    return count


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
@pytest.mark.parametrize("length", [1, 31, 33, 63, 100])
def test_all_that_a_row_has_is_kept_when_it_leaves(tiny: Tiny, architecture: str, length: int) -> None:
    """Token by token, with windows of 32, and what goes on from it ends as it would have."""
    model = tiny(architecture)
    runner = ModelRunner(model)
    loop = Looped(runner)
    prompt = range(length)
    answer = loop.run(asked("a", prompt))["a"]
    assert found(runner, [*prompt, *answer[:4], 99]) == length + 4
    assert found(runner, [*prompt, *answer[:2], 99]) == length + 2
    longer = asked("b", [*prompt, *answer, 7, 8], max_tokens=40)
    assert loop.run(longer)["b"] == reference(model, longer)


def test_a_row_that_leaves_half_way_leaves_what_was_computed(tiny: Tiny) -> None:
    runner = ModelRunner(tiny())
    request = asked("a", range(100))
    read(runner, request, 45)
    assert found(runner, range(100)) == 32
    runner.release("a")
    runner.release("a")
    assert found(runner, range(100)) == 45
    assert runner.statistics().prefix.held == 45


def test_a_row_whose_step_raised_leaves_only_what_was_complete_before(tiny: Tiny) -> None:
    """Some layers have written what others have not."""
    model = tiny()
    runner = ModelRunner(replace(model, module=FailsAt(model.module, 2)))
    request = asked("a", range(100))
    read(runner, request, 45)
    with pytest.raises(ValueError, match="bad shape"):
        read(runner, request, 90, start=45)
    runner.release("a")
    assert found(runner, range(100)) == 32


def test_a_row_that_computed_nothing_leaves_nothing(tiny: Tiny) -> None:
    runner = ModelRunner(tiny())
    runner.execute(StepPlan(step=1, admit=(Admit(request=asked("a", range(10))),)))
    runner.release("a")
    assert runner.statistics().prefix.held == 0


def test_nothing_is_added_to_what_was_given_up_meanwhile(tiny: Tiny) -> None:
    """The end is of no use without the blocks before it."""
    runner = ModelRunner(tiny())
    read(runner, asked("a", range(100)), 45)
    assert runner.forget_prefixes() == 32
    runner.release("a")
    assert runner.statistics().prefix.held_bytes == 0


def test_warming_up_leaves_nothing_behind(tiny: Tiny) -> None:
    """C2"""
    runner = ModelRunner(tiny())
    runner.warm_up()
    assert runner.statistics().prefix.held_bytes == 0
