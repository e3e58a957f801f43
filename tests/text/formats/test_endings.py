"""Ends of answers: short completions are found for the grammars of all formats, also in their texts and reasoning."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher

from tests.support.grammars import byte_tokenizer, piece_tokenizer
from tests.text.formats.walks import Walker
from treadle.grammar.build import build, json_rule
from treadle.grammar.completions import ending_of
from treadle.text.formats import lark
from treadle.text.formats.base import REQUIRED, ToolChoice, ToolSpec
from treadle.text.formats.registry import FORMATS

TEXT = {"type": "string"}
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"s": TEXT, "n": {"type": "integer"}, "t": {"anyOf": [TEXT, {"type": "null"}]}},
    "required": ["s", "n", "t"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("special", [True, False], ids=["special", "plain"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_call_with_texts_has_a_short_end_in_each_format(name: str, special: bool) -> None:
    form = FORMATS[name]
    walker = Walker(tuple(dict.fromkeys((*form.starts, *form.special))) if special else ())
    constraint = form.constraint(
        (ToolSpec("f", "", PARAMETERS),),
        ToolChoice(REQUIRED),
        parallel=False,
        special=walker.vocabulary.ids,
        schema=lambda schema: json_rule(dict(schema), param="tools", check=False).removeprefix("%json "),
    )
    assert constraint is not None
    matcher = walker.matcher(constraint.grammar)
    first = ending_of(walker._tokenizer, constraint.grammar, matcher.deep_copy()).first
    assert first is not None
    assert len(first) < 400
    assert matcher.consume_tokens(list(first))
    assert matcher.is_accepting()


def written(schema: Any) -> str:
    return json_rule(dict(schema), param="tools", check=False).removeprefix("%json ")


def with_output(text: str) -> str:
    """Return a grammar in JSON, in which `@output` is an object with a text."""
    schema = {"type": "object", "properties": {"s": TEXT}, "required": ["s"], "additionalProperties": False}
    (output,) = json.loads(build("json_schema", schema, param="p").grammar)["grammars"]
    return json.dumps({"grammars": [{"lark_grammar": text}, {**output, "name": "output"}]})


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_beside_a_format_ends_as_a_call_alone(name: str) -> None:
    """The texts of calls have the same ends in a grammar that is written in JSON."""
    form, walker, spec = FORMATS[name], Walker(), ToolSpec("f", "", PARAMETERS)

    def calls(choices: tuple[str, ...]) -> str:
        grammar = lark.Grammar({}, written)
        return grammar.render(lark.any_of((*choices, form.calls((spec,), grammar, several=False))))

    alone, beside = calls(()), with_output(calls(("@output",)))
    expected = ending_of(walker._tokenizer, alone, walker.matcher(alone))
    ending = ending_of(walker._tokenizer, beside, walker.matcher(beside))
    assert ending.candidates == expected.candidates
    assert bytes(ending.first or ()).replace(b" ", b"") == b'{"s":""}'


PIECES = ("as", "anal", "analysis", "final", "commentary", "json", '""', '"}', '":', '","', "]}", '":"', '{"', "null")
HARMONY = FORMATS["harmony"]
HARMONY_SPECIAL = tuple(dict.fromkeys((*HARMONY.starts, *HARMONY.special)))
VOCABULARIES = {
    "bytes": byte_tokenizer(300, HARMONY_SPECIAL),
    "pieces": piece_tokenizer(PIECES, 320, HARMONY_SPECIAL),
}
HARMONY_IDS = {name: VOCABULARIES["bytes"].tokenize_str(name, parse_special=True)[0] for name in HARMONY_SPECIAL}


@pytest.mark.parametrize("name", VOCABULARIES)
@pytest.mark.parametrize("calls", [False, True], ids=["answer", "calls"])
@pytest.mark.parametrize("opened", [False, True], ids=["ahead", "opened"])
def test_reasoning_adds_no_more_than_its_end_to_a_completion(opened: bool, calls: bool, name: str) -> None:
    vocabulary = VOCABULARIES[name]

    def first(*, reasons: bool) -> tuple[int, ...]:
        grammar = lark.Grammar(HARMONY_IDS, written)
        ends = [f"{HARMONY.answer_header(grammar)} @output"]
        if calls:
            ends = [HARMONY.calls((ToolSpec("f", "", PARAMETERS),), grammar, several=False)]
        text = grammar.render(HARMONY.whole_answer(lark.any_of(ends), grammar, reasons=reasons, opened=opened))
        whole = text if calls else with_output(text)
        found = ending_of(vocabulary, whole, LLMatcher(vocabulary, whole)).first
        assert found is not None
        return found

    turn = vocabulary.tokenize_str("<|end|><|start|>assistant", parse_special=True) if opened else []
    assert len(first(reasons=True)) <= len(first(reasons=False)) + len(turn)
