"""Tokens that a grammar leaves no choice about, several a step: the same tokens as one by one, in fewer steps."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.runner.conftest import Tiny
from tests.runner.looped import Looped
from tests.runner.paged.models import loaded, make, paged
from tests.runner.test_lookahead import KINDS, ahead, assert_alike, in_lock_step
from tests.runner.test_replay import Recorded, content, replay
from tests.support.grammars import Grammars, byte_tokenizer, lark, regex, schema
from tests.support.tiny import EOS, IM_END
from treadle.core import block_budget
from treadle.core.messages import Constraint, Submit, Thinking
from treadle.core.plan import StepResult
from treadle.runner.loading.model import LoadedModel
from treadle.runner.model_runner import ModelRunner
from treadle.runner.sampling import sampler
from treadle.runner.sampling.constraints import MOST_FORCED, RowConstraint, row_constraint
from treadle.runner.sampling.sampler import SamplingRow
from treadle.runner.sampling.token_masks import TokenMasks

FORM = schema(
    {
        "type": "object",
        "properties": {"the_number": {"type": "integer", "minimum": 0, "maximum": 99}, "flag": {"type": "boolean"}},
        "required": ["the_number", "flag"],
        "additionalProperties": False,
    }
)
FORMS = lark('start: (/[0-9]/ "=result;"){20}')
CALLS = lark('start: /[0-9]/ "=result;"', triggers=tuple("0123456789"), then_free=True)


class Counting(ModelRunner):
    """Keeps the results of its steps. Its clock stands: chunks follow the time that steps take."""

    def __init__(self, model: LoadedModel, *, forces: bool = True) -> None:
        super().__init__(model, clock=lambda: 0.0, grammars=grammars(model))
        self.fast_forward = forces
        self.results: list[StepResult] = []

    def finish(self) -> StepResult:
        self.results.append(super().finish())
        return self.results[-1]

    def forced(self, id_: str) -> list[int]:
        return forced_of(self.results, id_)


def grammars(model: LoadedModel) -> Grammars:
    return Grammars(byte_tokenizer(max(model.vocabulary, 261)))


def forced_of(results: Sequence[StepResult], id_: str) -> list[int]:
    """How many tokens were forced in each step in which some were."""
    return [row.forced for result in results for row in result.rows if row.id == id_ and row.forced]


def request(id_: str, constraint: Constraint | None, i: int, **fields: Any) -> Submit:
    dice = random.Random(id_)
    kind = list(KINDS)[i % len(KINDS)]
    values: dict[str, Any] = {
        "max_tokens": 100,
        "sampling": msgspec.structs.replace(KINDS[kind], seed=i),
        "stop_token_ids": (EOS, IM_END),
        **fields,
    }
    prompt = tuple(dice.randrange(256) for _ in range(dice.choice([1, 5, 60])))
    return Submit(id=id_, prompt=prompt, constraint=constraint, max_wait_s=1e9, **values)


def some_requests() -> list[Submit]:
    """Forms and calls, beside rows without a constraint."""
    thinking = Thinking((EOS,), (ord("!"),), opened=True, budget=4)
    digits = tuple((ord(c), 4.0) for c in "0123456789")
    biased = msgspec.structs.replace(KINDS["drawn"], logit_bias=digits)
    return [
        *(request(f"form {i}", FORM, i) for i in (0, 2, 4)),
        request("thoughtful", FORM, 1, thinking=thinking, min_tokens=40),
        request("closing", msgspec.structs.replace(FORM, close_at_limit=True), 2, max_tokens=35),
        request("endless", FORM, 3, stop_token_ids=()),
        request("cut", FORM, 4, max_tokens=9),
        request("calls", CALLS, 1, sampling=biased, stop_token_ids=(), max_tokens=40),
        *(request(f"free {i}", None, i, max_tokens=30, stop_token_ids=()) for i in range(2)),
    ]


BACKENDS = ("contiguous", "ahead", "padded", "padded ahead", "serial", "paged", "recurrent", "windows")


def model_of(backend: str, tiny: Tiny) -> LoadedModel:
    match backend:
        case "paged":
            return loaded(made := make("llama"), paged(made))
        case "ahead":
            return ahead(tiny("llama"))
        case "padded ahead":
            return ahead(tiny("llama", padded=True))
        case "padded" | "serial":
            model = tiny("llama", padded=True)
            config: Any = model.choice.config
            config = replace(config, batched=backend == "padded")
            return replace(model, choice=replace(model.choice, config=config))
        case "recurrent":
            return tiny("qwen3_next")
        case "windows":
            return tiny("gemma3")
        case _:
            return tiny("llama")


def run(model: LoadedModel, some: Sequence[Submit], *, forces: bool = True, **limits: int) -> tuple[Looped, Counting]:
    runner = Counting(model, forces=forces)
    loop = Looped(runner, **limits)
    loop.run(*some)
    return loop, runner


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_row_is_what_it_is_one_token_a_step(tiny: Tiny, backend: str) -> None:
    model, some = model_of(backend, tiny), some_requests()
    on, off = (run(model, some, forces=forces, max_running=4) for forces in (True, False))
    for one in some:
        assert_alike(on[0].everything(one.id), off[0].everything(one.id))
    assert not any(row.forced for result in off[1].results for row in result.rows)
    assert len(on[1].results) < 0.7 * len(off[1].results)
    forced = {one.id: on[1].forced(one.id) for one in some}
    assert all(any(forced[one.id]) != one.id.startswith("free") for one in some), forced
    assert on[1].statistics().kv_bytes == 0


def test_a_row_with_log_probabilities_computes_the_logits_of_every_token(tiny: Tiny) -> None:
    loop, runner = run(tiny("llama"), [request("scored", FORM, 1, logprobs=2)])
    assert not runner.forced("scored")
    assert len(loop.everything("scored")[1]) == len(loop.tokens("scored"))


def test_a_token_that_is_drawn_again_is_not_one_that_was_forced(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step in which forced tokens wait is computed again, as another row's token has changed."""
    some = [request(f"{i}", FORM, 2) for i in range(4)] + [request(f"free {i}", None, 2) for i in range(4)]
    off, _ = run(tiny("gemma3"), some, forces=False, max_running=8)
    monkeypatch.setattr(sampler, "CANDIDATES", 4)
    launched: list[set[str]] = []
    real = ModelRunner._launch

    def launch(self: ModelRunner, step: Any, before: Any) -> None:
        launched.append(set(step.superseded))
        real(self, step, before)

    monkeypatch.setattr(ModelRunner, "_launch", launch)
    on, runner = run(ahead(tiny("gemma3")), some, max_running=8)
    assert any(launched), "computed again with rows whose tokens are forced"
    assert all(runner.forced(f"{i}") for i in range(4))
    for one in some:
        assert_alike(on.everything(one.id), off.everything(one.id))


@pytest.mark.parametrize("lookahead", [0, 1])
def test_preempted_rows_go_on_and_a_log_of_calls_gives_the_same(
    tiny: Tiny, lookahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_budget, "EXPECTED_TOKENS", 1)
    model = ahead(tiny("llama")) if lookahead else in_lock_step(tiny("llama"))
    some = [*some_requests(), *(request(f"long {i}", FORMS, i, max_tokens=90) for i in range(4))]
    some = [msgspec.structs.replace(one, prompt=one.prompt[:9]) for one in some]
    calm, _ = run(model, some)
    runner = Recorded(model, grammars=grammars(model))
    loop = Looped(runner, prefill_tokens=8)
    loop.run(*some)
    assert loop.scheduler.statistics(0.0, runner.statistics()).preempted
    assert any(row.forced for result in runner.results for row in result.rows)
    for one in some:
        assert_alike(loop.everything(one.id), calm.everything(one.id))
    again = replay(runner.log, ModelRunner(model, grammars=grammars(model)))
    assert [content(result) for result in again] == [content(result) for result in runner.results]


def test_what_forced_tokens_left_in_the_cache_is_reused(tiny: Tiny) -> None:
    for model in (in_lock_step(tiny("llama")), ahead(tiny("llama"))):
        loop, runner = run(model, [request("first", FORM, 0)])
        assert runner.forced("first")
        tokens = (*runner_prompt("first"), *loop.tokens("first"))
        fresh = Looped(ModelRunner(model))
        for one in (loop, fresh):
            one.run(Submit(id="next", prompt=(*tokens, 5), max_tokens=9, max_wait_s=1e9))
        assert loop.cached("next") >= len(tokens) - 1 - 32
        assert loop.tokens("next") == fresh.tokens("next")


def runner_prompt(id_: str) -> tuple[int, ...]:
    return request(id_, None, 0).prompt


@pytest.mark.parametrize(("rows", "forced"), [(1, True), (9, False)])
def test_padded_rows_take_forced_tokens_where_the_others_lose_less_than_they_gain(
    tiny: Tiny, rows: int, forced: bool
) -> None:
    """They need a pass of their own: seven tokens in a pass, or one of each other row."""
    others = [request(f"free {i}", None, 0, max_tokens=40, stop_token_ids=()) for i in range(rows - 1)]
    _, runner = run(
        model_of("padded", tiny), [*others, request("calls", lark('start: /[0-9]/ "=result"'), 0)], max_running=9
    )
    assert any(runner.forced("calls")) == forced


def test_backends_without_a_gain_force_nothing(tiny: Tiny) -> None:
    for model, quantum in ((tiny("llama"), "prefill_quantum"), (model_of("padded", tiny), "prefill_quantum")):
        runner = Counting(model)
        setattr(runner._backend, quantum, 256)
        assert not runner.capabilities().fast_forward
        runner._backend.prefill_quantum = 0  # type: ignore[misc]
        assert runner.capabilities().fast_forward


# Single rows ---------------------------------------------------------------------------------------------------------


def sampling_row(constraint: Constraint, **fields: Any) -> SamplingRow:
    made = Submit("r", (1,), 50, stop_token_ids=(EOS,), constraint=constraint, **fields)
    return SamplingRow(made, (), 261, row_constraint(made, (), 261, Grammars(byte_tokenizer(261))))


def test_a_token_that_leaves_no_room_for_a_completion_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    row = sampling_row(regex("abcdef", close_at_limit=True))
    monkeypatch.setattr(RowConstraint, "settle", lambda self, token: ord("x") if token == ord("d") else token)
    assert row.force(1) == ([*b"abc"], "")
    assert row.force(1) == ([], "")
    monkeypatch.undo()
    assert row.force(1) == ([*b"def"], "")


def test_penalties_count_forced_tokens() -> None:
    row = sampling_row(regex("aab"), sampling=KINDS["greedy, penalised"])
    row.force(1)
    assert row.processors.seen is not None
    assert row.processors.seen.generated == 3


def test_a_row_that_its_grammar_fails_among_forced_tokens_goes_on_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    row = sampling_row(regex("abcdef"))
    monkeypatch.setattr(RowConstraint, "forced", lambda self: [*b"abx"])
    tokens, failure = row.force(1)
    assert tokens == [*b"abx"]
    assert "does not follow the grammar" in failure


def test_runs_that_are_too_short_are_left_to_the_mask() -> None:
    row = sampling_row(regex("abc[0-9]"))
    assert row.force(4) == ([], "")
    assert row.force(3) == ([*b"abc"], "")


# Long texts -----------------------------------------------------------------------------------------------------------

LONG = "".join(random.Random(1).choices("abcdefgh ", k=20_000))


@pytest.mark.parametrize("constraint", [schema({"const": LONG}), schema({"enum": [LONG, "short"]})])
def test_a_long_text_is_forced_in_pieces(constraint: Constraint) -> None:
    row = sampled(constraint, max_tokens=30_000)
    tokens, masks = list[int](), TokenMasks(300)
    while not row.ended:
        assert row.constraint is not None
        assert row.constraint.limit is not None
        (token, *_) = masks_of(row.constraint, masks)
        row.accept(token)
        forced, failure = row.force(1)
        assert not failure
        assert len(forced) <= MOST_FORCED
        tokens += [token, *forced]
    assert bytes(tokens[:-1]).decode() == f'"{LONG}"'
    assert tokens[-1] in (EOS, IM_END)


def test_in_a_long_text_no_mask_is_filled_for_a_row_that_forces_nothing() -> None:
    """llguidance would cut the rest of the text into tokens for each."""
    row = sampled(schema({"const": LONG}), max_tokens=30_000, logprobs=1)
    for token in b'"' + LONG[:50].encode():
        assert row.constraint is not None
        assert row.constraint.limit is not None
        assert (row.constraint.limit.matcher, row.constraint.limit.added) == (None, (token,))
        assert row.force(1) == ([], "")
        row.accept(token)


def test_reasoning_begins_a_long_text_anew() -> None:
    """The text begins with the marker of the reasoning: both its tokens are those of the grammar."""
    thinking = Thinking(open_ids=(ord('"'),), close_ids=(ord("."),), opened=False)
    row = sampled(schema({"const": LONG}), max_tokens=30_000, thinking=thinking)
    for token in b'"ab.':
        row.accept(token)
    assert row.constraint is not None
    assert masks_of(row.constraint, TokenMasks(300)) == [ord('"')]


def sampled(constraint: Constraint, **fields: Any) -> SamplingRow:
    made = request("r", constraint, 0, **fields)
    return SamplingRow(made, (), 300, row_constraint(made, (), 300, Grammars(byte_tokenizer(300))))


def masks_of(row: RowConstraint, masks: TokenMasks) -> list[int]:
    found: list[int] = np.flatnonzero(np.unpackbits(masks.fill([row])[0].view(np.uint8), bitorder="little")).tolist()
    return found
