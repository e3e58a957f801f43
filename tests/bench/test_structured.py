"""Schemas, values and checks of the structured workloads, and their figures."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.bench.test_measures import round_of, sample
from tests.bench.test_run import Notes, planned
from tests.support.aio import in_loop
from tests.support.fake_openai import fake_server
from treadle.bench.answers import check
from treadle.bench.errors import BenchError
from treadle.bench.measures import workload_figures
from treadle.bench.plan import Request, Workload
from treadle.bench.run import run
from treadle.bench.schemas import matches, random_schema, random_value
from treadle.bench.wire import AnswerReader, body_of
from treadle.bench.workloads import build

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 3},
        "n": {"type": "integer", "minimum": 0, "maximum": 9},
        "kind": {"enum": ["a", "b"]},
        "list": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "n", "kind", "list"],
    "additionalProperties": False,
}
VALUE = {"name": "abc", "n": 9, "kind": "a", "list": [True]}
FORMAT = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}
TOOLS = {"tools": [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}]}


@given(st.integers(0, 2**32), st.integers(1, 20))
def test_a_random_value_matches_its_schema(seed: int, properties: int) -> None:
    rng = random.Random(seed)
    schema = random_schema(rng, properties)
    assert len(schema["properties"]) == properties
    value = random_value(rng, schema)
    assert matches(value, schema)
    value.popitem()
    assert not matches(value, schema)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", "abcd"),
        ("name", 1),
        ("n", 10),
        ("n", -1),
        ("n", 1.5),
        ("n", True),
        ("n", "1"),
        ("kind", "c"),
        ("list", []),
        ("list", [True, True, True]),
        ("list", [1]),
        ("list", {}),
        ("more", 1),
    ],
)
def test_a_value_that_breaks_one_rule_does_not_match(field: str, value: Any) -> None:
    assert matches(VALUE, SCHEMA)
    assert matches(VALUE | {"n": 9.0}, SCHEMA), "JSON schema counts 9.0 as an integer"
    assert not matches(VALUE | {field: value}, SCHEMA)
    assert not matches([VALUE], SCHEMA)


def answer(*deltas: dict[str, Any], stream: bool = True) -> AnswerReader:
    reader = AnswerReader(stream=stream)
    for delta in deltas:
        reader.feed(b"data: " + json.dumps({"choices": [{"delta": delta}]}).encode() + b"\n\n")
    return reader


def test_the_text_of_a_schema_is_checked() -> None:
    text = json.dumps(VALUE)
    assert check(FORMAT, answer({"content": text[:7]}, {"content": text[7:]})) == (1, 1)
    assert check(FORMAT, answer({"content": text[:7]})) == (1, 0)
    assert check(FORMAT, answer({"content": '{"name": 3}'})) == (1, 0)
    assert check(FORMAT, answer()) == (1, 0)


def piece(index: int, **function: str) -> dict[str, Any]:
    return {"tool_calls": [{"index": index, "function": function}]}


def test_each_tool_call_is_checked() -> None:
    """Its name comes once, its arguments in pieces."""
    text = json.dumps(VALUE)
    one = [piece(0, name="look", arguments=""), piece(0, arguments=text[:9]), piece(0, arguments=text[9:])]
    assert check(TOOLS, answer(*one)) == (1, 1)
    assert check(TOOLS, answer(*one, piece(1, name="look", arguments="{}"))) == (2, 1)
    assert check(TOOLS, answer(piece(0, name="leap", arguments=text))) == (1, 0)
    assert check(TOOLS, answer({"content": text})) == (1, 0), "no call at all counts as a wrong one"


def test_the_calls_of_an_answer_in_one_piece_are_read() -> None:
    reader = AnswerReader(stream=False)
    calls = [{"id": f"{i}", "function": {"name": "look", "arguments": json.dumps(VALUE)}} for i in range(2)]
    reader.feed(json.dumps({"choices": [{"message": {"content": None, "tool_calls": calls}}]}).encode())
    reader.end()
    assert check(TOOLS, reader) == (2, 2)


def test_broken_tool_calls_are_not_valid_and_no_crash() -> None:
    broken: list[Any] = [3, {"function": 3}, {"index": "x", "function": {"name": 3, "arguments": {}}}]
    assert check(TOOLS, answer({"tool_calls": broken}, {"tool_calls": 7}))[1] == 0


# The workloads ----------------------------------------------------------------------------------------------------


def requests(name: str, **options: float) -> list[Request]:
    (workload,) = build(name, 0, options)
    return list(workload.requests)


def test_half_of_the_clients_of_json_have_a_schema_after_a_phase_without() -> None:
    found = requests("json", c=8, each=2)
    roles = {role: [r for r in found if r.role == role] for role in ("baseline", "companion", "free", "constrained")}
    assert [len(part) for part in roles.values()] == [8, 8, 8, 8]
    assert {r.role for r in found if r.fields} == {"constrained"}
    assert all(r.after is not None and r.after.of.startswith("baseline") for r in roles["free"][::2])


def test_tools_carry_calls_and_results_of_earlier_turns() -> None:
    first, second, third = requests("tools", agents=1, turns=3)
    assert [m.role for m in third.messages] == ["system", "user", *["assistant", "tool"] * 2]
    assert third.messages[:4] == second.messages
    assert second.messages[:2] == first.messages
    body = json.loads(body_of(third, "m", "chat", {"ignore_eos": True}))
    assert (body["tool_choice"], len(body["tools"]), "ignore_eos" in body) == ("required", 4, False)
    assert body["parallel_tool_calls"] is False, "a model that keeps calling would never end"
    call = body["messages"][2]["tool_calls"][0]
    assert call["id"] == body["messages"][3]["tool_call_id"]
    parameters = {tool["function"]["name"]: tool["function"]["parameters"] for tool in body["tools"]}
    assert matches(json.loads(call["function"]["arguments"]), parameters[call["function"]["name"]])
    assert len(parameters) == 4


@pytest.mark.parametrize("name", ["json", "tools"])
def test_the_schemas_of_two_rounds_are_alike_in_size(name: str) -> None:
    """So that rounds can be compared, though no compiled grammar of the first serves the second."""

    def shapes(workload: Workload) -> list[str]:
        return [re.sub(r"[^][{}:,]+", ".", json.dumps(r.fields)) for r in workload.requests if r.fields]

    first, second = (build(name, 0, round_=i)[0] for i in (1, 2))
    assert shapes(first) == shapes(second) != []
    assert [r.fields for r in first.requests if r.fields] != [r.fields for r in second.requests if r.fields]


# Figures ----------------------------------------------------------------------------------------------------------


def test_json_compares_the_gaps_of_free_streams_and_counts_valid_answers() -> None:
    """P16. Gaps of the time in which nothing constrained ran do not count."""
    round_ = round_of(
        sample("a", role="baseline", piece_s=[0.0, 0.1, 0.2]),
        sample("b", role="companion", end_s=1.0),
        sample("c", role="free", sent_s=2.0, piece_s=[0.0, 0.2, 0.4, 9.0]),
        sample("d", role="constrained", sent_s=2.0, end_s=0.4, finish_reason="stop", checked=1, valid=1, piece_s=[0.3]),
        sample("e", role="constrained", sent_s=2.0, end_s=0.1, finish_reason="length", checked=1, piece_s=[0.3]),
    )
    figures = workload_figures("json", round_)
    assert figures == pytest.approx(
        {
            "valid answers": 0.5,
            "ended answers": 0.5,
            "free gap p50 / unconstrained": 2.0,
            "free gap p99 / unconstrained": 2.0,
            "free rate kept": 0.5,
            "constrained TTFT p50 s": 0.3,
        }
    )


def test_tools_count_valid_calls() -> None:
    round_ = round_of(
        sample("a", role="first turn", finish_reason="tool_calls", checked=2, valid=1, piece_s=[1.0]),
        sample("b", role="later turn", finish_reason="length", checked=1, piece_s=[0.5]),
    )
    assert workload_figures("tools", round_) == pytest.approx(
        {"valid calls": 1 / 3, "ended answers": 0.5, "later turn TTFT / first": 0.5}
    )


# Runs -------------------------------------------------------------------------------------------------------------


@in_loop
async def test_text_completions_are_refused_before_anything_starts() -> None:
    plan = planned([build("json", 0)], urls=["http://127.0.0.1:1"], endpoint="completions")
    with pytest.raises(BenchError, match="'json' needs --endpoint chat"):
        await run(plan, Notes())


@in_loop
async def test_a_server_that_follows_schemas_has_all_answers_valid() -> None:
    sizes: dict[str, float] = {"c": 2, "each": 1, "tokens": 3}
    workloads = [*build("json", 0, sizes), *build("tools", 0, {"agents": 2, "every_s": 0})]
    with fake_server() as server:
        result = await run(planned([workloads], urls=(server.url,)), Notes())
        constrained = [body for body in server.asked if "response_format" in body or "tools" in body]
    figures = [workload_figures(name, rounds[0]) for name, rounds in result.rounds.items()]
    assert (figures[0]["valid answers"], figures[0]["ended answers"]) == (1.0, 1.0)
    assert (figures[1]["valid calls"], figures[1]["ended answers"]) == (1.0, 1.0)
    assert len(constrained) == 1 + 2 * 3
    assert not any("ignore_eos" in body for body in constrained)
