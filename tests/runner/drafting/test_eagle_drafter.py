"""Drafts of EAGLE-3 heads: what they compute, and what a row gains with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.runner.drafting.eagles import Eagle, make_target, with_eagle
from tests.runner.drafting.headed import OPTIONS, check_drafts
from tests.runner.speculated import Speculated
from tests.runner.speculation_requests import made, mixed
from tests.support.eagle_models import make_eagle, make_right
from treadle.core.messages import Submit
from treadle.runner.drafting.either import Either
from treadle.runner.drafting.head import HeadDrafter
from treadle.runner.drafting.lookup import LookupDrafter
from treadle.runner.loading.loader import load
from treadle.runner.model_runner import ModelRunner

HEADS: dict[str, dict[str, Any]] = {
    "llama": {"layout": "speculators", "layers": 2, "norm_before_residual": True, "norm_before_fc": True},
    "qwen3": {"layout": "original"},
}


@pytest.fixture(scope="module", params=HEADS)
def eagle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Eagle:
    folder = tmp_path_factory.mktemp("eagle")
    return Eagle.of(make_target(folder / "model", request.param), make_eagle(folder / "head", **HEADS[request.param]))


def test_drafts_are_those_of_a_new_head_that_sees_the_whole_row(eagle: Eagle) -> None:
    check_drafts(eagle, eagle.model)


def test_every_request_gains_what_it_gains_without_drafts(eagle: Eagle) -> None:
    """Greedy, drawn and constrained ones beside look-up, with some that are preempted, and some that leave."""
    some = mixed(2)[-12:]
    wanted = Speculated(made(eagle.plain), some, drafts=0).run()
    drafter, left = HeadDrafter(eagle.model), [some[1].id, some[2].id]
    runner = made(eagle.model.target, Either(LookupDrafter(), drafter))
    assert runner.capabilities().steps.speculation.drafters == ("lookup", "eagle3")
    runner.warm_up()
    run = Speculated(runner, some, drafts=4, chunk=16)
    for id_, tokens in run.run(preempt=1, cancel=left).items():
        assert tokens == wanted[id_][: len(tokens)]
        assert id_ in left or len(tokens) == len(wanted[id_])
    assert run.failures == {}
    assert run.drafted > 15
    assert drafter.statistics().kv_bytes == 0


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_head_that_knows_the_next_token_drafts_it(family: str, tmp_path: Path) -> None:
    """Of a model whose next token depends on the last one alone, as its layers add nothing. The head names tokens in
    another order than the model."""
    plain = load(make_target(tmp_path / "model", family, without_layers=True), **OPTIONS)
    model = with_eagle(plain, make_right(tmp_path / "head", plain.module.lm_head.weight))
    some = [Submit(id=f"r{i}", prompt=tuple(range(i, 9 + 7 * i)), max_tokens=30) for i in range(4)]
    wanted = Speculated(ModelRunner(model.target), some, drafts=0).run()
    run = Speculated(ModelRunner(model.target, drafter=HeadDrafter(model)), some, drafts=5)
    assert run.run() == wanted
    assert run.accepted == run.drafted > 80
    assert run.steps < 12
