"""Random compositions of schemas: intersections, unions, references. All that is not refused writes valid JSON."""

from __future__ import annotations

import json
import random
from contextlib import suppress
from typing import Any

import pytest

from tests.support.grammar_walks import random_text
from treadle.errors import InvalidRequest
from treadle.grammar.build import build

from .support_cases import KEYWORDS, Case

PARTS: list[dict[str, Any]] = [
    case.schema
    for keyword in KEYWORDS
    for case in keyword.cases
    if isinstance(case, Case) and isinstance(case.schema, dict) and "$ref" not in json.dumps(case.schema)
    if not isinstance(case.schema.get("items"), list)  # of an older draft than the validator's
]
OBJECTS = [part for part in PARTS if part.get("type") == "object"]


def composition(seed: int) -> dict[str, Any]:
    draws = random.Random(seed)
    definitions = {"X": _composed(draws, 2), "Y": _composed(draws, 1)}
    return {**_composed(draws, 0), "$defs": definitions}


def _composed(draws: random.Random, level: int) -> dict[str, Any]:
    part = draws.choice(OBJECTS if draws.random() < 0.6 else PARTS)
    schemas = [_composed(draws, level + 1) for _ in range(2)] if level < 2 else [part, draws.choice(PARTS)]
    match draws.choice(["part", "part", "allOf", "anyOf", "oneOf", "object", "$ref"]):
        case "allOf":
            return {"allOf": schemas}
        case "anyOf":
            return {**part, "anyOf": schemas}
        case "oneOf":
            return {"oneOf": schemas, **draws.choice([{}, {"type": "object"}, {"type": ["object", "null"]}])}
        case "object":
            properties = dict(zip(draws.sample(["a", "b", "kind", "n_a"], 2), schemas, strict=True))
            required = draws.choice([[], ["a"], ["z"]])
            return {"type": "object", "properties": properties, "required": required}
        case "$ref":
            return {"$ref": draws.choice(["#/$defs/X", "#/$defs/Y"]), **draws.choice([{}, part])}
    return part


@pytest.mark.parametrize("block", range(20))
def test_what_is_not_refused_writes_valid_json_alone(block: int) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="part of the extra 'dev', as jsonschema[format-nongpl]")
    written = 0
    for seed in range(block * 20, block * 20 + 20):
        schema = composition(seed)
        try:
            grammar = build("json_schema", schema, param="schema").grammar
        except InvalidRequest:
            continue
        kind = jsonschema.Draft202012Validator
        text = random_text(grammar, seed)
        with suppress(RecursionError):  # of the validator, at references that lead back to themselves
            kind(schema, format_checker=kind.FORMAT_CHECKER).validate(json.loads(text))
        written += 1
    assert written > 4
