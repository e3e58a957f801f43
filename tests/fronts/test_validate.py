from __future__ import annotations

import math
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.core.messages import Constraint, Sampling, Thinking
from treadle.errors import ContextLengthExceeded, InvalidRequest
from treadle.fronts.prepared import Prepared
from treadle.fronts.validate import Limits, RawParams, build_submits, check, check_prompt_ids

LIMITS = Limits(vocabulary=100, context=50, eos_token_ids=(7,))

REFUSED: list[tuple[str, Any]] = [
    *(("temperature", v) for v in (-0.1, 2.1, math.nan, math.inf, True, "1", 10**400)),
    *(("top_p", v) for v in (0, -1, 1.01, math.nan)),
    *(("top_k", v) for v in (-2, 1.5, True, 2**63)),
    *(("min_p", v) for v in (-0.1, 1.1, math.nan)),
    *(("repetition_penalty", v) for v in (0, -1, math.inf)),
    *(("presence_penalty", v) for v in (-2.1, 2.1, math.nan)),
    *(("frequency_penalty", v) for v in (-2.1, 2.1, math.nan)),
    *(("n", v) for v in (0, -1, 129, 10**9, True, 1.0)),
    *(("max_tokens", v) for v in (0, -1, True, 2**63, 50, 10**30)),
    *(("min_tokens", v) for v in (-1, 51, 2**63)),
    *(("seed", v) for v in (2**63, -(2**63) - 1, 1.0, True)),
    *(("logprobs", v) for v in (-1, 21, True)),
    *(("prompt_logprobs", v) for v in (-1, 21, True, 1.0)),
    *(("cache_salt", v) for v in ("", "x" * 257, "a\n", "\x00", "\x7f", "\x85", "\ud800", 5, b"x")),
    *(("priority", v) for v in (-1001, 1001)),
    *(("stop", v) for v in ([""], ["x"] * 17, ["x" * 1025], ["x"] * 10_000)),
    *(("stop_token_ids", v) for v in ([100], [-1], [True], [1] * 257)),
    *(("logit_bias", v) for v in ({"100": 1}, {"-1": 1}, {"x": 1}, {"1": 101}, {"1": math.nan}, {"1": 1, "01": 1})),
    ("logit_bias", {str(i): 0.0 for i in range(1025)}),
]


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=lambda v: repr(v)[:30])
def test_what_is_out_of_range_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check(RawParams(**{name: value}), LIMITS)
    assert caught.value.param == name
    assert name in caught.value.message
    assert len(caught.value.message) < 300


def test_the_edges_are_in_range() -> None:
    checked = check(
        RawParams(
            temperature=2,
            top_p=1,
            top_k=-1,
            min_p=1,
            presence_penalty=-2,
            n=128,
            max_tokens=49,
            min_tokens=49,
            seed=-(2**63),
            logprobs=20,
            stop=["x"] * 16,
            logit_bias={"0": -100, 99: 100},
        ),
        LIMITS,
    )
    assert (checked.n, checked.max_tokens, checked.logprobs, checked.stop) == (128, 49, 20, ("x",))
    assert checked.sampling.logit_bias == ((0, -100.0), (99, 100.0))


def test_silence_takes_openais_defaults() -> None:
    assert check(RawParams(), LIMITS).sampling == Sampling(temperature=1.0)


def test_silence_takes_the_models_own_defaults_and_a_client_overrides_them() -> None:
    limits = Limits(vocabulary=100, context=50, sampling={"temperature": 0.6, "top_k": 20, "top_p": 0.95})
    assert check(RawParams(), limits).sampling == Sampling(temperature=0.6, top_k=20, top_p=0.95)
    assert check(RawParams(temperature=0, top_k=0, top_p=1), limits).sampling == Sampling()


def test_a_temperature_too_small_to_divide_by_is_greedy() -> None:
    assert check(RawParams(temperature=1e-300), LIMITS).sampling.temperature == 0.0


def test_top_k_of_the_whole_vocabulary_is_off() -> None:
    assert check(RawParams(top_k=100), LIMITS).sampling.top_k == 0


def test_eos_ends_a_sequence_unless_it_is_ignored() -> None:
    assert check(RawParams(stop_token_ids=[3, 3]), LIMITS).stop_token_ids == (7, 3)
    assert check(RawParams(stop_token_ids=[3], ignore_eos=True), LIMITS).stop_token_ids == (3,)


def test_the_servers_cap_is_named() -> None:
    with pytest.raises(InvalidRequest, match="allows 10"):
        check(RawParams(max_tokens=11), Limits(vocabulary=100, context=50, max_tokens=10))


def test_without_a_limit_a_request_gets_what_cap_and_context_leave() -> None:
    rows = build_submits(check(RawParams(), LIMITS), [[1] * 45], LIMITS, lambda: 0)
    assert rows[0].max_tokens == 5
    capped = Limits(vocabulary=100, context=50, max_tokens=3)
    assert build_submits(check(RawParams(), capped), [[1] * 45], capped, lambda: 0)[0].max_tokens == 3


@pytest.mark.parametrize(("prompt", "wanted"), [(50, RawParams()), (51, RawParams()), (40, RawParams(max_tokens=11))])
def test_what_does_not_fit_the_context_is_refused(prompt: int, wanted: RawParams) -> None:
    with pytest.raises(ContextLengthExceeded, match="50"):
        build_submits(check(wanted, LIMITS), [[1] * prompt], LIMITS, lambda: 0)


def test_a_prompt_and_an_answer_over_the_context_are_refused_in_openais_words() -> None:
    with pytest.raises(ContextLengthExceeded) as refusal:
        build_submits(check(RawParams(max_tokens=11), LIMITS), [[1] * 40], LIMITS, lambda: 0)
    assert refusal.value.message == (
        "This model's maximum context length is 50 tokens. However, you requested 51 tokens (40 in the messages, 11 in "
        "the completion). Please reduce the length of the messages or completion. Behind this prompt, max_tokens may "
        "be at most 10."
    )


@pytest.mark.parametrize("prompt", [[], [100], [-1], [1, 2**63]])
def test_foreign_and_missing_token_ids_are_refused(prompt: list[int]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_prompt_ids(prompt, LIMITS)
    assert caught.value.param == "prompt"


def test_one_row_for_each_choice_of_each_prompt() -> None:
    rows = build_submits(check(RawParams(n=2), LIMITS), [[1], [2]], LIMITS, lambda: 0)
    assert [row.prompt for row in rows] == [(1,), (1,), (2,), (2,)]


def test_a_seed_gives_each_choice_its_own_and_each_prompt_the_same() -> None:
    rows = build_submits(check(RawParams(n=2, seed=5), LIMITS), [[1], [2]], LIMITS, lambda: 0)
    seeds = [row.sampling.seed for row in rows]
    assert seeds[0] == 5
    assert seeds[:2] == seeds[2:]
    assert seeds[0] != seeds[1]


def test_without_a_seed_every_row_draws_one() -> None:
    draw = count(40)
    rows = build_submits(check(RawParams(n=2), LIMITS), [[1]], LIMITS, lambda: next(draw))
    assert [row.sampling.seed for row in rows] == [40, 41]


def test_every_sequence_gets_the_constraint_and_the_thinking_of_the_request() -> None:
    constraint, thinking = Constraint(kind="regex", grammar="x"), Thinking(open_ids=(1,), close_ids=(2,), budget=3)
    prepared = Prepared(constraint=constraint, thinking=thinking)
    rows = build_submits(check(RawParams(n=2), LIMITS), [[1], [2]], LIMITS, lambda: 0, prepared=prepared)
    assert [(row.constraint, row.thinking) for row in rows] == [(constraint, thinking)] * 4


def test_a_constraint_that_is_optional_needs_an_engine_that_enforces_it() -> None:
    constraint, limits = Constraint(kind="tool", grammar="x"), replace(LIMITS, grammars=False)
    for optional, budget in ((False, None), (True, None), (True, 5)):
        given = Thinking(open_ids=(1,), close_ids=(2,), budget=budget)
        prepared = Prepared(constraint=constraint, thinking=given, optional=optional)
        (row,) = build_submits(check(RawParams(), LIMITS), [[1]], LIMITS, lambda: 0, prepared=prepared)
        assert (row.constraint, row.thinking) == (constraint, given)
        (row,) = build_submits(check(RawParams(), limits), [[1]], limits, lambda: 0, prepared=prepared)
        assert row.constraint == (None if optional else constraint)
        assert row.thinking == (None if optional and budget is None else given)


def test_the_prompt_alone_may_be_all_where_the_front_allows_it() -> None:
    checked = check(RawParams(max_tokens=0, prompt_logprobs=1), LIMITS, least_tokens=0)
    (row,) = build_submits(checked, [[1] * 50], LIMITS, lambda: 0, salt="s")
    assert (row.max_tokens, row.prompt_logprobs, row.salt) == (0, 1, "s")
    with pytest.raises(ContextLengthExceeded):
        build_submits(checked, [[1] * 51], LIMITS, lambda: 0)


def test_more_scores_than_can_be_kept_are_refused() -> None:
    limits = Limits(vocabulary=100, context=50_000)
    for n, top, tokens, fits in ((1, 19, 50_000, True), (1, 20, 50_000, False), (2, 19, 25_001, False)):
        checked = check(RawParams(max_tokens=0, prompt_logprobs=top, n=n), limits, least_tokens=0)
        if fits:
            assert len(build_submits(checked, [[1] * tokens], limits, lambda: 0)) == n
            continue
        with pytest.raises(InvalidRequest, match="1000000") as caught:
            build_submits(checked, [[1] * tokens], limits, lambda: 0)
        assert caught.value.param == "prompt_logprobs"


SCALARS = sorted({name for name, _ in REFUSED} - {"stop", "stop_token_ids", "logit_bias"})

anything = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.lists(st.integers(), max_size=3)
)


@given(name=st.sampled_from(SCALARS), value=anything)
def test_any_value_is_either_taken_or_refused_with_its_name(name: str, value: Any) -> None:
    refusal = None
    try:
        build_submits(check(RawParams(**{name: value}), LIMITS), [[1]], LIMITS, lambda: 0)
    except InvalidRequest as error:
        refusal = error
    assert refusal is None or refusal.param in (name, "min_tokens", "max_tokens")
