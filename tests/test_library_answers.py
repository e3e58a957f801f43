"""treadle.Engine: structured output, tool calls and reasoning as Python arguments and values, with scripted answers."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pydantic
import pytest

from tests.fronts.runner import FrontRunner
from tests.support.aio import in_loop
from tests.support.answers import Answers
from tests.support.tiny import CHATML, make_tiny
from treadle import Completion, Engine, ToolCall
from treadle.compose.owner import OwnerSpec
from treadle.errors import InvalidRequest
from treadle.runner.base import Progress, Runner, RunnerFactory
from treadle.text import TextModel
from treadle.text.events import CallArguments, CallEnd, CallStart, Reasoning, Text

TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
TEMPLATE = (
    "{%- if tools %}{{- 'Tools in <tool_call>: ' ~ tools | tojson ~ '\\n' }}{% endif -%}"
    + CHATML
    + "{%- if enable_thinking is defined and enable_thinking %}{{- '<think>\\n' }}{% endif -%}{# </think> #}"
)
HI: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


class Person(pydantic.BaseModel):
    name: str
    age: int

    @pydantic.field_validator("age")
    @classmethod
    def _born(cls, value: int) -> int:
        if value < 0:
            raise ValueError("not born yet")
        return value


@dataclass
class Point:
    x: int
    y: int


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("library") / "tiny", added=TOKENS, chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def text(folder: Path) -> TextModel:
    return TextModel.load(folder)


@contextlib.asynccontextmanager
async def engine_of(folder: Path, answers: Answers) -> AsyncIterator[Engine]:
    """A started engine that gives `answers`."""
    model = TextModel.load(folder)

    def factory(spec: OwnerSpec) -> RunnerFactory:
        def build(progress: Progress) -> Runner:
            return FrontRunner(answers, vocabulary=model.vocabulary, context=model.context)

        return build

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("treadle.compose.engine.runner_factory", factory)
        async with Engine(folder) as engine:
            yield engine


async def answered(folder: Path, answer: str, prompt: Any = HI, **arguments: Any) -> tuple[Completion, Any]:
    """The completion of one call that is given this answer, and its Submit."""
    answers = Answers(TextModel.load(folder), answer, steps=(3, 1))
    async with engine_of(folder, answers) as engine:
        done = await engine.generate(prompt, max_tokens=200, **arguments)
    return done, answers.requests[0]


@pytest.mark.parametrize("prompt", [HI, "Hi", [72, 105]])
@in_loop
async def test_a_call_says_what_it_expects_or_wants_no_drafts(folder: Path, text: TextModel, prompt: Any) -> None:
    done, request = await answered(folder, "the file", prompt, prediction="the file.", speculate=False)
    assert done.text == "the file"
    assert request.prediction == tuple(text.encode("the file.", add_special_tokens=False))
    assert request.speculate is False


@pytest.mark.parametrize(
    ("arguments", "param", "words"),
    [
        ({"prediction": 5}, "prediction", "prediction is 5: it must be a text"),
        ({"prediction": "\ud800"}, "prediction", "half of a surrogate pair"),
        ({"prediction": {"type": "text"}}, "prediction.type", "content"),
        ({"speculate": "no"}, "speculate", "speculate is 'no'"),
    ],
)
@in_loop
async def test_another_expectation_is_refused(folder: Path, arguments: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        await answered(folder, "x", **arguments)
    assert caught.value.param == param


@pytest.mark.parametrize("prompt", [HI, "Hi", [72, 105]])
@pytest.mark.parametrize(
    ("json_schema", "answer", "value"),
    [
        (Person, '{"name": "Ada", "age": 36}', Person(name="Ada", age=36)),
        (Point, '{"x": 1, "y": 2}', Point(1, 2)),
        (list[int], "[1, 2]", [1, 2]),
        (Person.model_json_schema(), '{"name": "Ada", "age": 36}', {"name": "Ada", "age": 36}),
        ('{"type": "integer"}', "3", 3),
    ],
)
@in_loop
async def test_an_answer_of_a_schema_is_parsed(
    folder: Path, prompt: Any, json_schema: Any, answer: str, value: Any
) -> None:
    done, request = await answered(folder, answer, prompt, json_schema=json_schema)
    assert done.parsed == value
    assert (done.text, done.finish_reason) == (answer, "stop")
    assert request.constraint.kind == "json_schema"
    assert not request.constraint.close_at_limit


@pytest.mark.parametrize(
    ("arguments", "kind", "answer", "value"),
    [
        ({"json_object": True}, "json_object", '{"a": [1]}', {"a": [1]}),
        ({"regex": "[ab]+"}, "regex", "ab", None),
        ({"choice": ["red", "green"]}, "choice", "red", None),
        ({"choice": ("red", "green")}, "choice", "red", None),
        ({"grammar": 'start: "yes" | "no"'}, "lark", "no", None),
    ],
)
@in_loop
async def test_each_form_of_an_answer_has_an_argument(
    folder: Path, arguments: dict[str, Any], kind: str, answer: str, value: Any
) -> None:
    done, request = await answered(folder, answer, "Hi", close_at_limit=True, **arguments)
    assert (done.text, done.parsed) == (answer, value)
    assert (request.constraint.kind, request.constraint.close_at_limit) == (kind, True)


@in_loop
async def test_an_answer_that_was_cut_is_not_parsed(folder: Path, text: TextModel) -> None:
    async with engine_of(folder, Answers(text, '{"name": "Ada", "age": 36}')) as engine:
        done = await engine.generate("Hi", json_schema=Person, max_tokens=8)
    assert (done.finish_reason, done.parsed) == ("length", None)


@in_loop
async def test_a_validator_of_the_type_may_refuse_what_its_schema_allows(folder: Path) -> None:
    done, _ = await answered(folder, '{"name": "Ada", "age": -1}', json_schema=Person)
    with pytest.raises(pydantic.ValidationError, match="not born yet"):
        _ = done.parsed


@in_loop
async def test_tool_calls_are_values_and_go_back_as_messages(folder: Path, text: TextModel) -> None:
    answers = Answers(text, f"Let me see. {CALL}", "It is sunny in Oslo.")
    async with engine_of(folder, answers) as engine:
        done = await engine.generate(HI, tools=[WEATHER], max_tokens=200)
        assert done.text == "Let me see."
        assert (done.finish_reason, done.parsed) == ("tool_calls", None)
        assert done.tool_calls == (ToolCall("weather", '{"city": "Oslo"}'),)
        (call,) = done.tool_calls
        assert call.parsed == {"city": "Oslo"}
        result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
        then = await engine.generate([*HI, done.message(), result], tools=[WEATHER], max_tokens=200)
        assert (then.text, then.tool_calls, then.finish_reason) == ("It is sunny in Oslo.", (), "stop")
    first, second = (text.decode(request.prompt, skip_special_tokens=False) for request in answers.requests)
    assert "weather" in first
    assert "Oslo" in second
    assert "sunny" in second


@pytest.mark.parametrize(
    ("choice", "free"),
    [("auto", True), ("required", False), ({"type": "function", "function": {"name": "weather"}}, False)],
)
@in_loop
async def test_a_forced_call_is_constrained_from_the_start(folder: Path, choice: Any, free: bool) -> None:
    done, request = await answered(folder, CALL, tools=[WEATHER], tool_choice=choice)
    assert [call.name for call in done.tool_calls] == ["weather"]
    assert bool(request.constraint.triggers) is free
    assert not request.constraint.close_at_limit


@in_loop
async def test_calls_are_completed_at_the_limit_where_that_is_asked_for(folder: Path) -> None:
    _, request = await answered(folder, CALL, tools=[WEATHER], close_at_limit=True)
    assert request.constraint.close_at_limit


@in_loop
async def test_tools_that_may_not_be_called_are_left_out(folder: Path) -> None:
    _, request = await answered(folder, "No.", tools=[WEATHER], tool_choice="none")
    assert request.constraint is None
    assert b"weather" not in bytes(token for token in request.prompt if token < 256)


@in_loop
async def test_reasoning_stands_apart_from_the_text(folder: Path, text: TextModel) -> None:
    async with engine_of(folder, Answers(text, "<think>2 + 2</think>4")) as engine:
        done = await engine.generate(HI, max_tokens=40)
        assert (done.reasoning, done.text, done.finish_reason) == ("2 + 2", "4", "stop")
        assert done.message() == {"role": "assistant", "content": "4", "reasoning_content": "2 + 2"}
        assert "".join([piece async for piece in engine.stream(HI, max_tokens=40)]) == "4"


@in_loop
async def test_events_come_in_order(folder: Path, text: TextModel) -> None:
    async with engine_of(folder, Answers(text, f"<think>hm</think>Well. {CALL}")) as engine:
        events = [event async for event in engine.events(HI, tools=[WEATHER], max_tokens=200)]
        plain = [event async for event in engine.events("Hi", max_tokens=200)]
    assert [type(event) for i, event in enumerate(events) if not i or type(event) is not type(events[i - 1])] == [
        Reasoning,
        Text,
        CallStart,
        CallArguments,
        CallEnd,
    ]
    arguments = "".join(event.delta for event in events if isinstance(event, CallArguments))
    assert json.loads(arguments) == {"city": "Oslo"}
    assert "".join(event.text for event in plain if isinstance(event, Text)) == f"<think>hm</think>Well. {CALL}"


@in_loop
async def test_a_budget_and_a_switch_of_reasoning_reach_engine_and_template(folder: Path) -> None:
    done, request = await answered(folder, "hm</think>Yes", enable_thinking=True, thinking_budget=7)
    assert (done.reasoning, done.text) == ("hm", "Yes")
    assert (request.thinking.opened, request.thinking.budget) == (True, 7)
    _, request = await answered(folder, "Yes", chat_template_kwargs={"enable_thinking": True}, json_object=True)
    assert request.thinking.opened
    _, request = await answered(folder, "Yes", enable_thinking=False)
    assert not bytes(token for token in request.prompt if token < 256).endswith(b"think")


@pytest.mark.parametrize("prompt", ["Hi<think>", [72, 105, 261]])
@in_loop
async def test_a_grammar_begins_behind_reasoning_that_the_prompt_opened(folder: Path, prompt: Any) -> None:
    done, request = await answered(folder, "hm</think>{}", prompt, json_object=True)
    assert (request.thinking.opened, request.thinking.close_ids) == (True, (262,))
    assert done.text == "hm</think>{}"


class NoSchema:
    pass


@pytest.mark.parametrize(
    ("prompt", "arguments", "param", "says"),
    [
        (HI, {"json_schema": Person, "regex": "a"}, "regex", "json_schema and regex both give the answer's form"),
        (HI, {"json_schema": {"type": "integr"}}, "json_schema.type", "json_schema.type must be one of"),
        (HI, {"json_schema": NoSchema}, "json_schema", "which has no JSON Schema"),
        (HI, {"json_schema": 5}, "json_schema", "json_schema is 5"),
        (HI, {"json_object": "yes"}, "json_object", "json_object is 'yes': it must be True or False"),
        (HI, {"close_at_limit": 1}, "close_at_limit", "it must be True or False"),
        (HI, {"choice": "red"}, "choice", "choice must be a list"),
        (HI, {"regex": "["}, "regex", "regex"),
        (HI, {"tools": [WEATHER, WEATHER]}, "tools[1].function.name", "an earlier tool's"),
        (HI, {"tools": [WEATHER], "tool_choice": "weather"}, "tool_choice", "tool_choice is 'weather'"),
        (HI, {"tool_choice": "required"}, "tool_choice", "there are no tools"),
        (HI, {"thinking_budget": -3}, "thinking_budget", "thinking_budget is -3"),
        (HI, {"enable_thinking": "yes"}, "enable_thinking", "it must be True or False"),
        (HI, {"chat_template_kwargs": 3}, "chat_template_kwargs", "must be a dict"),
        (HI, {"tool": [WEATHER]}, "tool", "did you mean 'tools'"),
        ("Hi", {"tools": [WEATHER]}, "tools", "tools needs a prompt of chat messages"),
        ([72], {"enable_thinking": True}, "enable_thinking", "needs a prompt of chat messages"),
    ],
)
@in_loop
async def test_wrong_arguments_are_refused_with_their_place(
    folder: Path, text: TextModel, prompt: Any, arguments: dict[str, Any], param: str, says: str
) -> None:
    async with engine_of(folder, Answers(text, "x")) as engine:
        with pytest.raises(InvalidRequest) as refused:
            await engine.generate(prompt, **arguments)
        assert refused.value.param == param
        assert says in refused.value.message
        assert engine.status()["admission"]["rows"] == 0
