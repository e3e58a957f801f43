"""Grammars that would take too long, too much memory or no end: refused by their place, each by a limit on its work."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from llguidance import LLMatcher

from tests.support.grammars import piece_tokenizer
from tests.support.schemas import schemas
from treadle.errors import InvalidRequest
from treadle.grammar.build import Kind, build
from treadle.grammar.limits import LIMITS
from treadle.grammar.patterns import copies

from .support_cases import KEYWORDS


def chain(count: int, **last: Any) -> dict[str, Any]:
    """Definitions that each refer twice to the next one."""
    links = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": {**links, f"d{count}": last}}


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


def properties(count: int, schema: Any) -> dict[str, Any]:
    names = [f"p{i}" for i in range(count)]
    return {"type": "object", "properties": dict.fromkeys(names, schema), "required": names}


def choices(i: int) -> dict[str, Any]:
    return {"anyOf": [{"type": "object", "properties": {f"a{i}{j}": {}}, "required": [f"a{i}{j}"]} for j in range(10)]}


def references(count: int) -> dict[str, Any]:
    """Objects that each require one of the next kind."""
    links = {f"d{i}": {"properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}, "required": ["a"]} for i in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": {**links, f"d{count}": {"type": "string"}}}


def aliases(count: int) -> dict[str, Any]:
    links: dict[str, Any] = {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(count)}
    return {"$ref": "#/$defs/0", "$defs": {**links, str(count): {"type": "null"}}}


def rules(count: int) -> str:
    lines = [f'r{i}: r{i + 1} "y"' for i in range(count - 2)]
    return "\n".join(["start: r0", *lines, f'r{count - 2}: "a"'])


BOMBS: dict[str, tuple[Kind, Any, str]] = {
    "a schema of 1 MB": ("json_schema", {"enum": ["x" * 1_000_000]}, "longer than 262144 bytes"),
    "a schema of 1 MB as text": (
        "json_schema",
        '{"enum": ["' + "x" * 1_000_000 + '"]}',
        "longer than 262144 characters",
    ),
    "100,000 values": ("json_schema", {"enum": list(range(100_000))}, "over 50000 values"),
    "10,000 properties": ("json_schema", properties(10_000, {"type": "string"}), "longer than 262144 bytes"),
    "1,900 numbers with limits of their own": (
        "json_schema",
        {**properties(1900, {}), "properties": {f"p{i}": {"type": "number", "minimum": i} for i in range(1900)}},
        "too much work to compile",
    ),
    "501 optional properties": (
        "json_schema",
        {**properties(502, {"type": "string"}), "required": ["p0"]},
        "over 500 optional properties",
    ),
    "100 levels": ("json_schema", nested(100), "below over 64 other schemas"),
    "5,000 levels": ("json_schema", nested(5000), "deeper than 256 levels"),
    "200,000 levels as text": ("json_schema", '{"items":' * 20_000 + "{}" + "}" * 20_000, "maximum recursion depth"),
    "intersections that multiply": ("json_schema", {"allOf": [choices(i) for i in range(6)]}, "schema too large"),
    "a pattern of a million copies": (
        "json_schema",
        {"type": "string", "pattern": "(a{1000}){1000}"},
        "over 50000 times",
    ),
    "a pattern of a billion copies": (
        "json_schema",
        {"type": "string", "pattern": "((a{1000}){1000}){1000}"},
        "over 50000 times",
    ),
    "a pattern with an endless count": (
        "json_schema",
        {"type": "string", "pattern": "a{99999999999999999999}"},
        "over 50000 times",
    ),
    "a property pattern of a million copies": (
        "json_schema",
        {"type": "object", "patternProperties": {"(a{1000}){1000}": True}},
        "over 50000 times",
    ),
    "a schema without an end": (
        "json_schema",
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        "no finite value",
    ),
    "remote references": ("json_schema", {"$ref": "http://169.254.169.254/latest"}, "nothing is fetched"),
    "a file reference": ("json_schema", {"$ref": "file:///etc/passwd"}, "nothing is fetched"),
    "a regex of a million copies": ("regex", "(a{1000}){1000}", "over 50000 times"),
    "a regex of 1 MB": ("regex", "a" * 1_000_000, "longer than 8192 characters"),
    "nested groups": ("regex", "(" * 4000 + "a" + ")" * 4000, "invalid regex"),
    "a Lark grammar of 1 MB": (
        "lark",
        "start: " + " | ".join(f'"x{i}"' for i in range(100_000)),
        "longer than 262144 characters",
    ),
    "20,000 nested groups of Lark": ("lark", "start: " + "(" * 20_000 + '"a"' + ")" * 20_000, "too deeply nested"),
    "1,001 rules, each of the next one": ("lark", rules(1001), "over 1000 rules"),
    "4,000 optional texts": ("lark", "start: " + '"a"? ' * 4000, "too many ways to go on at once"),
    "GBNF of 1 MB": (
        "lark",
        "root ::= " + " | ".join(f'"x{i}"' for i in range(100_000)),
        "longer than 262144 characters",
    ),
    "nested GBNF": ("lark", "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000, "maximum recursion depth"),
    "100,000 choices": ("choice", [str(i) for i in range(100_000)], "over 10000 strings"),
    "a choice of 1 MB": ("choice", ["x" * 1_000_000], "longer than 262144 characters"),
}
"""What each is, and the limit that refuses it: each ends the work before it grows."""


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_by_a_limit(name: str) -> None:
    kind, spec, limit = BOMBS[name]
    with pytest.raises(InvalidRequest, match=limit) as refused:
        build(kind, spec, param="field")
    assert refused.value.param is not None
    assert refused.value.param.startswith("field")
    assert len(refused.value.message) < 600


DEAR: dict[str, tuple[Kind, Any]] = {
    "1,900 properties": ("json_schema", properties(1900, {"type": "string"})),
    "1,900 properties with patterns": ("json_schema", properties(1900, {"type": "string", "pattern": "[a-z]{1,99}$"})),
    "1,900 numbers": ("json_schema", properties(1900, {"type": ["number", "null"]})),
    "40 references that double": ("json_schema", chain(40, type="string")),
    "a chain of 990 references": ("json_schema", references(990)),
    "500 optional properties": ("json_schema", {**properties(500, {"type": "string"}), "required": []}),
    "1,000 rules, each of the next one": ("lark", rules(1000)),
    "1,600 references in Lark": ("lark", f"start: %json {json.dumps(aliases(1600))}"),
    "10,000 values": ("json_schema", {"enum": [f"value {i}" for i in range(10_000)]}),
    "60 levels": ("json_schema", nested(60)),
    "a million items": ("json_schema", {"type": "array", "maxItems": 1_000_000}),
    "a million characters": ("json_schema", {"type": "string", "minLength": 1_000_000}),
    "catastrophic for backtracking": ("regex", "(a+)+(b|bb)*$"),
    "a state for each text": ("regex", "(a|b)*a(a|b){30}"),
    "10,000 choices": ("choice", [f"value {i}" for i in range(10_000)]),
    "an ambiguous Lark grammar": ("lark", 'start: s\ns: s s s | s s | "a" | '),
}


@pytest.mark.parametrize("name", DEAR)
def test_a_large_grammar_within_the_limits_is_built(name: str) -> None:
    kind, spec = DEAR[name]
    assert build(kind, spec, param="field").grammar


@pytest.mark.parametrize(
    ("pattern", "count"),
    [("abc", 3), ("a{3}", 3), ("(ab){3}", 6), ("((a{2}){3}){4}", 24), ("[abc]{5}", 5), (r"\{9", 2), ("a|b{2,}", 3)],
)
def test_copies_counts_repeated_parts(pattern: str, count: int) -> None:
    assert copies(pattern) == count


JUNK = (None, True, 0, -1, 1.5, 2**70, "", "#", "#/$defs/x", [], {}, [1], [{}], "integer", {"$ref": "#"}, float("nan"))
KEYS = ("type", "enum", "properties", "required", "anyOf", "oneOf", "$ref", "items", "propertyNames", "minimum", "$id")


def test_broken_schemas_are_refused_and_never_crash() -> None:
    whole = [*schemas(40), *(case.schema for keyword in KEYWORDS for case in keyword.cases)]
    places = []
    for seed in range(2500):
        draws = random.Random(seed)
        schema = _broken(draws, draws.choice(whole), whole)
        try:
            build("json_schema", schema, param="field")
        except InvalidRequest as error:
            places.append(error.param or "")
    assert 500 < len(places) < 2500
    assert all(place.startswith("field") for place in places)


def _broken(draws: random.Random, schema: Any, whole: list[Any]) -> Any:
    """A copy of a schema with junk, or a part of another schema, at one place."""
    if isinstance(schema, dict) and schema and draws.random() < 0.8:
        key = draws.choice([*schema, draws.choice(KEYS)])
        return {**schema, key: _broken(draws, schema.get(key), whole)}
    if isinstance(schema, list) and schema and draws.random() < 0.8:
        index = draws.randrange(len(schema))
        return [*schema[:index], _broken(draws, schema[index], whole), *schema[index + 1 :]]
    return draws.choice([*JUNK, draws.choice(whole)])


def test_bitmasks_of_an_object_with_500_optional_properties_stay_within_the_limits() -> None:
    """Each token of whitespace before the first name leads to all of them at once."""
    pieces = tuple("\n" + " " * indent for indent in range(40))
    schema = {**properties(500, {"type": "integer"}), "required": []}
    grammar = build("json_schema", schema, param="field").grammar
    matcher = LLMatcher(piece_tokenizer(pieces, 400), grammar, log_level=0, limits=LIMITS)
    for byte in b'{"p499':
        matcher.compute_bitmask()
        assert matcher.consume_token(byte), matcher.get_error()
