from __future__ import annotations

from typing import Any

import pytest

from treadle.fronts.web.site.shapes import default_of, is_empty, limits_of, refs_in, type_of

REF = "#/components/schemas/"


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "string"}, "string"),
        ({}, "any"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "integer"),
        ({"type": ["string", "null"]}, "string"),
        ({"type": ["number", "boolean", "null"]}, "number or boolean"),
        ({"type": "null"}, "null"),
        ({"const": None}, "null"),
        ({"const": "text"}, '"text"'),
        ({"enum": ["none", "auto", None]}, '"none" or "auto"'),
        ({"enum": [None]}, "null"),
        ({"$ref": REF + "Message"}, "Message"),
        ({"allOf": [{"$ref": REF + "Message"}]}, "Message"),
        ({"type": "array"}, "array"),
        ({"type": "array", "items": {"type": "string"}}, "array of strings"),
        ({"type": "array", "items": {"$ref": REF + "Message"}}, "array of Message"),
        ({"type": "array", "items": {"type": "array", "items": {"type": "integer"}}}, "array of arrays of integers"),
        (
            {"type": "array", "items": {"anyOf": [{"type": "string"}, {"type": "integer"}]}},
            "array of (string or integer)",
        ),
        ({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}, "string or array of strings"),
        ({"type": "object", "additionalProperties": {"type": "number"}}, "object of numbers"),
        ({"type": "object", "additionalProperties": True}, "object"),
        ({"type": "integer", "anyOf": [{"minimum": 1}, {"enum": [-1]}]}, "integer or -1"),
        ({"properties": {}}, "object"),
    ],
)
def test_types_in_words(schema: dict[str, Any], words: str) -> None:
    assert type_of(schema) == words


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"minimum": 0, "maximum": 2}, ["0 to 2"]),
        ({"minimum": -100.0, "maximum": 100.0}, ["−100 to 100"]),
        ({"exclusiveMinimum": 0, "maximum": 1}, ["above 0, at most 1"]),
        ({"minimum": 0.5}, ["at least 0.5"]),
        ({"exclusiveMaximum": 9}, ["below 9"]),
        ({"minimum": -(2**63), "maximum": 2**63 - 1}, ["−2^63 to 2^63 − 1"]),
        ({"minimum": 1, "maximum": 2**31 - 1}, ["1 to 2^31 − 1"]),
        ({"maxLength": 1024}, ["up to 1,024 characters"]),
        ({"minItems": 1, "maxItems": 16}, ["1 to 16 items"]),
        ({"minItems": 1}, ["at least 1 item"]),
        ({"minItems": 2}, ["at least 2 items"]),
        ({"maxProperties": 64}, ["up to 64 keys"]),
        ({"pattern": "^a$"}, ["like ^a$"]),
        ({"type": "array", "maxItems": 4, "items": {"maxLength": 9}}, ["up to 4 items", "each up to 9 characters"]),
        ({"type": "object", "additionalProperties": {"maximum": 5}}, ["each at most 5"]),
        ({"anyOf": [{"minimum": 0}, {"type": "null"}, {"minimum": 0}]}, ["at least 0"]),
        ({"type": "string"}, []),
    ],
)
def test_limits_in_words(schema: dict[str, Any], words: list[str]) -> None:
    assert limits_of(schema) == words


def test_a_default_of_null_is_none() -> None:
    assert default_of({"default": None}) == default_of({}) == ""
    assert default_of({"default": False}) == "false"
    assert default_of({"default": "é"}) == '"é"'


def test_fields_that_ask_for_nothing_are_told_apart() -> None:
    empty: list[dict[str, Any]] = [{"enum": [None, "", []]}, {"type": "null"}, {"const": None}]
    assert all(map(is_empty, [*empty, {"anyOf": [{"enum": [[]]}]}]))
    asking: list[dict[str, Any]] = [{}, {"type": "string"}, {"enum": [False]}, {"enum": [0, None]}, {"const": "text"}]
    assert not any(map(is_empty, asking))


def test_shapes_are_found_however_deep() -> None:
    deep = {
        "anyOf": [{"type": "array", "items": {"oneOf": [{"$ref": REF + "A"}, {"$ref": REF + "B"}]}}, {"type": "null"}]
    }
    assert list(refs_in(deep)) == ["A", "B"]
    assert list(refs_in({"additionalProperties": {"$ref": REF + "C"}})) == ["C"]
