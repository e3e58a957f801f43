"""Values of several types, long texts and many alternatives in formats whose arguments are texts."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
from llguidance import LLMatcher

from tests.support.grammars import piece_tokenizer
from treadle.grammar.build import json_rule
from treadle.grammar.completions import ending_of
from treadle.grammar.limits import LIMITS
from treadle.text.formats.base import REQUIRED, ToolChoice, ToolSpec
from treadle.text.formats.integer_ranges import integers_between
from treadle.text.formats.reader import ReaderSetup
from treadle.text.formats.registry import FORMATS
from treadle.text.formats.schema_branches import Unheld
from treadle.text.formats.typed_grammar import MAX_LENGTH
from treadle.text.formats.typed_values import parameter_types

from .vectors.vector import calls_of, read
from .walks import Walker

TEXT: dict[str, Any] = {"type": "string"}
COUNT: dict[str, Any] = {"type": "integer", "minimum": 1}
OPEN, CLOSE = "<tool_call>\n<function=f>\n<parameter=s>\n", "\n</parameter>\n</function>\n</tool_call>"


def tool(schema: Any, root: dict[str, Any] | None = None, *, strict: bool = False) -> ToolSpec:
    parameters = {"type": "object", "properties": {"s": schema}, "required": ["s"], **(root or {})}
    return ToolSpec("f", "", parameters, strict=strict)


def grammar(spec: ToolSpec, name: str = "qwen3_coder", special: dict[str, int] | None = None) -> str:
    made = FORMATS[name].constraint(
        (spec,),
        ToolChoice(REQUIRED),
        parallel=False,
        special=special or {},
        schema=lambda schema: json_rule(dict(schema), param="tools", check=False).removeprefix("%json "),
    )
    assert made is not None
    return made.grammar


def arguments(spec: ToolSpec, value: str) -> str:
    setup = ReaderSetup("qwen3_coder", tools=("f",), types=parameter_types((spec,)))
    return calls_of(read(setup, [[(OPEN + value + CLOSE, False)]]))[0][1]


def is_held(spec: ToolSpec, value: str) -> bool:
    text = (OPEN + value + CLOSE).encode()
    return bool(Walker().matcher(grammar(spec)).validate_tokens(list(text)) == len(text))


@pytest.mark.parametrize(
    ("schema", "values"),
    [
        ({"anyOf": [COUNT, TEXT]}, ("10-20", "2024-01-01", "3 days", "-v", "7th", "1.5")),
        ({"anyOf": [TEXT, {"type": "array", "items": TEXT}]}, ("[draft] x", "[link](http://x)")),
        ({"anyOf": [TEXT, {"type": "object"}]}, ("{{template}}", "{not json")),
        ({"type": ["string", "number"], "minimum": 0}, ("50%", "1.2.3", "10-20")),
    ],
)
def test_texts_beside_other_types_may_begin_as_they_do(schema: Any, values: tuple[str, ...]) -> None:
    for value in values:
        assert is_held(tool(schema), value)
        assert arguments(tool(schema), value) == f'{{"s": "{value}"}}'


@pytest.mark.parametrize("strict", [False, True])
def test_integers_beside_texts_keep_their_limits(strict: bool) -> None:
    spec = tool({"anyOf": [{"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 13}, TEXT]}, strict=strict)
    assert [value for value in ("0", "1", "12", "13", "-3", "1-3", " 20 ") if is_held(spec, value)] == [
        "1",
        "12",
        "1-3",
    ]
    empty = tool({"anyOf": [{"type": "integer", "minimum": 5, "maximum": 3}, TEXT]}, strict=strict)
    assert [value for value in ("3", "4", "5", "x") if is_held(empty, value)] == ["x"]


def test_no_text_of_a_strict_tool_begins_as_a_value_that_is_held() -> None:
    spec = tool({"anyOf": [TEXT, {"type": "array", "items": {"type": "integer"}}]}, strict=True)
    assert [value for value in ("[1, 2]", '["a"]', "[draft] x", "x") if is_held(spec, value)] == ["[1, 2]", "x"]


def test_ranges_of_integers_match_what_lies_between() -> None:
    ends = (-1205, -100, -99, -13, -1, 0, 1, 9, 10, 12, 99, 100, 340, 1000, 1999)
    for least, most in itertools.combinations_with_replacement(ends, 2):
        pattern = re.compile(integers_between(least, most))
        near = [number for end in (*ends, least, most) for number in (end - 1, end, end + 1)]
        for number in near:
            assert bool(pattern.fullmatch(str(number))) is (least <= number <= most), (least, most, number)


@pytest.mark.parametrize(
    "schema",
    [
        {**TEXT, "maxLength": 100},
        {"anyOf": [{**TEXT, "maxLength": 1000}, {"type": "null"}]},
        {"anyOf": [{**TEXT, "minLength": 40, "maxLength": 100}, COUNT]},
    ],
)
def test_lengths_too_long_to_count_are_free_unless_the_tool_is_strict(schema: Any) -> None:
    words = ("the", "the ", "fox", " over", "</", "param", "\n\n", "<", ">\n", "  ", "0-9", "lazy dog")
    tokenizer = piece_tokenizer(words, 400)
    text = grammar(tool(schema))
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=LIMITS)
    ending_of(tokenizer, text, matcher.deep_copy())  # shares the lexer's states
    for token in tokenizer.tokenize_str(OPEN + "the lazy dog jumps over </param of\n\n0-9 <fox>\n" * 7):
        matcher.compute_bitmask()
        assert matcher.consume_token(token), matcher.get_error()
    assert f"{{0,{MAX_LENGTH + 1}" not in text
    assert ".{0,1" not in text
    with pytest.raises(Unheld, match="length of over 16") as raised:
        grammar(tool(schema, strict=True))
    assert raised.value.parameter == "s"


def test_lengths_are_held_where_they_are_short_or_a_token_ends_the_text() -> None:
    short = tool({**TEXT, "minLength": 2, "maxLength": MAX_LENGTH}, strict=True)
    lengths = [length for length in range(MAX_LENGTH + 2) if is_held(short, "x" * length)]
    assert lengths == list(range(2, MAX_LENGTH + 1))
    long = tool({**TEXT, "maxLength": 100}, strict=True)
    assert ".{0,100}" in grammar(long, "glm", {"</arg_value>": 7})


@pytest.mark.parametrize(
    "parts",
    [
        ({"example": "a"}, {"example": "b"}),
        ({"x-order": 1}, {"x-order": 2}),
        ({"pattern": "a"}, {"pattern": "b"}),
        ({"format": "uri"}, {"format": "hostname"}),
    ],
)
def test_keywords_that_hold_no_value_may_be_given_twice(parts: tuple[Any, Any]) -> None:
    schema = {"allOf": [{**TEXT, **parts[0]}, parts[1]]}
    assert is_held(tool(schema, strict=True), "1999")
    assert arguments(tool(schema), "1999") == '{"s": "1999"}'


def test_types_are_known_where_a_schema_can_not_be_taken_apart() -> None:
    doubled = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(20)} | {"d20": TEXT}
    for spec in (
        tool({"$ref": "#/$defs/d0"}, {"$defs": doubled}),
        tool(TEXT, {"allOf": [{"$ref": "#/$defs/none"}]}),
        tool({"anyOf": [TEXT, {"$ref": "#/$defs/d0"}]}, {"$defs": doubled}),
        tool({"enum": ["1999"], "allOf": [{"$ref": "#/$defs/none"}]}),
        tool(TEXT, {"anyOf": [{"properties": {"k": {**TEXT, "maxLength": n}}} for n in range(200)]}),
    ):
        assert arguments(spec, "1999") == '{"s": "1999"}'
    many = {f"p{n}": {"anyOf": [{"const": str(year)} for year in range(50)]} for n in range(120)}
    found = parameter_types((ToolSpec("f", "", {"type": "object", "properties": many}),))["f"]
    assert set(found.values()) == {("string",)}


def test_many_alternatives_are_held() -> None:
    objects = [{"type": "object", "properties": {"k": {"const": n}}, "required": ["k"]} for n in range(300)]
    for schema in (
        {"anyOf": [{"const": f"k{n}", "title": "one"} for n in range(300)]},
        {"oneOf": [{"const": f"k{n}", "title": "one"} for n in range(300)]},
        {"anyOf": [*({"const": f"k{n}"} for n in range(300)), {"type": "null"}]},
    ):
        assert is_held(tool(schema, strict=True), "k299")
        assert not is_held(tool(schema, strict=True), "k300")
    assert is_held(tool({"anyOf": objects}, strict=True), '{"k": 299}')
    with pytest.raises(Unheld, match="oneOf"):
        grammar(tool({"oneOf": [{"const": "a"}, {"enum": ["a", "b"]}]}, strict=True))


@pytest.mark.parametrize("name", ["gemma4", "qwen3_coder"])
def test_objects_of_one_of_may_be_told_apart_by_what_they_require(name: str) -> None:
    def closed(*keys: str, **more: Any) -> dict[str, Any]:
        properties = dict.fromkeys(keys, TEXT) | more
        return {"type": "object", "properties": properties, "required": [*keys], "additionalProperties": False}

    tagged = [closed("a", type={"const": "a"}) | {"required": [*required]} for required in (("type",), ())]
    tagged[1] = {**tagged[1], "properties": {"a": TEXT, "type": {"const": "b"}}}
    never = [closed("a"), {"type": "object", "properties": {"a": False}}]
    for parts in ([closed("and"), closed("or"), closed("field", "value")], tagged, never):
        assert grammar(tool({"oneOf": parts}, strict=True), name)
    same = [closed("a"), {**closed("a", "b"), "required": ["a"]}]
    if name == "gemma4":
        with pytest.raises(Unheld, match="oneOf"):
            grammar(tool({"oneOf": same}, strict=True), name)
