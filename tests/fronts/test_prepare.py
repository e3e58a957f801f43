"""What a text worker prepares of a chat: the grammar, the limits of reasoning, and the setup of the reader."""

from __future__ import annotations

import functools
import time
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from llguidance import LLMatcher, LLTokenizer

from tests.support.bytes_text import bytes_text
from tests.support.tiny import CHATML
from treadle.errors import InvalidRequest
from treadle.fronts.answer_options import AnswerOptions, OutputGrammar, tool_definitions
from treadle.fronts.prepare import prepare_chat
from treadle.fronts.prepared import Prepared
from treadle.fronts.tool_fields import read_tools
from treadle.grammar.validation import fault_of
from treadle.text import TextModel
from treadle.text.answer_formats import AnswerFormats
from treadle.text.formats.base import ToolChoice, ToolSpec
from treadle.text.formats.qwen3_coder import Qwen3Coder
from treadle.text.formats.reasoning import MARKERS

THINKS = CHATML.replace("'<|im_start|>assistant' ~ '\\n'", "'<|im_start|>assistant\\n' ~ ('<think>' if thinking)")
PLACE = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
UNSUPPORTED = {"type": "object", "properties": {"x": {"type": "array", "uniqueItems": True}}}
WEATHER, CLOCK = ToolSpec("weather", parameters=PLACE), ToolSpec("clock")
JSON = OutputGrammar("json_schema", PLACE, "response_format.json_schema.schema")


@functools.cache
def thinking_text() -> TextModel:
    return bytes_text(added=("<think>", "</think>"), chat_template=THINKS)


def prepared(options: AnswerOptions, text: TextModel | None = None, **variables: Any) -> Prepared:
    model = text or bytes_text()
    turns = [{"role": "user", "content": "hi"}]
    prompt = model.chat_prompt(turns, tools=tool_definitions(options), extra=variables)
    return prepare_chat(model, options, prompt.ids)


def test_a_chat_without_options_needs_nothing() -> None:
    assert prepared(AnswerOptions()) == Prepared()


def test_auto_is_free_until_a_call_begins() -> None:
    found = prepared(AnswerOptions((WEATHER, CLOCK)))
    assert found.constraint is not None
    assert found.reader is not None
    assert (found.constraint.triggers, found.constraint.then_free) == (("<tool_call>",), True)
    assert (found.reader.format, found.reader.tools) == ("hermes", ("weather", "clock"))


@pytest.mark.parametrize("parallel", [False, True])
def test_auto_without_parallel_calls_ends_with_the_call(parallel: bool) -> None:
    found = prepared(AnswerOptions((WEATHER,), parallel=parallel))
    assert found.constraint is not None
    assert found.constraint.then_free is parallel


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        (ToolChoice("required"), ("weather", "clock")),
        (ToolChoice("required", ("clock",)), ("clock",)),
        (ToolChoice("auto", ("clock",)), ("clock",)),
    ],
)
def test_the_grammar_has_the_tools_that_may_be_called(choice: ToolChoice, names: tuple[str, ...]) -> None:
    found = prepared(AnswerOptions((WEATHER, CLOCK), choice))
    assert found.constraint is not None
    assert found.reader is not None
    assert found.reader.tools == names
    assert [name for name in ("weather", "clock") if name in found.constraint.grammar] == list(names)
    assert bool(found.constraint.triggers) == (choice.mode == "auto")
    assert fault_of(found.constraint.grammar) is None


def test_a_named_tool_is_called_once() -> None:
    named = prepared(AnswerOptions((CLOCK,), ToolChoice("required", ("clock",), single=True)))
    assert named == prepared(AnswerOptions((CLOCK,), ToolChoice("required"), parallel=False))
    assert named != prepared(AnswerOptions((CLOCK,), ToolChoice("required")))


def test_with_none_no_tool_is_described_or_read() -> None:
    options = AnswerOptions((WEATHER,), ToolChoice("none"))
    assert prepared(options) == Prepared()
    assert tool_definitions(options) is None


def test_a_format_and_tools_are_calls_or_json() -> None:
    found = prepared(AnswerOptions((WEATHER,), output=JSON))
    assert found.constraint is not None
    assert found.constraint.triggers == ()
    assert fault_of(found.constraint.grammar) is None
    assert "<tool_call>" in found.constraint.grammar.replace("\\n", "")


def test_a_forced_call_needs_no_format() -> None:
    forced = AnswerOptions((WEATHER,), ToolChoice("required"))
    with_format = prepared(AnswerOptions((WEATHER,), ToolChoice("required"), output=JSON))
    assert with_format.constraint == prepared(forced).constraint


OUTPUTS = [
    (JSON, '{"city": "Rome"}', '{"city": 5}'),
    (OutputGrammar("json_object", None, "response_format"), '{"x": 1}', "[1]"),
    (OutputGrammar("regex", "a+b", "guided_regex"), "aab", "ba"),
    (OutputGrammar("choice", ["red", "green"], "guided_choice"), "green", "blue"),
    (OutputGrammar("lark", "start: A\nA: /[0-9]{3}/", "guided_grammar"), "123", "12x"),
]


def takes(grammar: str, answer: str) -> bool:
    """Whether a grammar takes a whole answer, byte by byte."""
    matcher = LLMatcher(LLTokenizer("byte"), grammar)
    return matcher.try_consume_tokens(list(answer.encode())) == len(answer.encode()) and matcher.is_accepting()


@pytest.mark.parametrize(("output", "good", "bad"), OUTPUTS, ids=lambda value: str(value)[:24])
def test_tools_and_any_format_are_calls_or_that_format(output: OutputGrammar, good: str, bad: str) -> None:
    found = prepared(AnswerOptions((WEATHER,), output=output))
    assert found.constraint is not None
    assert takes(found.constraint.grammar, good)
    assert not takes(found.constraint.grammar, bad)
    assert takes(found.constraint.grammar, '<tool_call>\n{"name": "weather", "arguments": {"city": "x"}}\n</tool_call>')


THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|>"
TURN = "<|start|>assistant"


@pytest.mark.parametrize("budget", [None, 9])
@pytest.mark.parametrize(("output", "good", "bad"), OUTPUTS, ids=lambda value: str(value)[:24])
@pytest.mark.parametrize("tools", [(), (WEATHER,)])
def test_with_channels_a_format_is_all_of_the_final_one(
    output: OutputGrammar, good: str, bad: str, tools: tuple[ToolSpec, ...], budget: int | None
) -> None:
    text = replace(bytes_text(), formats=AnswerFormats("harmony", by_template=True, always_read=True))
    found = prepared(AnswerOptions(tools, output=output, thinking_budget=budget), text)
    assert found.constraint is not None
    assert found.constraint.triggers == ()
    for header in ("", "<|constrain|>json", " <|constrain|>json"):
        start = f"<|channel|>final{header}<|message|>"
        for turn in ("", TURN):
            assert takes(found.constraint.grammar, turn + start + good)
            assert not takes(found.constraint.grammar, turn + start + bad)
            for thoughts in (1, 2):  # with a budget the engine follows them itself
                reasoned = turn + thoughts * (THOUGHT + TURN)
                assert takes(found.constraint.grammar, reasoned + start + good) == (budget is None)
                assert not takes(found.constraint.grammar, reasoned + start + bad)
    for answer in (good, f"Hm. {good}", f"<|channel|>commentary<|message|>{good}", f"{THOUGHT}{TURN}{good}"):
        assert not takes(found.constraint.grammar, answer)
    call = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "x"}'
    assert takes(found.constraint.grammar, call) == bool(tools)
    assert takes(found.constraint.grammar, f"{THOUGHT}{TURN}{call}") == (bool(tools) and budget is None)
    assert (found.thinking is None) == (budget is None)
    if found.thinking is not None:
        assert found.thinking.reopens
        assert text.decode(found.thinking.close_ids, skip_special_tokens=False) == "<|end|>"


CHANNELS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")


@pytest.mark.parametrize("tools", [(), (WEATHER,)])
@pytest.mark.parametrize(
    ("begun", "good", "bad"),
    [
        ("<|channel|>final<|message|>", "ab", "<|channel|>final<|message|>ab"),
        ("<|channel|>final<|message|>a", "ab", "b"),
        ("<|channel|>analysis<|message|>Hm", f".<|end|>{TURN}<|channel|>final<|message|>ab", "ab"),
        ("<|channel|>analysis<|message|>", f"<|end|>{TURN}{THOUGHT}{TURN}<|channel|>final<|message|>ab", THOUGHT),
        (f"{THOUGHT}{TURN}", f"{THOUGHT}{TURN}<|channel|>final<|message|>ab", "ab"),
    ],
)
def test_a_format_goes_on_from_the_channel_in_which_the_prompt_ends(
    begun: str, good: str, bad: str, tools: tuple[ToolSpec, ...]
) -> None:
    text = bytes_text(special=CHANNELS)
    text = replace(text, formats=AnswerFormats("harmony", by_template=True, always_read=True))
    prompt = text.encode(f"<|start|>user<|message|>hi<|end|>{TURN}{begun}", add_special_tokens=False)
    output = OutputGrammar("regex", "a+b", "guided_regex")
    found = prepare_chat(text, AnswerOptions(tools, output=output), prompt)
    assert found.constraint is not None
    assert takes_tokens(text, found.constraint.grammar, good)
    assert not takes_tokens(text, found.constraint.grammar, bad)


def takes_tokens(text: TextModel, grammar: str, answer: str) -> bool:
    """Whether a grammar takes a whole answer, with its special tokens as tokens."""
    tokenizer = LLTokenizer((text.folder / "tokenizer.json").read_text(), eos_token=list(text.eos_token_ids))
    matcher, ids = LLMatcher(tokenizer, grammar), list(text.encode(answer, add_special_tokens=False))
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize("budget", [None, 9])
def test_a_forced_call_has_no_reasoning_beside_that_of_a_budget(budget: int | None) -> None:
    text = replace(bytes_text(), formats=AnswerFormats("harmony", by_template=True, always_read=True))
    found = prepared(AnswerOptions((CLOCK,), ToolChoice("required"), thinking_budget=budget), text)
    assert found.constraint is not None
    called = "<|start|>assistant<|channel|>commentary to=functions.clock <|constrain|>json<|message|>{}"
    assert takes(found.constraint.grammar, called)
    assert takes(found.constraint.grammar, THOUGHT + called) == (budget is None)
    assert (found.thinking is None) == (budget is None)


def test_a_schema_that_no_grammar_holds_is_loose_unless_it_is_strict() -> None:
    loose = ToolSpec("loose", parameters=UNSUPPORTED)
    found = prepared(AnswerOptions((WEATHER, loose), ToolChoice("required")))
    assert list(found.loose_tools) == ["loose"]
    assert "uniqueItems" in found.loose_tools["loose"]
    with pytest.raises(InvalidRequest) as caught:
        prepared(AnswerOptions((WEATHER, ToolSpec("strict", parameters=UNSUPPORTED, strict=True))))
    assert str(caught.value.param).startswith("tools[1].function.parameters.properties.x")
    with pytest.raises(InvalidRequest) as caught:
        prepared(AnswerOptions((ToolSpec("f", parameters=UNSUPPORTED, strict=True),), tools_param="functions"))
    assert str(caught.value.param).startswith("functions[0].parameters.properties.x")


def test_the_reason_of_a_loose_tool_is_the_same_at_each_place() -> None:
    """Clients send the same tools with each request, in varying lists: the reason is logged once."""
    loose = ToolSpec("loose", parameters=UNSUPPORTED)
    first, second = (prepared(AnswerOptions(tools)).loose_tools for tools in ((loose,), (WEATHER, CLOCK, loose)))
    assert first == second
    assert first["loose"].startswith("properties.x.uniqueItems is not supported")


def test_a_record_of_zod_is_enforced() -> None:
    """Claude Code describes the metadata of its tasks so."""
    record = {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {}}
    tool = ToolSpec("TaskCreate", parameters={"type": "object", "properties": {"metadata": record}})
    found = prepared(AnswerOptions((tool,), ToolChoice("required")))
    assert found.loose_tools == {}
    assert found.constraint is not None
    call = '<tool_call>\n{"name": "TaskCreate", "arguments": {"metadata": %s}}\n</tool_call>'
    assert takes(found.constraint.grammar, call % '{"a": [1], "b": null}')
    assert not takes(found.constraint.grammar, call % '"a"')


def test_the_names_of_loose_parameters_stay() -> None:
    """A format that writes each argument by its name could write none without them."""
    found = prepared(AnswerOptions((ToolSpec("loose", parameters=UNSUPPORTED),), ToolChoice("required")))
    assert found.constraint is not None
    assert '"x"' in found.constraint.grammar


def in_format(name: str) -> TextModel:
    return replace(bytes_text(), formats=AnswerFormats(name, by_template=True))


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "llama_pythonic", "gemma4"])
def test_references_to_a_property_and_to_the_tool_itself_are_followed(name: str) -> None:
    """zod-to-json-schema writes them for what it has seen before."""
    parameters = {
        "type": "object",
        "properties": {
            "billing": PLACE,
            "more": {"type": "array", "items": {"$ref": "#/properties/billing"}},
            "within": {"type": "array", "items": {"$ref": "#"}},
        },
        "required": ["more"],
    }
    for strict in (False, True):
        tool = ToolSpec("f", parameters=parameters, strict=strict)
        found = prepared(AnswerOptions((tool,), ToolChoice("required")), in_format(name))
        assert found.loose_tools == {}
        assert found.constraint is not None
        assert fault_of(found.constraint.grammar) is None


def test_what_a_format_can_not_hold_is_refused_by_its_place_for_strict_tools() -> None:
    text = in_format("qwen3_coder")
    many = {"allOf": [{"anyOf": [{"type": "string", "maxLength": n} for n in range(9)]} for _ in range(3)]}
    for properties, place in (({"a": many}, "a"), ({"a>b": {"type": "string"}}, "['a>b']")):
        parameters = {"type": "object", "properties": {**properties, "n": {"type": "integer"}}}
        loose = prepared(AnswerOptions((WEATHER, ToolSpec("f", parameters=parameters)), ToolChoice("required")), text)
        assert list(loose.loose_tools) == ["f"]
        assert loose.constraint is not None
        assert "<parameter=n>" in loose.constraint.grammar
        assert fault_of(loose.constraint.grammar) is None
        with pytest.raises(InvalidRequest) as caught:
            prepared(AnswerOptions((WEATHER, ToolSpec("f", parameters=parameters, strict=True))), text)
        assert caught.value.param == f"tools[1].function.parameters.properties{place if '[' in place else '.' + place}"
        assert caught.value.message.startswith(caught.value.param)


def test_grammars_of_tools_are_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    text, built = in_format("qwen3_coder"), list[int]()
    calls = Qwen3Coder.calls
    monkeypatch.setattr(
        Qwen3Coder,
        "calls",
        lambda self, tools, *args, **more: built.append(len(tools)) or calls(self, tools, *args, **more),
    )
    free = ToolSpec("f", parameters={"type": "object", "properties": {"s": {"type": "string", "maxLength": 100}}})
    found = prepared(AnswerOptions((WEATHER, free), ToolChoice("required")), text)
    assert built == [2]
    assert found.loose_tools == {
        "f": "s has a length of over 16 characters, which texts in the model's format can't be held to"
    }


def test_the_reader_knows_whether_calls_are_forced() -> None:
    for choice, forced in ((ToolChoice("required"), True), (ToolChoice(), False)):
        found = prepared(AnswerOptions((WEATHER,), choice))
        assert found.reader is not None
        assert found.reader.forced is forced


def test_a_call_by_choice_needs_no_grammar_unless_a_tool_is_strict() -> None:
    assert prepared(AnswerOptions((WEATHER,))).optional
    assert not prepared(AnswerOptions((WEATHER,), ToolChoice("required"))).optional
    assert not prepared(AnswerOptions((ToolSpec("strict", parameters=PLACE, strict=True),))).optional
    assert not prepared(AnswerOptions((WEATHER,), output=JSON)).optional


def test_calls_may_be_closed_at_the_limit() -> None:
    found = prepared(AnswerOptions((WEATHER,), ToolChoice("required"), close_at_limit=True))
    assert found.constraint is not None
    assert found.constraint.close_at_limit


def test_the_reader_knows_the_types_of_parameters() -> None:
    """Formats that write no JSON need them, the others do not."""
    for name, types in (("qwen3_coder", {"weather": {"city": ("string",)}, "clock": {}}), ("hermes", {})):
        text = replace(bytes_text(), formats=AnswerFormats(name, by_template=True))
        found = prepared(AnswerOptions((WEATHER, CLOCK)), text)
        assert found.reader is not None
        assert (found.reader.format, found.reader.types) == (name, types)


def test_a_strict_tool_that_may_not_be_called_is_not_looked_at() -> None:
    strict = ToolSpec("strict", parameters=UNSUPPORTED, strict=True)
    assert prepared(AnswerOptions((WEATHER, strict), ToolChoice("required", ("weather",)))).constraint is not None


def test_as_many_tools_as_a_request_may_have_are_prepared_in_a_second() -> None:
    tools = read_tools(
        [
            {"type": "function", "function": {"name": f"f{i}", "parameters": {**PLACE, "title": str(i)}}}
            for i in range(1024)
        ]
    )
    began = time.process_time()
    found = prepared(AnswerOptions(tools))
    assert found.loose_tools == {}
    assert time.process_time() - began < 3.0


# Reasoning ------------------------------------------------------------------------------------------------------


def test_a_model_that_reasons_is_always_read() -> None:
    found = prepared(AnswerOptions(), thinking_text())
    assert found.reader is not None
    assert (found.reader.format, found.reader.reasoning, found.reader.opened) == (None, MARKERS["think"], False)
    assert (found.constraint, found.thinking) == (None, None)


def test_a_prompt_that_opens_the_reasoning_is_seen() -> None:
    found = prepared(AnswerOptions(thinking_budget=5), thinking_text(), thinking=True)
    assert found.reader is not None
    assert found.reader.opened
    assert found.thinking is not None
    assert (found.thinking.opened, found.thinking.budget) == (True, 5)
    model = thinking_text()
    assert model.decode(found.thinking.open_ids, skip_special_tokens=False) == "<think>"
    assert model.decode(found.thinking.close_ids, skip_special_tokens=False) == "</think>"


def test_a_grammar_begins_behind_the_reasoning() -> None:
    found = prepared(AnswerOptions(output=JSON), thinking_text())
    assert found.thinking is not None
    assert (found.thinking.opened, found.thinking.budget) == (False, None)


def test_a_budget_is_nothing_to_a_model_that_does_not_reason() -> None:
    assert prepared(AnswerOptions(thinking_budget=5)) == Prepared()


def test_reasoning_that_the_prompt_has_ended_is_over() -> None:
    model = thinking_text()
    prompt = model.encode("user: hi\nassistant: <think>\n\n</think>\n\n")
    found = prepare_chat(model, AnswerOptions(output=JSON), prompt)
    assert found.constraint is not None
    assert found.thinking is None


@pytest.mark.parametrize(
    ("marker", "types"),
    [("<arg_key>", {"weather": {"city": ("string",)}, "clock": {}}), ("<tool_call>", {})],
)
def test_the_reader_knows_the_types_of_arguments_that_are_texts(marker: str, types: dict[str, Any]) -> None:
    loose = msgspec.structs.replace(WEATHER, parameters={**PLACE, "not": {"required": ["x"]}})
    text = bytes_text(
        chat_template=CHATML + '{%- for tool in tools or [] %}{{ tool | tojson }}{"name": ' + marker + "{% endfor %}"
    )
    found = prepared(AnswerOptions((loose, CLOCK)), text)
    assert found.reader is not None
    assert found.reader.types == types
