"""Calls of text jobs on the event loop."""

from __future__ import annotations

import msgspec
import pytest

from tests.fronts.web.server import front
from tests.support.aio import in_loop
from treadle.errors import InvalidRequest
from treadle.fronts.answer_options import NO_OPTIONS, AnswerOptions, OutputGrammar
from treadle.fronts.text_jobs import about_grammar, grammar_of
from treadle.text.formats.base import NONE, ToolChoice, ToolSpec
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


def test_a_grammar_is_known_by_what_it_is_made_from() -> None:
    tools = AnswerOptions(tools=(ToolSpec("run", "", {}),))
    other = AnswerOptions(output=OutputGrammar("regex", "b", "structured_outputs.regex"))
    assert len({grammar_of(FORMAT), grammar_of(other), grammar_of(tools), b""}) == 4
    assert grammar_of(msgspec.structs.replace(FORMAT, prediction="x")) == grammar_of(FORMAT)
    assert grammar_of(NO_OPTIONS) == b""
    assert grammar_of(msgspec.structs.replace(tools, choice=ToolChoice(NONE))) == b""


@in_loop
async def test_workers_are_told_of_the_grammar_that_they_check() -> None:
    """Also where the body is large, and its content stays in a worker."""
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["a"]}}}
    async with front(context=400_000) as f:
        for words in ("hi", "hi " * 40_000):
            for given in ({"response_format": schema}, {}):
                turns = [{"role": "user", "content": words}]
                assert (await f.chat(messages=turns, max_tokens=1, **given)).status == 200
                assert (await f.complete(prompt=words, max_tokens=1, **given)).status == 200
        chat, text, *others = f.texts.pool.grammars
    assert chat
    assert text
    assert others == [b"", b"", b"", chat, b"", text, b"", b"", b"", b""]
