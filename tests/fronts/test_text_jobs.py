"""Calls of text jobs on the event loop."""

from __future__ import annotations

import pytest

from treadle.errors import InvalidRequest
from treadle.fronts.answer_options import AnswerOptions, OutputGrammar
from treadle.fronts.text_jobs import about_grammar
from treadle.text.work.stages import COMPILING, RENDERING, STAGES, refusal

FORMAT = AnswerOptions(output=OutputGrammar("regex", "a", "structured_outputs.regex"))


@pytest.mark.parametrize(
    ("options", "stage", "param"),
    [
        (FORMAT, COMPILING, "structured_outputs.regex"),
        (AnswerOptions(tools_param="functions"), COMPILING, "functions"),
        (FORMAT, RENDERING, None),
        (None, COMPILING, None),
    ],
)
def test_a_grammar_that_took_too_long_is_named_by_its_field(
    options: AnswerOptions | None, stage: int, param: str | None
) -> None:
    with pytest.raises(InvalidRequest) as raised, about_grammar(options):
        raise InvalidRequest(refusal(STAGES[stage], "took more than 1.0 s"))
    assert raised.value.param == param
