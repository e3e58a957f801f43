"""Lark grammars inside of JSON strings, against llguidance itself."""

from __future__ import annotations

import json

import pytest
from llguidance import LLMatcher, LLTokenizer

from treadle.text.formats.base import REQUIRED, ToolChoice, ToolFormat, ToolSpec
from treadle.text.formats.hermes import Hermes
from treadle.text.formats.json_lark import in_json
from treadle.text.formats.mistral import Mistral
from treadle.text.formats.qwen3_coder import Qwen3Coder

PATCH = r"""
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?
hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?
filename: /(.+)/
add_line: "+" /(.*)/ LF -> line
change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF // a line
eof_line: "*** End of File" LF
%import common.LF
"""
"""As Codex sends it for its tool apply_patch."""


def accepts(grammar: str, text: str) -> bool:
    """Whether the grammar matches the whole text."""
    matcher = LLMatcher(LLTokenizer("byte", slices=[]), grammar, log_level=0)
    assert not matcher.get_error(), matcher.get_error()
    data = list(text.encode())
    return bool(matcher.validate_tokens(data) == len(data) and matcher.consume_tokens(data) and matcher.is_accepting())


@pytest.mark.parametrize(
    ("grammar", "texts"),
    [
        (PATCH, ("*** Begin Patch\n*** Add File: a \"b\".txt\n+x = '\\n'\t\n+\n*** End Patch",)),
        (PATCH, ("*** Begin Patch\n*** Update File: c/d é.py\n@@ f()\n-a\n+b\n*** End Patch\n",)),
        (PATCH, ("*** Begin Patch\n*** Nonsense\n*** End Patch", "*** Begin Patch\n*** End Patch", "")),
        (r'start: /[^"]+/', ("a\nb\\", 'a"b')),
        (r'start: /["\\]+/', ('"\\"', "a", "")),
        (r"start: /\S+ \w\d\// | /\s/", ('"\\a 1', "é_ x1/", "\n", "\t", "a")),
        (r'start: "!".."~"', ("a", '"', "\\", " ", "\n")),
        (r'start: "say \"hi\"\n"i?', ()),
        (r'start: "SAY"i "\\" WORD' "\n%import common.WORD", ("say\\hello", "sAy\\", "say hello")),
        (
            r"start: A{2,3} NL" "\nA: /[a-c]/ | /(?:x|y)/\n%import common.NEWLINE -> NL",
            ("abx\n", "a\n", "abcb\n", "ab\r\n\n"),
        ),
        (r"start: WS /[^a\n]/" "\n%import common.WS", (" \n\tb", "b", " a", ' "')),
        (r"start: A+" "\nA: /[a-z]/\n%ignore / +/", ("a b c", "A")),
        (r'start: "NL is" SP NL' "\nSP: / /\nNL: /\\n/", ("NL is \n", "NL is\n")),
        (r"start: /\x41\u00e9\x22/", ('Aé"', "A")),
        (r"start: /[\n]\r?\\/ ", ("\n\\", "\n\r\\", "\n")),
    ],
)
def test_the_rewritten_grammar_matches_the_same_texts(grammar: str, texts: tuple[str, ...]) -> None:
    rewritten = in_json(grammar)
    if not texts:
        assert rewritten is None
        return
    assert rewritten is not None
    nested = 'start: "\\"" inner "\\""\ninner: %lark {\n' + rewritten + "\n}"
    for text in texts:
        assert accepts(nested, json.dumps(text, ensure_ascii=False)) == accepts(grammar, text), text


@pytest.mark.parametrize(
    "grammar",
    [
        'start: %json {"type": "string"}',
        "start: @other",
        "start: <|tool|>",
        "start: /a/i",
        "start: /(?i)a/",
        "start: /^a$/",
        r"start: /\p{L}/",
        "start: A\n%import common.ESCAPED_STRING -> A",
        "start: A\n%import other.A",
        r'start: "\x"',
        "start: /[z-a]/",
        "start: A\nA: /a/\n%ignore /[\\n]+/",
        "start: /[\n]/",
    ],
)
def test_what_is_not_rewritten_is_known(grammar: str) -> None:
    assert in_json(grammar) is None


TOOL = ToolSpec(
    name="apply_patch", parameters={"type": "object", "properties": {"input": {"type": "string"}}}, text_grammar=PATCH
)
GOOD = '*** Begin Patch\n*** Delete File: "a"\n*** End Patch\n'


@pytest.mark.parametrize(
    ("tool_format", "call"),
    [
        (Hermes(), '<tool_call>\n{"name": "apply_patch", "arguments": {"input": %s}}\n</tool_call>'),
        (Mistral(), '[TOOL_CALLS]apply_patch[ARGS]{"input": %s}'),
    ],
)
def test_calls_are_held_to_a_grammar_of_their_text(tool_format: ToolFormat, call: str) -> None:
    constraint = tool_format.constraint([TOOL], ToolChoice(REQUIRED), parallel=False)
    assert constraint is not None
    for text, good in ((GOOD, True), (GOOD.replace("Delete", "Erase"), False)):
        assert accepts(constraint.grammar, call % json.dumps(text)) is good


def test_texts_between_markers_follow_the_grammar_as_it_stands() -> None:
    constraint = Qwen3Coder().constraint([TOOL], ToolChoice(REQUIRED), parallel=False)
    assert constraint is not None
    call = "<tool_call>\n<function=apply_patch>\n<parameter=input>\n%s\n</parameter>\n</function>\n</tool_call>"
    for text, good in ((GOOD, True), (GOOD.replace("Delete", "Erase"), False)):
        assert accepts(constraint.grammar, call % text) is good
