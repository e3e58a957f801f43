"""Structural tags as grammars: what the gateway sends, and every element, against llguidance itself."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from tests.support.bytes_text import bytes_text
from treadle.core.messages import Constraint
from treadle.errors import InvalidRequest
from treadle.fronts.structural_tags import structural_tag

TEXT = bytes_text(
    added=("<tool_call>", "</tool_call>"),
    special=("[TOOL_CALLS]", "<|call_begin|>", "<|call_argument|>", "<|call_end|>", "<|section_end|>"),
)
FILE = (TEXT.folder / "tokenizer.json").read_text()
VOCABULARY = LLTokenizer(FILE, eos_token=list(TEXT.eos_token_ids))
TOKENIZER = Tokenizer.from_str(FILE)
SPECIAL = {token.content: i for i, token in TOKENIZER.get_added_tokens_decoder().items()}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}


def built(tag: Any) -> Constraint:
    return structural_tag(tag, special=SPECIAL, end_ids=TEXT.eos_token_ids, param="structural_tag")


def takes(tag: Any, answer: str) -> bool:
    """Whether the grammar takes the answer, as a whole."""
    matcher = LLMatcher(VOCABULARY, built(tag).grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = TOKENIZER.encode(answer, add_special_tokens=False).ids
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def tag(begin: str, content: Any, end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def arguments(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": schema}


QWEN_TAGS = [
    tag('<tool_call>\n{"name": "weather", "arguments": ', arguments(CITY), "}\n</tool_call>"),
    tag('<tool_call>\n{"name": "time", "arguments": ', arguments(NOTHING), "}\n</tool_call>"),
]
QWEN = {"format": {"type": "triggered_tags", "triggers": ["<tool_call>"], "tags": QWEN_TAGS, "at_least_one": True}}
QWEN_CALL = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
KIMI = {
    "format": {
        "type": "triggered_tags",
        "triggers": ["<|call_begin|>"],
        "tags": [
            {
                "begin": "<|call_begin|>functions.time:0<|call_argument|>",
                "content": arguments(NOTHING),
                "end": "<|call_end|>",
            }
        ],
        "at_least_one": True,
    }
}
KIMI_CALL = "<|call_begin|>functions.time:0<|call_argument|>{}<|call_end|>"
MISTRAL_TAGS = {
    "type": "tags_with_separator",
    "tags": [{"begin": '{"name": "time", "arguments": ', "content": arguments(NOTHING), "end": "}"}],
    "separator": ", ",
    "at_least_one": True,
}
MISTRAL = {
    "format": {
        "type": "triggered_tags",
        "triggers": ["[TOOL_CALLS]"],
        "tags": [{"begin": "[TOOL_CALLS] [", "content": MISTRAL_TAGS, "end": "]"}],
        "at_least_one": True,
    }
}
MISTRAL_CALL = '{"name": "time", "arguments": {}}'


@pytest.mark.parametrize(
    ("of", "answer", "taken"),
    [
        (QWEN, QWEN_CALL, True),
        (QWEN, f"{QWEN_CALL}\n{QWEN_CALL} Done.", True),
        (QWEN, f"Hello {QWEN_CALL}", False),
        (QWEN, "", False),
        (QWEN, QWEN_CALL.replace("time", "date"), False),
        (QWEN, f"{QWEN_CALL}\n{QWEN_CALL.replace('{}', '[]')}", False),
        (KIMI, KIMI_CALL, True),
        (KIMI, f"{KIMI_CALL}{KIMI_CALL}<|section_end|>", True),
        (KIMI, f"{KIMI_CALL}<|section_end|><|call_begin|>functions.date", False),
        (MISTRAL, f"[TOOL_CALLS] [{MISTRAL_CALL}]", True),
        (MISTRAL, f"[TOOL_CALLS] [{MISTRAL_CALL}, {MISTRAL_CALL}]", True),
        (MISTRAL, f"[TOOL_CALLS] [{MISTRAL_CALL}{MISTRAL_CALL}]", False),
        (MISTRAL, "[TOOL_CALLS] []", False),
    ],
)
def test_the_tags_of_the_gateway_are_enforced(of: Any, answer: str, taken: bool) -> None:
    constraint = built(json.dumps(of))  # as text, like the gateway
    assert (constraint.kind, constraint.triggers, constraint.then_free) == ("structural_tag", (), False)
    assert constraint == built(of)
    assert takes(of, answer) is taken


def test_stop_after_first_takes_one_tag_alone() -> None:
    one = {"format": {**QWEN["format"], "stop_after_first": True}}
    assert takes(one, QWEN_CALL)
    assert not takes(one, f"{QWEN_CALL}{QWEN_CALL}")
    several = {"format": {**MISTRAL_TAGS, "stop_after_first": True, "at_least_one": False}}
    assert takes(several, "")
    assert not takes(several, f"{MISTRAL_CALL}, {MISTRAL_CALL}")


@pytest.mark.parametrize("stop", [False, True])
def test_tags_that_may_be_missing_are_triggers_of_the_engine(stop: bool) -> None:
    of = {"format": {"type": "triggered_tags", "triggers": "<tool_call>", "tags": QWEN_TAGS, "stop_after_first": stop}}
    constraint = built(of)
    assert (constraint.triggers, constraint.then_free) == (("<tool_call>",), not stop)
    assert takes(of, QWEN_CALL)
    assert not takes(of, f"Hello {QWEN_CALL}")


def test_the_older_form_is_read() -> None:
    old = {
        "type": "structural_tag",
        "structures": [{"begin": "<fn=time>", "schema": NOTHING, "end": "</fn>"}],
        "triggers": ["<fn="],
    }
    constraint = built(old)
    assert (constraint.kind, constraint.triggers, constraint.then_free) == ("structural_tag", ("<fn=",), True)
    assert takes(old, "<fn=time>{}</fn>")
    assert not takes(old, "<fn=time>{}x")


ANY = {"type": "any_text"}
A, B = ({"type": "const_string", "value": value} for value in "ab")


@pytest.mark.parametrize(
    ("element", "taken", "refused"),
    [
        (A, ["a"], ["b", "", "aa"]),
        ({"type": "sequence", "elements": [A, B]}, ["ab"], ["a", "ba"]),
        ({"type": "or", "elements": [A, B]}, ["a", "b"], ["ab"]),
        ({"type": "regex", "pattern": r"[a-c]+/\/\d"}, ["ab//1"], ["ab", "d//1"]),
        (arguments(NOTHING), ["{}"], ["[]", '{"a": 1}']),
        (arguments(True), ["{}", "[1]"], ["x"]),
        (ANY, ["", "Grüße\n<|section_end|>"], []),
        (tag("<", ANY, ">"), ["<>", "<a\nb>"], ["<a", "<a>b"]),
        (tag("<", ANY, ["</a>", "</b>"]), ["<x</b>", "<</a>"], ["<x</c>"]),
        (tag("[TOOL_CALLS]", ANY, "<|call_end|>"), ["[TOOL_CALLS]a<|call_end|>"], ["[TOOL_CALLS]a"]),
        (tag("<", A, ["", ">"]), ["<a", "<a>"], ["<b>"]),
        (
            {
                "type": "sequence",
                "elements": [A, {"type": "triggered_tags", "triggers": ["<"], "tags": [tag("<x>", B, "!")]}],
            },
            ["a", "a b c", "a <x>b! and <x>b!"],
            ["a <y>"],
        ),
    ],
)
def test_each_element_takes_what_it_says(element: Any, taken: list[str], refused: list[str]) -> None:
    for answer in taken:
        assert takes({"format": element}, answer), answer
    for answer in refused:
        assert not takes({"format": element}, answer), answer


def nested(levels: int) -> str:
    inner = '{"type":"or","elements":[' * levels + '{"type":"const_string","value":"a"}' + "]}" * levels
    return '{"format":' + inner + "}"


@pytest.mark.parametrize(
    ("spec", "place"),
    [
        ("{", "structural_tag"),
        ("[]", "structural_tag"),
        ("\ud800", "structural_tag"),
        ("{}", "structural_tag.structures"),
        ({"structures": [5]}, "structural_tag.structures[0]"),
        ({"structures": [{}], "triggers": ["<"]}, "structural_tag.tags[0].begin"),
        ({"format": 5}, "structural_tag.format"),
        ({"format": {}}, "structural_tag.format.type"),
        ({"format": {"type": "qwen_xml_parameter"}}, "structural_tag.format.type"),
        ({"format": {"type": ["or"]}}, "structural_tag.format.type"),
        ({"format": {"type": "or", "elements": []}}, "structural_tag.format.elements"),
        ({"format": {"type": "or", "elements": [A, {"type": "regex"}]}}, "structural_tag.format.elements[1].pattern"),
        ({"format": {"type": "any_text", "excludes": ["x"]}}, "structural_tag.format.excludes"),
        ({"format": tag("<", {"type": "any_text", "excludes": ["x"]}, ">")}, "structural_tag.format.content.excludes"),
        ({"format": tag("<", A, [])}, "structural_tag.format.end"),
        ({"format": tag("<", A, None)}, "structural_tag.format.end"),
        ({"format": arguments(5)}, "structural_tag.format.json_schema"),
        ({"format": arguments({"type": "integr"})}, "structural_tag.format.json_schema.type"),
        ({"format": {"type": "regex", "pattern": "["}}, "structural_tag.format.pattern"),
        ({"format": {"type": "regex", "pattern": ""}}, "structural_tag.format.pattern"),
        ({"format": {**arguments({}), "style": "qwen_xml"}}, "structural_tag.format.style"),
        (
            {"format": {"type": "triggered_tags", "triggers": ["["], "tags": [tag("<", A, "")], "at_least_one": True}},
            "structural_tag.format.tags[0].begin",
        ),
        (
            {"format": {"type": "triggered_tags", "triggers": ["["], "tags": [tag("<", A, "")]}},
            "structural_tag.format.tags[0].begin",
        ),
        (nested(400), "structural_tag"),
        (nested(100_000), "structural_tag"),
    ],
)
def test_a_fault_is_refused_with_its_place(spec: Any, place: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        built(spec)
    assert refused.value.param == place
    assert refused.value.message.startswith(place)
