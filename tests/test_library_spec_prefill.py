"""treadle.Engine with a scorer: prompts that are prefilled in part, their counts, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.aio import in_loop
from tests.support.tiny import make_tiny
from treadle import Engine
from treadle.core.sparse_prompt import kept_tokens
from treadle.errors import InvalidRequest, TreadleError

PROMPT = [7 * i % 250 for i in range(700)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    make_tiny(made / "target")
    make_tiny(made / "scorer", layers=1, seed=3)
    make_tiny(made / "other", layers=1, added=("<think>",))
    return made


@in_loop
async def test_a_long_prompt_is_prefilled_in_part_and_a_call_may_refuse(models: Path) -> None:
    settings: dict[str, Any] = {
        "spec_prefill": str(models / "scorer"),
        "spec_prefill_min": 512,
        "spec_prefill_keep": 0.5,
    }
    async with Engine(str(models / "target"), **settings) as engine:
        part = await engine.generate(PROMPT, max_tokens=5, temperature=0)
        whole = await engine.generate(PROMPT, max_tokens=5, temperature=0, spec_prefill=False)
        assert (part.prompt_tokens, part.kept_tokens) == (700, kept_tokens(700, 0.5))
        assert (whole.prompt_tokens, whole.kept_tokens) == (700, 700)
        found = engine.status()["spec_prefill"]
        assert (found["scorer"], found["prompts"], found["scored_tokens"]) == ("scorer", 1, 700)
        with pytest.raises(InvalidRequest, match="log-probabilities of all of its tokens"):
            await engine.generate(PROMPT, max_tokens=1, spec_prefill=True, prompt_logprobs=1)


@in_loop
async def test_a_call_that_demands_a_scorer_is_refused_without_one(models: Path) -> None:
    async with Engine(str(models / "target")) as engine:
        with pytest.raises(InvalidRequest, match="spec_prefill is true, and the server has no model"):
            await engine.generate(PROMPT, max_tokens=1, spec_prefill=True)
        assert engine.status()["spec_prefill"] == {"scorer": None}


@in_loop
async def test_a_scorer_with_other_tokens_is_refused(models: Path) -> None:
    with pytest.raises(TreadleError, match="spec_prefill other has other tokens than target: id 261"):
        async with Engine(str(models / "target"), spec_prefill=str(models / "other")):
            pass
