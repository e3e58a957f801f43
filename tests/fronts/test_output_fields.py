"""Structured output, as clients of several servers ask for it."""

from __future__ import annotations

from typing import Any

import pytest

from treadle.errors import InvalidRequest
from treadle.fronts.answer_options import OutputGrammar
from treadle.fronts.output_fields import FIELDS, read_output

SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({}, None),
        (dict.fromkeys(FIELDS), None),
        ({"response_format": {"type": "text"}}, None),
        ({"format": ""}, None),
        ({"response_format": {"type": "json_object"}}, ("json_object", None, "response_format")),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": SCHEMA, "strict": True},
                }
            },
            ("json_schema", SCHEMA, "response_format.json_schema.schema"),
        ),
        (
            {"response_format": {"type": "json_schema", "schema": SCHEMA}},
            ("json_schema", SCHEMA, "response_format.schema"),
        ),
        (
            {"response_format": {"type": "json_object", "schema": SCHEMA}},
            ("json_schema", SCHEMA, "response_format.schema"),
        ),
        ({"structured_outputs": {"json": SCHEMA}}, ("json_schema", SCHEMA, "structured_outputs.json")),
        (
            {"structured_outputs": {"json": '{"type": "array"}'}},
            ("json_schema", {"type": "array"}, "structured_outputs.json"),
        ),
        ({"structured_outputs": {"regex": "a+", "choice": None}}, ("regex", "a+", "structured_outputs.regex")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, ("choice", ["a", "b"], "structured_outputs.choice")),
        ({"structured_outputs": {"grammar": "start: /a/"}}, ("lark", "start: /a/", "structured_outputs.grammar")),
        (
            {"structured_outputs": {"json_object": True, "disable_any_whitespace": False}},
            ("json_object", None, "structured_outputs.json_object"),
        ),
        (
            {"structured_outputs": {"structural_tag": "{}"}},
            ("structural_tag", "{}", "structured_outputs.structural_tag"),
        ),
        (
            {"response_format": {"type": "structural_tag", "format": {}}},
            ("structural_tag", '{"type": "structural_tag", "format": {}}', "response_format"),
        ),
        ({"guided_json": SCHEMA}, ("json_schema", SCHEMA, "guided_json")),
        ({"guided_regex": "a"}, ("regex", "a", "guided_regex")),
        ({"guided_choice": ["a"]}, ("choice", ["a"], "guided_choice")),
        ({"guided_grammar": "start: /a/"}, ("lark", "start: /a/", "guided_grammar")),
        ({"json_schema": SCHEMA}, ("json_schema", SCHEMA, "json_schema")),
        ({"format": "json"}, ("json_object", None, "format")),
        ({"format": SCHEMA}, ("json_schema", SCHEMA, "format")),
    ],
    ids=str,
)
def test_every_spelling_is_a_grammar(fields: dict[str, Any], grammar: Any) -> None:
    assert read_output(fields) == (None if grammar is None else OutputGrammar(*grammar))


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": [1]}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": "yes"}}},
            "response_format.json_schema.strict",
        ),
        ({"structured_outputs": []}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": {}}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": 5}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": 0.0, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice"),
        ({"structured_outputs": {"json_object": "yes"}}, "structured_outputs.json_object"),
        ({"guided_json": "["}, "guided_json"),
        ({"format": "yaml"}, "format"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_regex"),
        ({"response_format": {"type": "json_object"}, "format": "json"}, "format"),
    ],
    ids=str,
)
def test_what_is_wrong_is_refused_by_its_place(fields: dict[str, Any], place: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_output(fields)
    assert caught.value.param == place
    assert len(caught.value.message) < 300


def test_deep_json_in_a_string_is_refused() -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_output({"guided_json": "[" * 100_000})
    assert caught.value.param == "guided_json"


def test_the_limit_may_close_it() -> None:
    found = read_output({"format": "json"}, close_at_limit=True)
    assert found is not None
    assert found.close_at_limit
