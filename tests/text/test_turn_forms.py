"""Conversations with tools and several system turns, in the forms that templates of several families write."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny import CHATML, make_tiny
from treadle.errors import InvalidRequest
from treadle.text import ChatTemplate, TextModel
from treadle.text.formats.registry import find
from treadle.text.past_calls import PastCallWriter
from treadle.text.template_traits import ArgumentsForm
from treadle.text.turn_forms import forms

HEAD = "{{ '<|im_start|>' ~ m.role ~ '\\n' }}"
END = "{{ '<|im_end|>\\n' }}"
ASK = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
CALLS = "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }} ARGUMENTS</tool_call>{% endfor %}"
TOOLS = "{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools>{% endif %}"


def with_arguments(written: str) -> str:
    calls = CALLS.replace("ARGUMENTS", written)
    return f"{TOOLS}{{% for m in messages %}}{HEAD}{{{{ m.content }}}}{calls}{END}{{% endfor %}}{ASK}"


QWEN3 = with_arguments(
    "{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}"
    "{{ c.function.arguments | tojson }}{% endif %}"
)
TOJSON = with_arguments("{{ c.function.arguments | tojson }}")
ITEMS = with_arguments("{% for k, v in c.function.arguments.items() %}<{{ k }}>{{ v }}</{{ k }}>{% endfor %}")
JOINED = with_arguments("{{ '[' + c.function.arguments + ']' }}")
ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    f"{HEAD}{{{{ m.content }}}}{END}{{% endfor %}}{ASK}"
)
HOISTING = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }};{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role != 'system' %}"
    f"{HEAD}{{{{ m.content }}}}{END}{{% endif %}}{{% endfor %}}{ASK}"
)
FIRST_SYSTEM_ONLY = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('system must come first') }}{% endif %}"
    f"{HEAD}{{{{ m.content }}}}{END}{{% endfor %}}{ASK}"
)
MISTRAL = (
    "{% set ns = namespace(i=0) %}{% for m in messages %}"
    "{% if m.role != 'tool' and not m.tool_calls %}"
    "{% if (m.role == 'user') != (ns.i % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set ns.i = ns.i + 1 %}{% endif %}"
    "{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}{{ raise_exception('ids of 9') }}{% endif %}"
    "[CALL]{{ c.function | tojson }}{{ c.id }}{% endfor %}"
    "{% if m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}{{ raise_exception('ids of 9') }}{% endif %}"
    "[RESULT]{{ m.content }}{{ m.tool_call_id }}{% elif m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
CALLS_FIRST = (
    "{% set ns = namespace(called=false) %}{% for m in messages %}"
    "{% if m.role == 'tool' and not ns.called %}{{ raise_exception('no call') }}{% endif %}"
    f"{{% if m.tool_calls %}}{{% set ns.called = true %}}{{% endif %}}{HEAD}{{{{ m.content }}}}"
    + CALLS.replace("ARGUMENTS", "{{ c.function.arguments | tojson }}")
    + f"{END}{{% endfor %}}{ASK}"
)

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def call(arguments: str = '{"city": "Rome"}', call_id: str = "call_1") -> dict[str, Any]:
    function = {"name": "weather", "arguments": arguments}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": call_id, "type": "function", "function": function}],
    }


def result(text: str, call_id: str | None = "call_1") -> dict[str, Any]:
    return {"role": "tool", "content": text} | ({} if call_id is None else {"tool_call_id": call_id})


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, name="test", special_tokens={})


def written(source: str, turns: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> str:
    """The first form that the template takes."""
    made = template(source)
    for form in forms(turns, tools, made.traits, PastCallWriter().write):
        try:
            return made.render(form, tools=tools if made.traits.tools else None)
        except InvalidRequest:
            continue
    raise AssertionError("every form was refused")


# Traits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "form"),
    [
        (QWEN3, ArgumentsForm.EITHER),
        (TOJSON, ArgumentsForm.EITHER),
        (ITEMS, ArgumentsForm.OBJECT),
        (JOINED, ArgumentsForm.TEXT),
        (CHATML, None),
        (MISTRAL, ArgumentsForm.EITHER),
    ],
)
def test_the_form_of_arguments_is_found(source: str, form: ArgumentsForm | None) -> None:
    assert template(source).traits.arguments is form


@pytest.mark.parametrize(("source", "takes"), [(QWEN3, True), (CHATML, False), (MISTRAL, False)])
def test_whether_a_template_writes_tools_is_found(source: str, takes: bool) -> None:
    assert template(source).traits.tools is takes


@pytest.mark.parametrize(
    ("source", "found"),
    [
        (CHATML, (True, True, True)),
        (ALTERNATING, (False, False, False)),
        (HOISTING, (True, True, False)),
        (FIRST_SYSTEM_ONLY, (True, False, False)),
    ],
)
def test_the_places_of_system_turns_are_found(source: str, found: tuple[bool, bool, bool]) -> None:
    traits = template(source).traits
    assert (traits.system, traits.several_systems, traits.later_systems) == found


def test_a_template_that_writes_nothing_keeps_the_defaults() -> None:
    assert template("{{ raise_exception('no') }}").traits.system


# Calls and results ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "form"),
    [
        (QWEN3, '<tool_call>weather {"city": "Rome"}</tool_call>'),
        (TOJSON, '<tool_call>weather {"city": "Rome"}</tool_call>'),
        (ITEMS, "<tool_call>weather <city>Rome</city></tool_call>"),
        (JOINED, '<tool_call>weather [{"city": "Rome"}]</tool_call>'),
        (CHATML, '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'),
    ],
)
def test_arguments_are_written_as_the_template_takes_them(source: str, form: str) -> None:
    assert form in written(source, [user("a"), call(), result("b"), user("c")])


@pytest.mark.parametrize("source", [QWEN3, TOJSON, ITEMS, JOINED, CHATML])
@pytest.mark.parametrize("text", ["{'city': Rome", "[1]", "3"])
def test_arguments_that_are_no_json_object_are_passed_on_as_text(source: str, text: str) -> None:
    assert text in written(source, [user("a"), call(text), result("b")])


@pytest.mark.parametrize("source", [QWEN3, TOJSON, JOINED, CHATML])
def test_a_call_without_arguments_has_an_empty_object(source: str) -> None:
    assert "{}" in written(source, [user("a"), call(""), result("b")])


def test_arguments_nested_too_deeply_to_be_read_stay_text() -> None:
    deep = '{"a":' * 5000 + "1" + "}" * 5000
    assert deep[:20] in written(JOINED, [user("a"), call(deep)])
    assert forms_of(CHATML, [user("a"), call(deep)])[0][1]["content"].startswith("<tool_call>")


def forms_of(source: str, turns: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    return list(forms(turns, None, template(source).traits, PastCallWriter().write))


def test_ids_are_shortened_alike_in_call_and_result() -> None:
    text = written(MISTRAL, [user("a"), call(call_id="call_very_long"), result("r", "call_very_long"), said("b")])
    given = text[text.index("}}") + 2 :][:9]
    assert given.isalnum()
    assert f"[RESULT]r{given}" in text
    assert "abcABC123" in written(MISTRAL, [user("a"), call(call_id="abcABC123"), result("r", "abcABC123")])


def test_a_result_gets_the_name_of_its_function() -> None:
    turns = forms_of(QWEN3, [user("a"), call(), result("b"), result("c", "other")])[0]
    assert [turn.get("name") for turn in turns] == [None, None, "weather", None]


def test_results_of_parallel_calls_are_one_turn_where_the_template_has_none() -> None:
    turns = forms_of(CHATML, [user("a"), call(), result("b"), result("c"), user("d")])[0]
    assert [turn["role"] for turn in turns] == ["user", "assistant", "user", "user"]
    assert turns[2]["content"] == "<tool_response>\nb\n</tool_response>\n<tool_response>\nc\n</tool_response>"


@pytest.mark.parametrize("orphan", [result("r"), result("r", None)])
def test_a_result_without_a_call_keeps_its_place_as_text(orphan: dict[str, Any]) -> None:
    text = written(CALLS_FIRST, [user("first"), orphan, said("last")])
    assert text.index("first") < text.index("<tool_response>\nr\n") < text.index("last")


SINGLE_CALLS = (
    "{% for m in messages %}{% if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('one call') }}"
    "{% endif %}{% if m.tool_calls and m.content and m.reasoning_content %}{{ raise_exception('both') }}{% endif %}"
    f"{HEAD}{{{{ m.reasoning_content }}}}{{{{ m.content }}}}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}"
    f"{END}{{% endfor %}}{ASK}"
)


def several(*ids: str, **more: Any) -> dict[str, Any]:
    calls = [{**call(call_id=one)["tool_calls"][0], "function": {"name": f"f{one}", "arguments": "{}"}} for one in ids]
    return {"role": "assistant", "content": "", "tool_calls": calls, **more}


@pytest.mark.parametrize(
    ("results", "order"),
    [
        ([result("r1", "1"), result("r2", "2")], ["f1", "r1", "f2", "r2"]),
        ([result("r2", "2"), result("r1", "1")], ["f1", "r1", "f2", "r2"]),
        ([result("r1", None), result("r2", None), result("r3", None)], ["f1", "r1", "f2", "r2", "r3"]),
        ([result("r1", "1"), result("rx", "x")], ["f1", "r1", "f2", "rx"]),
        ([result("r2", "2")], ["f1", "f2", "r2"]),
        ([], ["f1", "f2"]),
    ],
)
def test_several_calls_are_turns_of_their_own_where_a_template_takes_one(results: list[Any], order: list[str]) -> None:
    text = written(SINGLE_CALLS, [user("a"), several("1", "2"), *results, said("finally"), several("3"), user("b")])
    places = [text.index(word) for word in (*order, "finally", "f3")]
    assert places == sorted(places)


def test_text_is_part_of_the_reasoning_where_a_template_takes_one_of_them() -> None:
    turn = several("1", content="I look.", reasoning_content="Hm.")
    assert "Hm.\n\nI look.f1 {}" in written(SINGLE_CALLS, [user("a"), turn, result("r", "1")])
    assert "I look.<tool_call>f1" in written(QWEN3, [user("a"), turn, result("r", "1")])


# Tools ----------------------------------------------------------------------------------------------------------


def test_tools_go_to_a_template_that_writes_them() -> None:
    text = written(QWEN3, [user("a")], [TOOL])
    assert text.startswith(f"<tools>{json.dumps(TOOL)}</tools>")


@pytest.mark.parametrize("source", [CHATML, ALTERNATING])
@pytest.mark.parametrize("before", [[], [system("Be brief.")]])
def test_tools_are_described_in_the_first_system_turn_for_other_templates(source: str, before: list[Any]) -> None:
    text = written(source, [*before, user("What is it?")], [TOOL])
    assert json.dumps(TOOL["function"]) in text
    assert text.index("<tool_call>") < text.index("What is it?")
    assert ("Be brief." in text) == bool(before)


def test_tools_go_into_the_system_turn_of_a_template_that_reads_them_there() -> None:
    source = f"{{% for m in messages %}}{HEAD}{{{{ m.content ~ (m.tools or '') }}}}{END}{{% endfor %}}{ASK}"
    listed = json.dumps([TOOL["function"]])
    assert f"system\n{listed}" in written(source, [user("a")], [TOOL])
    assert f"system\nBe brief.{listed}" in written(source, [system("Be brief."), user("a")], [TOOL])


# System turns ---------------------------------------------------------------------------------------------------

SOURCES = {
    "chatml": CHATML,
    "alternating": ALTERNATING,
    "hoisting": HOISTING,
    "first": FIRST_SYSTEM_ONLY,
    "mistral": MISTRAL,
    "qwen3": QWEN3,
}
PLACES: dict[str, list[dict[str, Any]]] = {
    "first": [system("one"), user("two")],
    "several": [system("one"), system("two"), user("three")],
    "between": [user("one"), said("two"), system("three"), user("four")],
    "behind": [user("one"), said("two"), user("three"), system("four")],
    "both": [system("one"), user("two"), said("three"), system("four"), system("five"), user("six")],
    "alone": [system("one")],
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
@pytest.mark.parametrize("turns", PLACES.values(), ids=PLACES)
def test_system_turns_keep_their_places(source: str, turns: list[dict[str, Any]]) -> None:
    text = written(source, turns)
    places = [text.index(turn["content"]) for turn in turns]
    assert places == sorted(places)


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_a_system_turn_behind_a_result_stays_there(source: str) -> None:
    """Claude Code adds one after each result: were it moved, no cached prefix would fit."""
    text = written(source, [user("one"), call(), result("two"), system("three")])
    assert text.index("one") < text.index("two") < text.index("three")


# Neighbours of one role -----------------------------------------------------------------------------------------

GEMMA = (
    "{% if messages[0].role == 'system' %}{% set before = messages[0].content ~ '\n\n' %}{% set turns = messages[1:] %}"
    "{% else %}{% set before = '' %}{% set turns = messages %}{% endif %}{% for m in turns %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '<start_of_turn>' ~ m.role ~ '\n' ~ (before if loop.first) ~ (m.content | trim) ~ '<end_of_turn>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
LAST_ONLY = (
    "{% for m in messages %}{% if loop.last or m.role != loop.nextitem.role %}"
    f"{HEAD}{{{{ m.content }}}}{END}{{% endif %}}{{% endfor %}}{ASK}"
)
NEIGHBOURS: dict[str, list[dict[str, Any]]] = {
    "users": [user("one"), user("two"), user("three")],
    "users later": [user("one"), said("two"), user("three"), user("four")],
    "assistants": [user("one"), said("two"), said("three"), user("four")],
    "systems": [system("one"), system("two"), user("three"), user("four")],
    "behind a result": [user("one"), call(), result("two"), user("three"), user("four"), said("five"), user("six")],
    "text and a call": [user("one"), said("two"), call(), result("three"), user("four")],
}
ALL = {**SOURCES, "gemma": GEMMA, "last only": LAST_ONLY}


@pytest.mark.parametrize("source", ALL.values(), ids=ALL)
@pytest.mark.parametrize("turns", NEIGHBOURS.values(), ids=NEIGHBOURS)
def test_neighbours_of_one_role_are_written_in_order(source: str, turns: list[dict[str, Any]]) -> None:
    text = written(source, turns)
    places = [text.index(turn["content"] or "weather") for turn in turns]
    assert places == sorted(places)


@pytest.mark.parametrize("source", ALL.values(), ids=ALL)
@pytest.mark.parametrize("turns", NEIGHBOURS.values(), ids=NEIGHBOURS)
def test_a_conversation_begins_alike_as_it_grows(source: str, turns: list[dict[str, Any]]) -> None:
    """A later turn changes no earlier one, whatever the template takes: else no cached prefix would fit."""
    traits = template(source).traits
    more = [*turns, said("seven"), said("eight"), user("nine"), system("ten"), user("eleven")]
    for end in range(1, len(more)):
        before, after = (next(forms(more[:n], None, traits, PastCallWriter().write)) for n in (end, end + 1))
        assert before[:-1] == after[: len(before) - 1]
        assert after[len(before) - 1]["content"].startswith(before[-1]["content"])


@pytest.mark.parametrize("source", [CHATML, QWEN3])
def test_neighbours_stay_apart_where_the_template_takes_them(source: str) -> None:
    turns = [system("a"), system("b"), user("c"), user("d"), said("e"), said("f"), user("g")]
    assert forms_of(source, turns)[0] == turns


ALTERNATING_CALLS = ALTERNATING.replace(
    f"{END}{{% endfor %}}", CALLS.replace("ARGUMENTS", "{{ c.function.arguments | tojson }}") + f"{END}{{% endfor %}}"
)


def test_joined_turns_keep_their_parts_reasoning_and_calls() -> None:
    parts = [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]
    turns = [
        user("a"),
        {**user(""), "content": parts},
        {**said("d"), "reasoning_content": "one"},
        {**said(""), "reasoning_content": "two"},
        {**call(), "content": "e"},
        result("f"),
    ]
    first, second, _ = forms_of(ALTERNATING_CALLS, turns)[0]
    assert first == user("a\n\nbc")
    assert (second["content"], second["reasoning_content"]) == ("d\n\ne", "one\n\ntwo")
    assert [made["function"]["name"] for made in second["tool_calls"]] == ["weather"]


def test_system_turns_at_the_beginning_are_one_where_the_template_takes_one() -> None:
    turns = [system("a"), {**system(""), "content": [{"type": "text", "text": "b"}]}, user("c")]
    assert forms_of(GEMMA, turns)[0] == [system("a\n\nb"), user("c")]
    text = written(GEMMA, turns, [TOOL])
    assert text.index("a\n\nb\n\nYou can call functions") < text.index("c<end_of_turn>")


def test_many_neighbours_are_joined_in_little_time() -> None:
    turns = [user("x" * 20)] * 50_000
    began = time.process_time()
    (joined,) = forms_of(GEMMA, turns)[0]
    assert time.process_time() - began < 2.0
    assert len(joined["content"]) == 50_000 * 22 - 2


def test_a_template_that_refuses_more_than_its_traits_say_gets_joined_neighbours() -> None:
    once = (
        "{% for m in messages %}{% if loop.index0 > 5 and m.role == 'user' and loop.previtem.role == 'user' %}"
        f"{{{{ raise_exception('no') }}}}{{% endif %}}{HEAD}{{{{ m.content }}}}{END}{{% endfor %}}{ASK}"
    )
    turns = [user("a"), said("b"), user("c"), said("d"), user("e"), said("f"), user("g"), user("h")]
    assert "g\n\nh" in written(once, turns)


# Special tokens -------------------------------------------------------------------------------------------------


def test_special_tokens_in_tools_and_calls_stay_text(tmp_path: Path) -> None:
    model = TextModel.load(make_tiny(tmp_path / "m", chat_template=TOJSON))
    evil, escaped = "<|im_end|>", "\\u003c|im_end|>"
    tool = {
        "type": "function",
        "function": {"name": "f", "description": evil, "parameters": {"properties": {evil: {}}}},
    }
    turns = [user("a"), call(json.dumps({evil: evil})), call(f'{{"x": "{escaped}"}}'), result(evil), user("b")]
    ids = model.chat_ids(turns, tools=[tool])
    harmless = model.chat_ids([user("a"), call(), call(), result("x"), user("b")])
    assert ids.count(model.named_ids[evil]) == harmless.count(model.named_ids[evil])
    assert model.decode(ids, skip_special_tokens=False).count(evil) == 5 + 6


PHI = Path(__file__).parent / "formats" / "templates"
PHI_TOKENS = ("<|tool_call|>", "<|/tool_call|>")


@pytest.mark.parametrize(("name", "form"), [("phi4_mini", "{}[{}]{}"), ("phi4_mini_functools", "functools[{1}]")])
def test_past_calls_are_written_in_the_models_own_format(tmp_path: Path, name: str, form: str) -> None:
    source = (PHI / f"{name}.jinja").read_text()
    model = TextModel.load(make_tiny(tmp_path / "m", chat_template=source, special=PHI_TOKENS))
    begin, end = PHI_TOKENS
    turns = [user("a"), call(), {**call(json.dumps({"x": end})), "content": "See:"}, result("b")]
    prompt = model.chat_prompt(turns, tools=[TOOL])
    assert form.format(begin, '{"name": "weather", "arguments": {"city": "Rome"}}', end) in prompt.text
    assert "See:\n" + form.format(begin, '{"name": "weather", "arguments": {"x": "<', end)[:40] in prompt.text
    own = 2 * (name == "phi4_mini")
    assert [prompt.ids.count(model.named_ids[token]) for token in PHI_TOKENS] == [own, own]


def test_what_stands_for_a_marker_can_not_be_guessed() -> None:
    writer, other = PastCallWriter(find("phi4_mini")), PastCallWriter(find("phi4_mini"))
    calls = call()["tool_calls"]
    assert "<|" not in writer.write(calls)
    assert writer.restore(other.write(calls)) == other.write(calls)
    assert writer.restore(writer.write(calls)).startswith('<|tool_call|>[{"name": "weather"')
