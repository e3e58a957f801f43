"""Drafts of a model in the runner's steps: requests gain what they gain without."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec
import pytest

from tests.runner.conftest import Tiny
from tests.runner.speculated import Speculated
from tests.runner.test_lookahead import KINDS, requests
from tests.support.tiny import make_tiny
from treadle.core.messages import Submit
from treadle.runner.drafting.drafter import Drafter
from treadle.runner.drafting.either import Either
from treadle.runner.drafting.lookup import LookupDrafter
from treadle.runner.drafting.model import ModelDrafter
from treadle.runner.loading.loader import load
from treadle.runner.loading.model import LoadedModel
from treadle.runner.model_runner import ModelRunner

Small = Callable[[int], LoadedModel]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    """A smaller model with the same tokens, by the seed of its weights; 0 has the first layer of `tiny`'s."""
    made = tmp_path_factory.mktemp("drafts")
    return lambda seed: load(make_tiny(made / str(seed), layers=1, seed=seed))


def mixed(seed: int) -> list[Submit]:
    """Requests of every kind of sampling, one of which is not to be drafted."""
    some = requests(random.Random(seed), count=2 * len(KINDS))
    return [msgspec.structs.replace(one, speculate=i != 3) for i, one in enumerate(some)]


def test_drafts_of_the_same_weights_are_all_accepted_greedily(tiny: Tiny) -> None:
    model = tiny()
    some = [Submit(id=f"r{i}", prompt=tuple(range(i, 40 + 7 * i)), max_tokens=40) for i in range(4)]
    wanted = Speculated(ModelRunner(model), some, drafts=0).run()
    found = Speculated(ModelRunner(model, drafter=ModelDrafter(model, model.vocabulary)), some, drafts=5)
    assert found.run() == wanted
    assert found.accepted == found.drafted > 100
    assert found.steps < 14


@pytest.mark.parametrize("kind", ["draft", "lookup+draft"])
def test_every_request_gains_what_it_gains_without_drafts(tiny: Tiny, small: Small, kind: str) -> None:
    """All together, greedy and drawn; then with some that are preempted, and some that leave."""
    model, some = tiny(), mixed(1)
    plain = Speculated(ModelRunner(model), some, drafts=0)
    wanted = plain.run()
    draft = ModelDrafter(small(9), model.vocabulary)
    drafter: Drafter = draft if kind == "draft" else Either(LookupDrafter(), draft)
    assert drafter.names == tuple(kind.split("+"))
    runner = ModelRunner(model, drafter=drafter)
    found = Speculated(runner, some, drafts=4)
    assert found.run() == wanted
    assert found.drafted > 100
    left = [some[1].id, some[2].id]
    again = Speculated(runner, some, drafts=8, chunk=16)
    for id_, tokens in again.run(preempt=1, cancel=left).items():
        assert tokens == wanted[id_][: len(tokens)]
        assert id_ in left or len(tokens) == len(wanted[id_])
    assert again.failures == found.failures == {}
    assert draft.statistics().kv_bytes == 0, "nothing is held for those that have gone"


def test_a_draft_that_fails_costs_no_request_its_answer(tiny: Tiny, small: Small) -> None:
    model, some = tiny(), mixed(2)
    wanted = Speculated(ModelRunner(model), some, drafts=0).run()
    draft = ModelDrafter(small(9), model.vocabulary)
    found = Speculated(ModelRunner(model, drafter=draft), some, drafts=4)
    for _ in range(3):
        found.step()

    def fail(*_: object, **__: object) -> None:
        raise MemoryError("no page is left")

    draft._backend.compute = fail  # type: ignore[method-assign, assignment]
    before = found.drafted
    assert found.run() == wanted
    assert found.drafted == before > 0


def test_the_drafter_lives_and_ends_with_its_runner(tiny: Tiny, small: Small) -> None:
    draft = ModelDrafter(small(9), tiny().vocabulary)
    runner = ModelRunner(tiny(), drafter=Either(LookupDrafter(), draft))
    runner.warm_up()
    assert draft.token_s > 0
    Speculated(runner, mixed(3)[:3], drafts=4).run()
    assert draft.statistics().prefix.held > 0
    runner.forget_prefixes()
    assert draft.statistics().prefix.held == 0
    runner.close()
    with pytest.raises(AttributeError):
        draft.statistics()
