"""The last layer over the contiguous backend: computed for the tokens that reach the head alone."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from tests.runner.backends import configured
from tests.runner.conftest import Tiny
from tests.runner.drive import Drive
from tests.runner.self_tests import make
from treadle.core.messages import Submit
from treadle.core.plan import Admit, DecodeRow, PrefillChunk, StepPlan
from treadle.runner.kv.contiguous.layer import ContiguousPass
from treadle.runner.kv.cost import KvCost
from treadle.runner.loading import candidates
from treadle.runner.loading.backend_choice import BackendRequest, Rejection
from treadle.runner.loading.model import LoadedModel
from treadle.runner.loading.reference import Reference
from treadle.runner.mlxlm import connect
from treadle.runner.model_runner import ModelRunner

PROMPT = tuple(7 * i % 251 for i in range(40))


def last_computed(model: LoadedModel, monkeypatch: pytest.MonkeyPatch, *, scored: bool = False) -> list[int]:
    """Tokens that the last layer's MLP gets in each step: one sequence's prompt, and another's beside its token."""
    last = model.module.layers[-1].mlp
    kind, seen = type(last), list[int]()
    own = kind.__call__

    def call(self: Any, x: Any) -> Any:
        if self is last:
            seen.append(x.shape[0])
        return own(self, x)

    runner = ModelRunner(model)
    a, b = (
        Submit(id=id_, prompt=PROMPT[i:], max_tokens=9, prompt_logprobs=1 if scored else None)
        for i, id_ in enumerate("ab")
    )
    with monkeypatch.context() as patch:
        patch.setattr(kind, "__call__", call)
        first = (PrefillChunk("a", 0, 39),)
        runner.execute(StepPlan(step=1, admit=(Admit(request=a),), prefill=first, decode=(DecodeRow("a", 0),)))
        second, rows = (PrefillChunk("b", 0, 38),), (DecodeRow("a", 1), DecodeRow("b", 0))
        runner.execute(StepPlan(step=2, admit=(Admit(request=b),), prefill=second, decode=rows))
    runner.close()
    return seen


def test_tokens_of_prompts_leave_only_keys_and_values_in_the_last_layer(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert last_computed(tiny("llama"), monkeypatch) == [1, 2]


def test_a_layer_that_is_not_narrowed_computes_all_tokens(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    assert last_computed(configured(tiny("llama"), narrows=False), monkeypatch) == [40, 40]


def test_prompts_that_are_scored_are_computed_whole(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    assert last_computed(tiny("llama"), monkeypatch, scored=True) == [40, 40]


@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek_v3", "qwen3_next"])
def test_answers_are_those_of_whole_layers(tiny: Tiny, name: str) -> None:
    """Windows, latents, and recurrent layers before the last one."""
    model = tiny(name)
    assert model.choice.config.narrows  # type: ignore[attr-defined]
    some = [Submit(id=f"r{i}", prompt=PROMPT[: 5 + 11 * i], max_tokens=12) for i in range(4)]
    found, wanted = (Drive(ModelRunner(configured(model, narrows=on)), some).run() for on in (True, False))
    assert found == wanted


def test_a_layer_that_is_wrong_when_narrowed_is_computed_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here it attends to one token less."""
    own = ContiguousPass.narrowed

    def narrowed(self: ContiguousPass) -> Any:
        for one in self.wanted or ():
            one.end -= 1
        return own(self)

    monkeypatch.setattr(ContiguousPass, "narrowed", narrowed)
    mx.random.seed(0)
    reference, rejected = Reference(connect(), make("llama", "float32"), 2048), list[Rejection]()
    request = BackendRequest("cpu", None, 4, keep_prefixes=False)
    config = candidates.contiguous(reference, KvCost(1, 0), 0, request, rejected)
    assert not config.narrows
    assert [(one.backend, one.failed) for one in rejected] == [("narrowed last layer", True)]
