"""Runners with a scorer under the engine's loop, and requests with long prompts for them."""

from __future__ import annotations

import random
from typing import Any

from msgspec.structs import replace

from tests.core.drive import PLAIN, VERIFYING
from tests.runner.looped import Looped
from tests.runner.test_lookahead import KINDS
from tests.support.grammars import Grammars, byte_tokenizer, regex
from tests.support.tiny import EOS
from treadle.core.capabilities import StepCost
from treadle.core.messages import Submit
from treadle.core.plan import StepResult
from treadle.core.statistics import SpecPrefillStatistics
from treadle.runner.drafting.drafter import Drafter
from treadle.runner.loading.model import LoadedModel
from treadle.runner.loading.step_costs import StepCosts
from treadle.runner.model_runner import ModelRunner
from treadle.runner.scoring.scorer import Scorer

LEAST = 340
TOKENS = 261  # of the vocabulary of `make_tiny`
WORD = regex("[a-z]{3,8}")
_COSTS = StepCosts(plain=(*PLAIN, StepCost(8, 8, 1.3)), verifying=(*VERIFYING, StepCost(8, 40, 2.2)))


def scorer_of(model: LoadedModel, keep: float = 0.5, min_tokens: int = LEAST) -> Scorer:
    return Scorer(model, TOKENS, keep=keep, min_tokens=min_tokens)


class Timed(ModelRunner):
    """Each step takes a second, so that how busy the machine is does not decide what is drafted."""

    def __init__(self, model: LoadedModel, **options: Any) -> None:
        self.now = 0.0
        super().__init__(model, lambda: self.now, **options)

    def finish(self) -> StepResult:
        self.now += 1.0
        return super().finish()


def looped(model: LoadedModel, scorer: Scorer | None, drafter: Drafter | None = None, **options: Any) -> Looped:
    grammars = Grammars(byte_tokenizer(model.vocabulary)) if model.vocabulary >= TOKENS else None
    runner = Timed(model, scorer=scorer, drafter=drafter, grammars=grammars)
    runner._costs = _COSTS
    return Looped(runner, **{"prefill_tokens": 150, **options})


def mixed(model: LoadedModel, seed: int, *, tokens: int = 24) -> list[Submit]:
    """Long prompts and short ones, of every kind of sampling, some with repetitions that look-up finds, one with a
    grammar, and one that is to be prefilled whole."""
    dice = random.Random(seed)
    some = []
    for i, (kind, sampling) in enumerate(KINDS.items()):
        size = (480, 6, 420, 500, 450, 9, 480)[i]
        phrase = dice.choices(range(256), k=16)
        prompt = tuple(dice.choices(range(256), k=size)) if i % 2 else tuple((phrase * (size // 16 + 1))[:size])
        whole = False if i == 4 else None
        some.append(Submit(kind, prompt, tokens, sampling, logprobs=2 if i == 1 else None, sparse_prefill=whole))
    if model.vocabulary >= TOKENS:
        long = tuple(dice.choices(range(256), k=450))
        some.append(Submit("word", long, tokens, stop_token_ids=(EOS,), constraint=WORD))
    return [replace(one, max_wait_s=1e6) for one in some]


def told(one: Looped) -> SpecPrefillStatistics:
    return one.scheduler.statistics(0.0, one.runner.statistics()).spec_prefill


def kept(one: Looped, id_: str) -> tuple[int | None, int | None]:
    """Scored and kept tokens, as a request was told last."""
    found = [(o.scored_tokens, o.kept_tokens) for o in one.outputs[id_] if o.scored_tokens is not None]
    return found[-1]


def assert_nothing_is_held(one: Looped) -> None:
    held = one.runner.statistics()
    assert (held.scorer.prompts, held.scorer.kv_bytes, held.kv_bytes) == (0, 0, 0)
    assert not one.runner._rows
