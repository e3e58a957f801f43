"""Greedy decoding: in any batch, under any schedule = alone = mlx-lm's own generation, token for token."""

from __future__ import annotations

import random

import pytest

from tests.runner.backends import configured
from tests.runner.conftest import Tiny
from tests.runner.drive import Drive, run_alone, seeded_choices
from tests.runner.families import FAMILIES
from tests.runner.reference import reference, references
from treadle.core.messages import Submit
from treadle.runner.model_runner import ModelRunner

ARCHITECTURES = ["llama", "qwen3", "gemma3", "qwen3_moe", "gpt_oss", "smollm3"]


def requests(seed: int, count: int = 7) -> list[Submit]:
    """Prompts of 1 to 90 tokens, so that a window of 32 is passed; of 1 to 45 new tokens."""
    dice = random.Random(seed)
    lengths = [1, 2, 90, *(dice.randint(1, 60) for _ in range(count - 3))]
    return [
        Submit(id=f"r{i}", prompt=tuple(dice.randrange(256) for _ in range(n)), max_tokens=dice.randint(1, 45))
        for i, n in enumerate(lengths)
    ]


@pytest.mark.parametrize(("seed", "architecture"), [*enumerate(ARCHITECTURES)])
def test_any_schedule_gives_what_mlx_lm_gives(either: Tiny, architecture: str, seed: int) -> None:
    """In chunks of any size, held back now and then, with windows of 32."""
    model = either(architecture)
    assert model.choice.config.name != "serial", model.details
    some = requests(seed)
    runner = ModelRunner(model)
    together = Drive(runner, some).run(seeded_choices(seed))
    assert together == references(model, some, together)
    assert runner.statistics().kv_bytes == 0


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_alone_gives_what_mlx_lm_gives(either: Tiny, architecture: str) -> None:
    model = either(architecture)
    for request in requests(9, count=5):
        alone = run_alone(ModelRunner(model), request)
        assert alone == reference(model, request, alone)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_model_whose_caches_cannot_merge_gives_the_same(tiny: Tiny, architecture: str) -> None:
    model = tiny(architecture, padded=True)
    some = requests(3)
    one_by_one = Drive(ModelRunner(configured(model, batched=False)), some).run(seeded_choices(3))
    assert one_by_one == references(model, some, one_by_one)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_kind_of_cache_gives_what_mlx_lm_gives(tiny: Tiny, family: str) -> None:
    """Recurrent, hybrid, latents and capped scores; DeepSeek 4.1's caches can't be merged and go one by one."""
    model = tiny(family)
    assert model.choice.config.name == ("serial" if family == "deepseek_v41" else "contiguous"), model.details
    some = requests(1, count=6)
    together = Drive(ModelRunner(model), some).run(seeded_choices(1))
    assert together == references(model, some, together)


@pytest.mark.parametrize("at", [0, 7, 19])
def test_a_guess_that_is_wrong_anywhere_is_not_taken_for_the_reference(tiny: Tiny, at: int) -> None:
    """Else the tests above would show nothing."""
    model, request = tiny("gemma3"), Submit(id="a", prompt=(3, 1, 4), max_tokens=20)
    wanted = reference(model, request)
    wrong = [*wanted[:at], wanted[at] ^ 1, *wanted[at + 1 :]]
    assert reference(model, request, wanted) == reference(model, request, wrong) == wanted
