"""Ends of forced calls: a short completion is found for the grammars of all formats, also in their texts."""

from __future__ import annotations

from typing import Any

import pytest

from tests.text.formats.walks import Walker
from treadle.grammar.build import json_rule
from treadle.grammar.completions import ending_of
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
