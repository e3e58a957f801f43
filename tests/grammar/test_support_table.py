"""Each keyword of JSON Schema is enforced, refused or ignored as docs/structured-output.md says."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.grammar_walks import accepts, random_text
from tests.support.schemas import schema_of
from treadle.errors import InvalidRequest
from treadle.grammar.build import build

from .support_cases import KEYWORDS, Case, Ignored, Keyword, Refused
from .support_table import PAGE, page_with_table

CASES = [
    pytest.param(case, id=f"{keyword.name.split(',')[0]}-{number}")
    for keyword in KEYWORDS
    for number, case in enumerate(keyword.cases)
]


def validator(schema: Any) -> Any:
    jsonschema = pytest.importorskip("jsonschema", reason="part of the extra 'dev', as jsonschema[format-nongpl]")
    old = isinstance(schema, dict) and isinstance(schema.get("items"), list)
    kind = jsonschema.Draft7Validator if old else jsonschema.Draft202012Validator
    return kind(schema, format_checker=kind.FORMAT_CHECKER)


def grammar_of(schema: Any) -> str:
    return build("json_schema", schema, param="schema").grammar


def spellings(value: Any) -> list[str]:
    """The usual ways to write a value as JSON."""
    return [
        json.dumps(value, ensure_ascii=False),
        json.dumps(value, ensure_ascii=False, separators=(",", ":")),
        json.dumps(value, ensure_ascii=False, indent=2),
        json.dumps(value, ensure_ascii=False, indent="\t"),
    ]


@pytest.mark.parametrize("case", [case for case in CASES if isinstance(case.values[0], Case)])
def test_a_grammar_accepts_valid_values_and_no_others(case: Case) -> None:
    grammar = grammar_of(case.schema)
    for value in case.valid:
        assert [accepts(grammar, text) for text in spellings(value)] == [True] * 4, value
    for value in (*case.omitted, *case.invalid):
        assert not any(accepts(grammar, text) for text in spellings(value)), value


@pytest.mark.parametrize("case", [case for case in CASES if isinstance(case.values[0], Case)])
def test_a_validator_agrees_with_the_cases(case: Case) -> None:
    judge = validator(case.schema)
    assert all(judge.is_valid(value) for value in (*case.valid, *case.omitted))
    assert not any(judge.is_valid(value) for value in case.invalid)


@pytest.mark.parametrize("case", [case for case in CASES if isinstance(case.values[0], Case)])
def test_random_texts_of_a_grammar_are_valid(case: Case) -> None:
    judge, grammar = validator(case.schema), grammar_of(case.schema)
    for seed in range(8):
        text = random_text(grammar, seed)
        judge.validate(json.loads(text))


@pytest.mark.parametrize("case", [case for case in CASES if isinstance(case.values[0], Refused)])
def test_a_refusal_names_the_place(case: Refused) -> None:
    with pytest.raises(InvalidRequest) as refused:
        grammar_of(case.schema)
    assert refused.value.param == f"schema{case.place}"
    assert refused.value.message.startswith(f"schema{case.place} ")


@pytest.mark.parametrize("case", [case for case in CASES if isinstance(case.values[0], Ignored)])
def test_an_annotation_changes_nothing(case: Ignored) -> None:
    assert grammar_of(case.schema) == grammar_of({"type": case.schema["type"]})


@pytest.mark.parametrize("seed", range(150))
def test_random_texts_of_random_schemas_are_valid(seed: int) -> None:
    schema = schema_of(seed)
    text = random_text(grammar_of(schema), seed)
    validator(schema).validate(json.loads(text))


def test_the_page_has_the_current_table() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == page_with_table(page), "run `python -m tests.grammar.support_table`"


@pytest.mark.parametrize("keyword", KEYWORDS, ids=lambda keyword: keyword.name[:20])
def test_every_keyword_has_a_state(keyword: Keyword) -> None:
    assert keyword.state in ("enforced", "enforced in part", "refused", "annotation")
