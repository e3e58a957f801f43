"""Constrained rows beside free ones, through whole runners: their answers are valid, and nobody else's change."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, ClassVar

import mlx.core as mx
import msgspec
import pytest
from llguidance import LLMatcher, LLParserLimits

from tests.runner.conftest import Tiny
from tests.runner.looped import Looped
from tests.runner.paged.models import loaded, make, paged
from tests.runner.test_lookahead import KINDS, ahead, assert_alike, in_lock_step
from tests.runner.test_replay import Recorded, content, replay
from tests.support.cuda import ReferenceKernel
from tests.support.emulated import EmulatedKernel
from tests.support.grammars import Grammars, byte_tokenizer, lark, regex, schema
from tests.support.tiny import EOS, IM_END
from treadle.core import block_budget
from treadle.core.messages import Constraint, FinishReason, Submit, Thinking
from treadle.grammar.faults import FAILED
from treadle.runner.loading.model import LoadedModel
from treadle.runner.model_runner import ModelRunner
from treadle.runner.sampling import row_grammar, token_masks
from treadle.runner.sampling.mask_kernel import MaskKernel
from treadle.runner.sampling.sampling_kernel import SamplingKernel
from treadle.runner.sampling.token_masks import TokenMasks
from treadle.runner.step_sampler import StepSampler

PERSON = schema(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 6},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["a", "bb", "ccc"]}, "maxItems": 3},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    }
)
WORD = regex("[a-z]{3,8}")
CALL = lark('start: "<call>" /[0-9]{1,4}/ "</call>"')


def text_of(tokens: Sequence[int]) -> str:
    return bytes(token for token in tokens if token < 256).decode(errors="replace")


def is_person(text: str) -> bool:
    value = json.loads(text)
    return set(value) == {"name", "age", "tags"} and 0 <= value["age"] <= 150 and len(value["tags"]) <= 3


VALID: dict[str, tuple[Constraint, Callable[[str], Any]]] = {
    "person": (PERSON, is_person),
    "word": (WORD, re.compile("[a-z]{3,8}").fullmatch),
    "call": (CALL, re.compile("<call>[0-9]{1,4}</call>").fullmatch),
}


def constrained(kind: str, i: int, dice: random.Random, sampling: str) -> Submit:
    return Submit(
        id=f"{kind} {i}",
        prompt=tuple(dice.randrange(256) for _ in range(dice.choice([1, 5, 60]))),
        max_tokens=120,
        sampling=msgspec.structs.replace(KINDS[sampling], seed=i),
        stop_token_ids=(EOS, IM_END),
        min_tokens=dice.choice([0, 0, 100]),
        logprobs=dice.choice([None, 2]),
        constraint=VALID[kind][0],
        max_wait_s=1e9,
    )


def free(i: int, dice: random.Random) -> Submit:
    return Submit(
        id=f"free {i}",
        prompt=tuple(dice.randrange(256) for _ in range(dice.choice([1, 20, 70]))),
        max_tokens=dice.randint(5, 40),
        sampling=msgspec.structs.replace(KINDS[dice.choice(list(KINDS))], seed=i),
        logprobs=dice.choice([None, 1]),
        max_wait_s=1e9,
    )


def mixed(seed: int, count: int = 8) -> tuple[list[Submit], list[Submit]]:
    dice, kinds = random.Random(seed), list(KINDS)
    some = [constrained(list(VALID)[i % 3], i, dice, kinds[i % len(kinds)]) for i in range(count)]
    return some, [free(i, dice) for i in range(count)]


def runner_of(model: LoadedModel) -> ModelRunner:
    return ModelRunner(model, grammars=Grammars(byte_tokenizer(model.vocabulary)))


def check_valid(loop: Looped, some: Sequence[Submit]) -> None:
    for request in some:
        tokens = loop.tokens(request.id)
        assert loop.finish(request.id) is FinishReason.STOP, request.id
        assert tokens[-1] in request.stop_token_ids
        assert VALID[request.id.split()[0]][1](text_of(tokens[:-1])), text_of(tokens)


BACKENDS = ("contiguous", "ahead", "padded", "padded ahead", "paged")


def model_of(backend: str, tiny: Tiny) -> LoadedModel:
    if backend == "paged":
        return loaded(made := make("llama"), paged(made))
    model = tiny("llama", padded=backend.startswith("padded"))
    return ahead(model) if backend.endswith("ahead") else model


@pytest.mark.parametrize(("seed", "backend"), [(i % 2, backend) for i, backend in enumerate(BACKENDS)])
def test_answers_are_valid_and_free_rows_are_what_they_are_without_them(tiny: Tiny, backend: str, seed: int) -> None:
    """Greedy, drawn, with penalties, biases and log-probabilities, in every batch."""
    some, others = mixed(seed)
    model = model_of(backend, tiny)
    alone, together = Looped(runner_of(model)), Looped(runner_of(model))
    alone.run(*others)
    order = [*some, *others]
    random.Random(seed).shuffle(order)
    together.run(*order)
    check_valid(together, some)
    for request in others:
        assert_alike(together.everything(request.id), alone.everything(request.id))
    assert together.runner.statistics().kv_bytes == 0


@pytest.mark.parametrize("backend", ["ahead", "padded", "paged"])
def test_a_constrained_row_is_the_same_with_every_backend_and_beside_others(tiny: Tiny, backend: str) -> None:
    some, others = mixed(3, 6)
    lone, model = Looped(runner_of(model_of("contiguous", tiny)), max_running=1), model_of(backend, tiny)
    if backend == "paged":
        lone = Looped(runner_of(model), max_running=1)
    lone.run(*some)
    loop = Looped(runner_of(model), max_running=7)
    loop.run(*some, *others)
    for request in some:
        assert_alike(loop.everything(request.id), lone.everything(request.id))


@pytest.mark.parametrize("backend", ["contiguous", "padded ahead"])
def test_text_that_a_grammar_demands_may_be_a_stop_token_that_is_held_back(tiny: Tiny, backend: str) -> None:
    """Before, `min_tokens` left no token to take, and the row failed for not following its grammar."""
    loop = Looped(runner_of(model_of(backend, tiny)))
    request = Submit(
        id="r",
        prompt=(7,),
        max_tokens=20,
        sampling=KINDS["greedy"],
        stop_token_ids=(*b">12", EOS),
        min_tokens=12,
        constraint=regex("<call>[12]{4}</call>[a-z]{9}"),
        max_wait_s=1e9,
    )
    assert re.fullmatch("<call>[12]{4}<", text_of(loop.run(request)["r"])[:11])
    assert loop.finish("r") is FinishReason.STOP
    assert text_of(loop.tokens("r")) == text_of(loop.tokens("r"))[:11] + "/call>"


# Steps in flight, preemption, replay ---------------------------------------------------------------------------------

DIGITS = lark("start: /[0-9]/ /[a-p]{4}[q-z]{4}/", triggers=tuple("0123456789"), then_free=True)


def triggered(seed: int, count: int = 4) -> list[Submit]:
    dice, kinds = random.Random(seed), list(KINDS)
    return [
        Submit(
            id=f"triggered {i}",
            prompt=tuple(dice.randrange(256) for _ in range(dice.choice([1, 5, 60]))),
            max_tokens=100,
            sampling=msgspec.structs.replace(
                KINDS[kinds[i % len(kinds)]], seed=i, logit_bias=tuple((ord(c), 3.0) for c in "0123456789")
            ),
            logprobs=dice.choice([None, 2]),
            constraint=DIGITS,
            thinking=Thinking((EOS,), (IM_END, ord("!")), opened=i % 2 == 0, budget=7),
            max_wait_s=1e9,
        )
        for i in range(count)
    ]


def check_triggered(text: bytes) -> None:
    assert re.search(rb"[0-9]", text)
    assert re.fullmatch(
        rb"(?:[^0-9]|[0-9][a-p]{4}[q-z]{4})*(?:[0-9][a-p]{0,4}|[0-9][a-p]{4}[q-z]{0,3})?", text, re.DOTALL
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_triggers_and_budgets_act_on_the_very_next_token(tiny: Tiny, backend: str) -> None:
    """Also where that was drawn ahead, when the trigger or the end of the budget was not known yet."""
    some = triggered(2)
    model = model_of(backend, tiny)
    loop, lone = Looped(runner_of(model), max_running=7), Looped(runner_of(model), max_running=1)
    loop.run(*some)
    lone.run(*some)
    for i, request in enumerate(some):
        tokens = loop.tokens(request.id)
        if i % 2 == 0:
            assert (IM_END, ord("!")) in pairwise(tokens[:9])
            tokens = tokens[tokens.index(IM_END) + 2 :]
        check_triggered(bytes(token for token in tokens if token < 256))
        assert_alike(loop.everything(request.id), lone.everything(request.id))


def test_rows_without_a_limit_are_drawn_at_once(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """F7: before a trigger and after a budget nothing waits, and nothing is masked."""
    deferred = []
    real = StepSampler.start

    def recording(self: StepSampler, step: Any, before: Any) -> None:
        real(self, step, before)
        deferred.append(len(step.deferred))

    monkeypatch.setattr(StepSampler, "start", recording)
    monkeypatch.setattr(TokenMasks, "fill", None)
    thinking = Thinking((EOS,), (IM_END,), opened=True, budget=50)
    free = Submit(id="free", prompt=(5,), max_tokens=49, thinking=thinking, max_wait_s=1e9)
    waiting = Submit(id="waiting", prompt=(6,), max_tokens=40, constraint=regex("x", triggers=("nobody says this",)))
    loop = Looped(runner_of(ahead(tiny("llama"))))
    loop.run(free, msgspec.structs.replace(waiting, max_wait_s=1e9))
    assert not any(deferred)
    assert len(loop.tokens("free")) == 49


def test_a_budget_that_is_used_up_gives_the_look_ahead_back(tiny: Tiny) -> None:
    runner = runner_of(ahead(tiny("llama")))
    thinking = Thinking((EOS,), (IM_END,), opened=True, budget=3)
    loop = Looped(runner)
    loop.submit(Submit(id="r", prompt=(5,), max_tokens=30, thinking=thinking, max_wait_s=1e9))
    while len(loop.tokens("r")) < 6:
        loop.step()
    assert loop.tokens("r")[3] == IM_END
    assert runner._rows["r"].sampling.constraint is None
    assert runner._rows["r"].sampling.processors.constraint is None


@pytest.mark.parametrize("lookahead", [0, 1])
def test_preempted_rows_go_on_where_they_were_and_a_log_of_calls_gives_the_same(
    tiny: Tiny, lookahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_budget, "EXPECTED_TOKENS", 1)
    model = tiny("llama")
    model = ahead(model) if lookahead else in_lock_step(model)
    some, others = mixed(5, 6)
    some = [msgspec.structs.replace(one, prompt=one.prompt[:9]) for one in (*some, *triggered(6, 3))]
    some = [msgspec.structs.replace(one, max_tokens=min(one.max_tokens, 120)) for one in some]
    others = [msgspec.structs.replace(one, prompt=one.prompt[:9]) for one in others]
    calm = Looped(ModelRunner(model, grammars=Grammars(byte_tokenizer(model.vocabulary))))
    calm.run(*some, *others)
    runner = Recorded(model, grammars=Grammars(byte_tokenizer(model.vocabulary)))
    loop = Looped(runner, prefill_tokens=8)
    loop.run(*some, *others)
    assert loop.scheduler.statistics(0.0, runner.statistics()).preempted
    check_valid(loop, some[:6])
    for request in (*some, *others):
        assert_alike(loop.everything(request.id), calm.everything(request.id))
    again = replay(runner.log, runner_of(model))
    assert [content(result) for result in again] == [content(result) for result in runner.results]


@pytest.mark.parametrize("backend", ["contiguous", "ahead"])
def test_answers_that_close_at_their_limit(tiny: Tiny, backend: str) -> None:
    """Tokens that would leave no room are replaced, also where a step ahead has fed them already."""
    close = msgspec.structs.replace(PERSON, close_at_limit=True)
    dice, kinds = random.Random(4), list(KINDS)
    some = [
        msgspec.structs.replace(
            constrained("person", i, dice, kinds[i % len(kinds)]), constraint=close, max_tokens=32 + i, min_tokens=0
        )
        for i in range(10)
    ]
    model = model_of(backend, tiny)
    loop, lone = Looped(runner_of(model)), Looped(runner_of(model_of("contiguous", tiny)), max_running=1)
    loop.run(*some)
    lone.run(*some)
    for request in some:
        tokens = loop.tokens(request.id)
        assert loop.finish(request.id) is FinishReason.STOP
        assert is_person(text_of(tokens))
        assert_alike(loop.everything(request.id), lone.everything(request.id))


def test_a_row_whose_grammar_fails_ends_alone(tiny: Tiny) -> None:
    class Failing(Grammars):
        def matcher(self, constraint: Constraint) -> LLMatcher:
            if constraint.kind != "json_schema":
                return super().matcher(constraint)
            limits = LLParserLimits(step_max_items=3, verbose_errors=False)
            return LLMatcher(self.vocabulary, constraint.grammar, log_level=0, limits=limits)

    for backend in ("contiguous", "ahead"):
        model = model_of(backend, tiny)
        some, others = mixed(1)
        alone, loop = Looped(runner_of(model)), Looped(ModelRunner(model, grammars=Failing(byte_tokenizer(261))))
        alone.run(*some, *others)
        loop.run(*some, *others)
        ended = {request.id: loop.finish(request.id) for request in (*some, *others)}
        assert {id_ for id_, end in ended.items() if end is FinishReason.ERROR} == {
            request.id for request in some if request.id.startswith("person")
        }
        for request in (*some, *others):
            if ended[request.id] is not FinishReason.ERROR:
                assert_alike(loop.everything(request.id), alone.everything(request.id))


def test_a_failure_of_llguidance_is_no_fault_of_the_request_and_its_grammar_is_forgotten(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(Grammars):
        forgotten: ClassVar[list[Constraint]] = []

        def matcher(self, constraint: Constraint) -> LLMatcher:
            limits = LLParserLimits(step_max_items=3, verbose_errors=False)
            return LLMatcher(self.vocabulary, constraint.grammar, log_level=0, limits=limits)

        def forget(self, constraint: Constraint) -> None:
            self.forgotten.append(constraint)

    request = constrained("person", 0, random.Random(0), "greedy")
    grammars = Failing(byte_tokenizer(261))
    codes = []
    for fault in ("too many items", FAILED):
        for module in (row_grammar, token_masks):
            monkeypatch.setattr(module, "fault_of_matcher", lambda matcher, fault=fault: fault)
        loop = Looped(ModelRunner(tiny("llama", padded=True), grammars=grammars))
        loop.run(request)
        (finish,) = [output.finish for output in loop.outputs[request.id] if output.finish]
        assert fault in finish.message
        codes.append(finish.code)
    assert codes == ["invalid_grammar", "engine_step_failed"]
    assert grammars.forgotten == [request.constraint]


def test_logits_that_are_nan_are_named_as_the_cause(tiny: Tiny) -> None:
    class Broken:
        def __init__(self, module: Any) -> None:
            self._module = module

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self._module(*args, **kwargs) * mx.nan

        def __getattr__(self, name: str) -> Any:
            return getattr(self._module, name)

    model = tiny("llama", padded=True)
    loop = Looped(runner_of(replace(model, module=Broken(model.module))))
    loop.run(constrained("word", 0, random.Random(0), "greedy"))
    (finish,) = [output.finish for output in loop.outputs["word 0"] if output.finish]
    assert "are NaN" in finish.message


def test_the_kernels_on_their_own_text_give_valid_answers(tiny: Tiny) -> None:
    """Masks by the mask kernel, then drawn by the sampling kernel."""
    model = ahead(tiny("llama"))
    model = replace(
        model,
        draws=SamplingKernel(model.vocabulary, mx.float32, EmulatedKernel),
        masks=MaskKernel(model.vocabulary, EmulatedKernel),
    )
    some = [
        msgspec.structs.replace(constrained("word", i, random.Random(i), kind), prompt=(7,))
        for i, kind in enumerate(("greedy", "nucleus", "penalised"))
    ]
    loop = Looped(runner_of(model))
    loop.run(*some)
    check_valid(loop, some)


def test_a_kernel_and_operations_of_mlx_mask_the_same(tiny: Tiny) -> None:
    model = ahead(tiny("llama"))
    some, others = mixed(7, 4)
    stock = Looped(runner_of(model))
    kernel = Looped(runner_of(replace(model, masks=MaskKernel(model.vocabulary, ReferenceKernel))))
    for loop in (stock, kernel):
        loop.run(*some, *others)
    for request in (*some, *others):
        assert_alike(kernel.everything(request.id), stock.everything(request.id))


@pytest.mark.parametrize("backend", ["contiguous", "ahead"])
def test_masks_are_filled_while_the_device_computes_the_step(
    tiny: Tiny, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single constrained row too: its next pass has been handed to the device before its mask is filled."""
    filled = _fills(replace(model_of(backend, tiny), device="metal"), monkeypatch)
    assert all(count > i for i, count in enumerate(filled)), "one pass more is on the device than masks were filled"


def test_masks_are_filled_before_a_step_that_needs_the_same_cores(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not any(_fills(in_lock_step(tiny("llama")), monkeypatch)), "no pass runs beside them"


def _fills(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the number of passes that had been handed to the device, without waiting, at each filling of masks."""
    handed: list[int] = []
    filled: list[int] = []
    real_eval, real_fill = mx.async_eval, TokenMasks.fill

    def hand(*arrays: Any) -> None:
        handed.append(len(filled))
        real_eval(*arrays)

    def fill(self: TokenMasks, rows: Any) -> Any:
        filled.append(len(handed))
        return real_fill(self, rows)

    monkeypatch.setattr(mx, "async_eval", hand)
    monkeypatch.setattr(TokenMasks, "fill", fill)
    Looped(runner_of(model)).run(constrained("word", 0, random.Random(0), "greedy"))
    assert len(filled) >= 4
    return filled
