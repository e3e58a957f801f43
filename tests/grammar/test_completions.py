"""Searches for completions: in pieces, joined to known ends, shortened; and the estimate of a completion's growth."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.grammars import Grammars, byte_tokenizer, lark, regex, schema
from treadle.core.messages import Constraint
from treadle.grammar import completions
from treadle.grammar.completions import Ending, Search, completes, ending_of, growth

GRAMMARS = Grammars(byte_tokenizer(263))
LONG = schema({"type": "object", "properties": {"a": {"type": "string", "minLength": 30}}, "required": ["a"]})


def ending(constraint: Constraint) -> Ending:
    return ending_of(GRAMMARS.vocabulary, constraint.grammar, GRAMMARS.matcher(constraint))


def search(constraint: Constraint, most: int = 1000, **options: Any) -> Search:
    return Search(263, ending(constraint).candidates, GRAMMARS.matcher(constraint), most, **options)


def test_a_search_in_pieces_finds_the_same_as_a_whole_one() -> None:
    expected = search(LONG).run(100_000)
    assert expected is not None
    pieces, runs = search(LONG), 0
    while not pieces.over:
        found = pieces.run(8)
        runs += 1
        assert not pieces.over or found == expected
        assert pieces.way == expected[: len(pieces.way)]
    assert runs > 3
    assert pieces.run(8) == expected, "it is still known"
    assert completes(GRAMMARS.matcher(LONG), expected)


def test_a_search_does_no_more_than_its_work() -> None:
    short = search(LONG, work=40)
    assert short.run(1000) is None
    assert short.over
    assert short.work > -40


def test_a_search_ends_where_known_tokens_complete_the_grammar() -> None:
    constraint = regex("[a-z]{6}XYZ")
    assert search(constraint, known=tuple(b"qbcdefXYZ")).run(1000) == list(b"qbcdefXYZ")
    joined = search(constraint, known=tuple(b"?fgXYZ"), most=9)
    found = joined.run(1000)
    assert found is not None
    assert bytes(found).endswith(b"XYZ")
    assert search(constraint, known=tuple(b"XYZ"), most=8).run(10_000) is None


def test_a_completion_is_shortened_by_another_token_in_one_place() -> None:
    constraint = regex("0[a-z]{9}|z")
    assert search(constraint).run(10_000) != list(b"z")
    assert ending(constraint).first == tuple(b"z")


@pytest.mark.parametrize(
    ("constraint", "first"),
    [
        (regex(r"(.|\n)*<\/done>"), b"</done>"),
        (regex(r"(a|\n.)*(.*\n---\n)"), b"\n---\n"),
        (lark('start: text "done"\ntext[stop="</a>"]: /(.|\\n)*/'), b"</a>done"),
        (lark('start: text "done"\ntext[suffix="</a>"]: /(.|\\n)*/'), b"</a>done"),
        (lark('start: (/[a-z]/ "=" /[a-z]/ ";")* "z=" "end"'), b"z=end"),
        (lark('start: item* "z=" "end"\nitem: /[a-z]/ "=" /[a-z]/ ";"'), b"z=end"),
        (schema({"type": "string", "pattern": r"^(.|\n)*-=\+$"}), b'"-=+"'),
    ],
)
def test_texts_behind_repetitions_are_ends(constraint: Constraint, first: bytes) -> None:
    assert bytes(ending(constraint).first or ()) == first


def test_comments_name_no_ends_of_patterns() -> None:
    """The quotes of a long one would each be scanned to the end of its line."""
    found = ending(lark("start: /a*bc/ // /x*junk/"))
    assert found.first == tuple(b"bc")
    assert tuple(b"junk") not in found.candidates


def test_another_branch_is_tried_where_the_first_one_has_no_end() -> None:
    """Any text goes on until its greedy terminal can't be left."""
    assert ending(lark('start: "(" /(.|\\n)+/ ")" | "z"')).first == tuple(b"z")


def test_other_candidates_are_taken_in_circles_alone() -> None:
    """What does not belong to the circle has its shortest texts."""
    fields = {name: {"type": "string"} for name in ("title", "body", "note")}
    value = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    value["x-guidance"] = {"whitespace_flexible": False}
    found = ending(
        lark(f'start: "m" again | "m" "f" object\nagain: "a" ";" start\nobject: %json {json.dumps(value)}')
    ).first
    assert bytes(found or ()) == b'mf{"title":"","body":"","note":""}'


def test_a_grammar_that_is_complete_needs_nothing() -> None:
    assert ending(regex("(abc)?")).first == ()


def test_a_completion_may_not_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completions, "_MOST_WORK", 20)
    assert Search(263, (), GRAMMARS.matcher(LONG), 1000, work=20).run(20) is None
    assert search(regex("a{9}"), 8).run(1000) is None


@pytest.mark.parametrize(
    ("least", "times"), [({}, 1), ({"minLength": 1}, 1), ({"minLength": 30}, 30), ({"minItems": 7}, 7)]
)
def test_growth_is_multiplied_by_repetitions(least: dict[str, int], times: int) -> None:
    grammar = schema({"type": ["string", "array"], **least}).grammar
    assert growth(GRAMMARS.vocabulary, grammar) == 2 * len(grammar) * times


def test_growth_counts_formats_and_is_bounded() -> None:
    assert growth(GRAMMARS.vocabulary, "format") == 2 * len("format") + 40
    assert growth(GRAMMARS.vocabulary, "x{999999}{999999}{999999}") > 1 << 20
    assert growth(GRAMMARS.vocabulary, "x" * (5 << 20)) > 1 << 20
