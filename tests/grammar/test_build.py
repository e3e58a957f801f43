"""Grammars of each kind of request."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher

from tests.support.grammar_walks import accepts, matcher_of, random_text
from tests.support.grammars import byte_tokenizer
from treadle.errors import InvalidRequest
from treadle.grammar.build import Kind, build, json_rule
from treadle.grammar.limits import LIMITS


def grammar(kind: Kind, spec: Any = None) -> str:
    return build(kind, spec, param="field").grammar


def test_a_constraint_carries_its_kind_and_option() -> None:
    made = build("regex", "a+", param="field", close_at_limit=True)
    assert (made.kind, made.close_at_limit, made.triggers, made.then_free) == ("regex", True, (), False)
    assert not build("regex", "a+", param="field").close_at_limit


def test_json_object_is_any_object() -> None:
    made = grammar("json_object")
    assert accepts(made, "{}")
    assert accepts(made, '{"a": [1, {"b": null}], "c": "x"}')
    assert not accepts(made, "[]")
    assert not accepts(made, '"x"')


def test_a_schema_may_be_text() -> None:
    assert grammar("json_schema", '{"type": "integer"}') == grammar("json_schema", {"type": "integer"})


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "number", "multipleOf": 5},
        {"type": "number", "multipleOf": 3.0, "minimum": 0, "maximum": 10},
        {"type": ["number", "null"], "multipleOf": 7},
        {"multipleOf": 100},
        {"allOf": [{"type": "number"}, {"multipleOf": 7}]},
        {"anyOf": [{"type": "number"}, {"type": "string"}], "multipleOf": 4},
        {"$ref": "#/$defs/N", "multipleOf": 12, "$defs": {"N": {"type": "number"}}},
        {"type": "number", "multipleOf": 0.5},
    ],
)
def test_a_number_may_stand_before_a_special_token(schema: dict[str, Any]) -> None:
    tokenizer = byte_tokenizer(263, ("<end>",))
    rule = json_rule(schema, param="field")
    start = LLMatcher(tokenizer, f"start: value <end>\nvalue: {rule}", log_level=0, limits=LIMITS)
    for text in ("0", "-0", "3", "9", "100", "84", "-12", "-500"):
        matcher = start.deep_copy()
        matcher.try_consume_tokens(list(text.encode()))
        matcher.compute_bitmask()
        assert "panic" not in matcher.get_error(), text


def test_whole_multiples_are_integers() -> None:
    made = grammar("json_schema", {"type": ["number", "string"], "multipleOf": 5})
    assert all(accepts(made, text) for text in ("0", "15", "-5", '"x"'))
    assert not any(accepts(made, text) for text in ("3", "null", "0.5"))


ENDLESS = {"type": "object", "properties": {"a": {"$ref": "#/$defs/ENDLESS"}}, "required": ["a"]}
SELF = {"$ref": "#/$defs/SELF"}
SELF_INSIDE = {"allOf": [{"$ref": "#/$defs/SELF_INSIDE"}, {"type": "string"}]}
DEFINITIONS = {"SELF": SELF, "SELF_INSIDE": SELF_INSIDE, "ENDLESS": ENDLESS}


@pytest.mark.parametrize("name", DEFINITIONS)
@pytest.mark.parametrize(
    ("schema", "taken", "not_taken"),
    [
        ({"type": "object", "properties": {"title": SELF}}, ["{}"], ['{"', '{"title']),
        ({"type": "object", "properties": {"title": SELF, "n": {"type": "null"}}}, ["{}", '{"n":null}'], ['{"t']),
        ({"type": "object", "additionalProperties": SELF}, ["{}"], ['{"']),
        ({"type": "object", "patternProperties": {"^a": SELF, "^b": {"type": "null"}}}, ['{"b":null}'], ['{"a']),
        ({"type": "array", "items": SELF}, ["[]"], ["[n", "[{"]),
        ({"type": "array", "prefixItems": [{"type": "null"}, SELF]}, ["[]", "[null]"], ["[null,"]),
        ({"anyOf": [SELF, {"type": "null"}, {"type": "array", "items": SELF}]}, ["null", "[]"], ["{", "[n"]),
        ({"oneOf": [SELF, {"type": "null"}]}, ["null"], ["{"]),
        ({"allOf": [{"properties": {"t": SELF}}, {"properties": {"n": {"type": "null"}}}]}, ['{"n":null}'], ['{"t']),
    ],
)
def test_parts_without_a_finite_value_are_left_out(
    name: str, schema: dict[str, Any], taken: list[str], not_taken: list[str]
) -> None:
    """A grammar with such a part would lead into it, and find no text there."""
    text = json.dumps(schema).replace("#/$defs/SELF", f"#/$defs/{name}")
    made = grammar("json_schema", {**json.loads(text), "$defs": DEFINITIONS})
    assert all(accepts(made, value) for value in taken)
    for text in not_taken:
        matcher = matcher_of(made)
        assert matcher.try_consume_tokens(list(text.encode())) < len(text), text
    assert {random_text(made, seed) for seed in range(5)}


@pytest.mark.parametrize("rest", [{}, {"additionalProperties": False}])
@pytest.mark.parametrize("others", [{}, {"^b": SELF}])
def test_a_required_name_may_match_a_pattern(rest: dict[str, Any], others: dict[str, Any]) -> None:
    item = {"type": "object", "patternProperties": {"^x-": {"enum": ["a"]}, **others}, "required": ["x-id"], **rest}
    made = grammar("json_schema", {"type": "array", "items": item, "$defs": DEFINITIONS})
    assert accepts(made, '[{"x-id":"a"}]')
    assert not accepts(made, "[{}]")
    with pytest.raises(InvalidRequest, match="allows no finite value"):
        grammar(
            "json_schema",
            {**item, "patternProperties": {"^x-": SELF}, "additionalProperties": False} | {"$defs": DEFINITIONS},
        )


def test_a_regex_matches_the_whole_text() -> None:
    made = grammar("regex", r"\d{3}-[a-z]+")
    assert accepts(made, "123-ab")
    assert not accepts(made, "x123-ab")
    assert not accepts(made, "123-")


def test_a_choice_is_one_of_its_strings() -> None:
    texts = ["yes", "yes, but", 'q"\n\\é/', "<tool>", "%json", "日本"]
    made = grammar("choice", [*texts, "yes"])
    assert all(accepts(made, text) for text in texts)
    assert not accepts(made, "yesyes")
    assert {random_text(made, seed) for seed in range(60)} == {*texts}


def test_lark_and_gbnf() -> None:
    assert accepts(grammar("lark", 'start: "a" X\nX: /[0-9]+/'), "a12")
    assert accepts(grammar("lark", 'root ::= "a" [0-9]+ | greeting\ngreeting ::= "hi"'), "hi")


@pytest.mark.parametrize(
    ("kind", "spec", "param", "message"),
    [
        ("json_schema", 5, "field", "must be a JSON Schema"),
        ("json_schema", None, "field", "must be a JSON Schema"),
        ("json_schema", "{", "field", "is not valid JSON"),
        ("json_schema", {"type": "string", "x": float("inf")}, "field", "can't be written as JSON"),
        ("json_schema", {"type": "string", "x": object()}, "field", "can't be written as JSON"),
        ("regex", "(a", "field", "unclosed group"),
        ("regex", "(?=a)b", "field", "look-around"),
        ("regex", "", "field", "at least one character"),
        ("regex", "[a&&b]", "field", "no text matches it"),
        ("regex", None, "field", "must be text"),
        ("choice", [], "field", "must be a list of at least one string"),
        ("choice", "yes", "field", "must be a list of at least one string"),
        ("choice", ["a", 1], "field[1]", "must be a string"),
        ("choice", ["a", ""], "field[1]", "must be a string of at least one character"),
        ("lark", 'start: "a" Y', "field", "unknown name"),
        ("lark", 'begin: "a"', "field", "no start"),
        ("lark", '{"grammars": []}', "field", "must be Lark or GBNF"),
        ("lark", "root ::= missing", "field", "Rule 'missing' not found"),
        ("lark", 'start: %json {"$ref": "http://example.org/"}', "field", "example.org"),
    ],
)
def test_a_wrong_grammar_is_refused_by_its_place(kind: Kind, spec: Any, param: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as refused:
        grammar(kind, spec)
    assert refused.value.param == param


def test_an_unsupported_keyword_names_its_place_and_a_way_out() -> None:
    schema = {"type": "object", "properties": {"tags": {"type": "array", "uniqueItems": True}}}
    with pytest.raises(InvalidRequest) as refused:
        build("json_schema", schema, param="response_format.json_schema.schema")
    place = "response_format.json_schema.schema.properties.tags.uniqueItems"
    assert refused.value.param == place
    expected = f"{place} is not supported in a grammar: leave it out and drop duplicates from the answer"
    assert refused.value.message == expected


def test_rules_of_json_stand_by_themselves() -> None:
    """Two tools whose definitions share a name."""
    tools = [{"$defs": {"X": {"enum": [value]}}, "$ref": "#/$defs/X"} for value in (1, "one")]
    rules = [json_rule(schema, param=f"tools[{index}]") for index, schema in enumerate(tools)]
    made = LLMatcher.grammar_from_lark(f'start: "a=" {rules[0]} | "b=" {rules[1]}')
    assert accepts(made, "a=1")
    assert accepts(made, 'b="one"')
    assert not accepts(made, "b=1")


def test_a_rule_of_json_is_refused_like_a_schema() -> None:
    with pytest.raises(InvalidRequest) as refused:
        json_rule({"not": {}}, param="tools[3].function.parameters")
    assert refused.value.param == "tools[3].function.parameters.not"


# Ends


OBJECT = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}, "b": {}}}


@pytest.mark.parametrize(
    "text",
    ['{"a":[1,2]}', '{"a": [1, 2]}', '{\n  "a": [\n    1\n  ]\n}', '{\r\n\t"a": [ ]\r\n}', '{ "a" : [ 1 , 2 ] }'],
)
def test_usual_whitespace_is_allowed(text: str) -> None:
    assert accepts(grammar("json_schema", OBJECT), text)


@pytest.mark.parametrize(
    "text",
    ['{  "a":[]}', '{\n\n"a":[]}', '{"a":[1,\n' + " " * 41 + "2]}", ' {"a":[]}', '{"a":[]}\n', '{"a":[]} ', "{\t}"],
)
def test_endless_whitespace_is_not(text: str) -> None:
    assert not accepts(grammar("json_schema", OBJECT), text)


@pytest.mark.parametrize("schema", [{"type": "number"}, {"type": "integer"}, {}, {"type": "number", "minimum": 0}])
@pytest.mark.parametrize("digits", ["1" * 25, "0." + "3" * 25, "0." + "0" * 25, "1e" + "9" * 9, "-" + "9" * 25])
def test_no_number_has_endless_digits(schema: dict[str, Any], digits: str) -> None:
    assert not accepts(grammar("json_schema", schema), digits)


def test_a_walk_over_digits_alone_ends() -> None:
    """A model that repeats a digit comes to the end of the number."""
    matcher = LLMatcher(_bytes(), grammar("json_schema", {"type": "number"}), log_level=0)
    for _ in range(2):
        matcher.reset()
        taken = matcher.try_consume_tokens(list(b"0." + b"3" * 100))
        assert taken < 40
        assert matcher.is_accepting()


def _bytes() -> Any:
    from tests.support.grammar_walks import BYTES

    return BYTES
