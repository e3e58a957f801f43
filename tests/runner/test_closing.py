"""Answers that must be complete within `max_tokens`, with tokens taken at random from what constraints allow."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from tests.support.grammars import Grammars, byte_tokenizer, lark, piece_tokenizer, regex, schema
from treadle.core.messages import Constraint, Submit
from treadle.runner.sampling.completion import Completions
from treadle.runner.sampling.constraints import RowConstraint
from treadle.runner.sampling.token_masks import TokenMasks

PIECES = (
    '""',
    '"}',
    '"]',
    '":',
    '","',
    "{}",
    "[]",
    "}}",
    "]}",
    "ab",
    "abc",
    "name",
    "true",
    "false",
    "null",
    "12",
    ", ",
)
VOCABULARIES = {"bytes": byte_tokenizer(263, ("<think>", "</think>")), "pieces": piece_tokenizer(PIECES, 300)}
STOP = 258


def random_schema(dice: random.Random, depth: int = 3) -> dict[str, Any]:
    kinds = ["string", "integer", "boolean", "null", "enum", "number", "const", "pattern"]
    kind = dice.choice([*kinds, *(["object", "array", "any"] * 3 if depth else [])])
    inner = [random_schema(dice, depth - 1) for _ in range(dice.randint(1, 3))] if depth else []
    match kind:
        case "object":
            names = [f"{dice.choice('abcxyz')}{'n' * dice.randint(0, 9)}{i}" for i in range(len(inner))]
            required = [name for name in names if dice.random() < 0.6]
            fields = dict(zip(names, inner, strict=True))
            more = dice.random() < 0.2
            return {"type": "object", "properties": fields, "required": required, "additionalProperties": more}
        case "array":
            return {"type": "array", "items": inner[0], "minItems": dice.choice([0, 0, 1, 3])}
        case "any":
            return {"anyOf": inner}
        case "enum":
            return {"enum": ["short", "a much longer alternative", 7][: dice.randint(1, 3)]}
        case "const":
            return {"const": {"k": "v" * dice.randint(0, 12)}}
        case "pattern":
            return {"type": "string", "pattern": dice.choice(["^[a-z]{2,5}$", "^[0-9]+-[0-9]{3}$", "^(ab|abc)+x$"])}
        case "string":
            return {"type": "string", "minLength": dice.choice([0, 0, 0, 9])}
        case _:
            return {"type": kind}


def allowed(row: RowConstraint, masks: TokenMasks) -> list[int]:
    if row.limit is None:
        return []
    words = masks.fill([row])[0]
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()


def answer(row: RowConstraint, masks: TokenMasks, dice: random.Random, most: int) -> tuple[list[int], bool]:
    """Tokens at random; and whether the sequence stopped by itself."""
    tokens: list[int] = []
    while len(tokens) < most:
        some = allowed(row, masks) or list(range(97, 123))
        long = [token for token in some if token not in (STOP, 260)]
        token = row.settle(dice.choice(long if long and dice.random() < 0.9 else some))
        assert not row.limit or token in some, "what is taken was allowed"
        row.accept(token)
        assert not row.failure
        tokens.append(token)
        if row.ended or token == STOP:
            return tokens, True
    return tokens, False


def made(constraint: Constraint, name: str, most: int, **fields: Any) -> RowConstraint:
    grammars = Grammars(VOCABULARIES[name])
    request = Submit("r", (1,), most, stop_token_ids=(STOP,), constraint=constraint, **fields)
    return RowConstraint(request, (), 300, grammars.matcher(constraint), grammars.vocabulary)


def shortest(constraint: Constraint, name: str) -> int:
    grammars = Grammars(VOCABULARIES[name])
    found = Completions(grammars.vocabulary, constraint.grammar).short(grammars.matcher(constraint), 4000)
    assert found is not None
    return len(found)


@pytest.mark.parametrize("name", VOCABULARIES)
@pytest.mark.parametrize("seed", range(40))
def test_an_answer_is_complete_whenever_a_completion_fits(seed: int, name: str) -> None:
    dice = random.Random(seed)
    constraint = schema(random_schema(dice), close_at_limit=True)
    least = shortest(constraint, name)
    masks = TokenMasks(VOCABULARIES[name].vocab_size)
    for most in (least, least + 1, least + 2, least + 5, least + 20, 2 * least + 60, least + 150):
        if most:
            tokens, stopped = answer(made(constraint, name, most), masks, dice, most)
            text = VOCABULARIES[name].decode_bytes([token for token in tokens if token != STOP])
            assert stopped, (constraint.grammar, most, text)
            json.loads(text)


RECURSIVE = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "children": {"type": "array", "items": {"$ref": "#"}}},
    "required": ["name", "children"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("name", VOCABULARIES)
@pytest.mark.parametrize("most", [25, 40, 160])
def test_a_recursive_answer_is_complete(most: int, name: str) -> None:
    for seed in range(5):
        row = made(schema(RECURSIVE, close_at_limit=True), name, most)
        tokens, stopped = answer(row, TokenMasks(VOCABULARIES[name].vocab_size), random.Random(seed), most)
        assert stopped
        json.loads(VOCABULARIES[name].decode_bytes([token for token in tokens if token != STOP]))


@pytest.mark.parametrize(
    "constraint",
    [
        lark('start: <think> /[^<]*/ </think> /[a-z]+/ "."', close_at_limit=True),
        lark('start: <think> /[^<]*/ <[262]> "end"', close_at_limit=True),
        regex("(ab|abc)+x[0-9]+-", close_at_limit=True),
        regex("([a-z]+ ){3}[A-Z]", close_at_limit=True),
    ],
    ids=["names", "numbers", "circles", "words"],
)
def test_grammars_of_other_kinds_are_completed(constraint: Constraint) -> None:
    least, masks = shortest(constraint, "bytes"), TokenMasks(263)
    for most in (least, least + 1, least + 7, least + 90):
        tokens, stopped = answer(made(constraint, "bytes", most), masks, random.Random(most), most)
        matcher = Grammars(VOCABULARIES["bytes"]).matcher(constraint)
        assert stopped
        assert matcher.consume_tokens([token for token in tokens if token != STOP])
        assert matcher.is_accepting()


def test_an_answer_that_does_not_fit_ends_by_its_length() -> None:
    tokens, stopped = answer(made(regex("a{9}", close_at_limit=True), "bytes", 5), TokenMasks(263), random.Random(), 5)
    assert (tokens, stopped) == ([97] * 5, False)


def test_an_extensible_answer_stops_where_nothing_else_would_fit() -> None:
    """Behind "a" the grammar is complete; "b" would need four tokens more."""
    row = made(regex("a(bcdef)?", close_at_limit=True), "bytes", 4)
    row.accept(row.settle(97))
    assert row.settle(98) == STOP
    assert row.settle(STOP) == STOP
