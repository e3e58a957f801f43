"""Conversations as turns of a chat template: every kind of block, and places that are kept."""

from __future__ import annotations

import re
from typing import Any

import pytest

from treadle.fronts.web.anthropic.signatures import sealed, signature_of, unsealed
from treadle.fronts.web.anthropic.tool_ids import id_for_client, id_for_model
from treadle.fronts.web.anthropic.turns import read_conversation

USER = {"role": "user", "content": "hi"}
MARK = {"type": "ephemeral"}


def turns(*messages: Any, system: Any = None) -> list[dict[str, Any]]:
    return read_conversation(list(messages), system)[0]


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def text(value: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **more}


@pytest.mark.parametrize("system", ["be kind", [text("be kind")], [text("be kind", cache_control=MARK)]])
@pytest.mark.parametrize("content", ["hi", [text("hi")], [text("hi", cache_control={**MARK, "ttl": "5m"})]])
def test_a_string_and_a_block_are_the_same_and_cache_marks_change_nothing(system: Any, content: Any) -> None:
    found = turns({"role": "user", "content": content}, system=system)
    assert found == [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]


def test_blocks_of_text_are_apart_by_one_line_break() -> None:
    assert turns(user(text("a"), text("b\n"), text("c"), text("\nd")))[0]["content"] == "a\nb\nc\nd"


def test_the_header_for_billing_is_not_for_the_model() -> None:
    system = [text("x-anthropic-billing-header: cc_version=1; cch=abc;"), text("be kind")]
    assert turns(USER, system=system) == turns(USER, system="be kind")
    assert turns(USER, system=system[:1]) == turns(USER)


@pytest.mark.parametrize("system", [None, "", []])
def test_an_empty_system_prompt_is_none(system: Any) -> None:
    assert turns(USER, system=system) == [USER]


@pytest.mark.parametrize("role", ["system", "developer"])
def test_instructions_in_mid_conversation_keep_their_place(role: str) -> None:
    found = turns(USER, {"role": role, "content": "now"}, assistant(text("a")), {"role": role, "content": [text("b")]})
    assert [turn["role"] for turn in found] == ["user", "system", "assistant", "system"]


def test_calls_and_results_are_turns_of_their_own() -> None:
    call = {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": "é"}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [text("1"), text("2")], "cache_control": MARK}
    found = turns(USER, assistant(text("I look"), call), user(result, text("go on")))
    assert found[1:] == [
        {
            "role": "assistant",
            "content": "I look",
            "tool_calls": [{"id": "t1", "type": "function", "function": {"name": "f", "arguments": '{"a": "é"}'}}],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "1\n2"},
        {"role": "user", "content": "go on"},
    ]


@pytest.mark.parametrize(
    ("fields", "content"),
    [
        ({}, ""),
        ({"content": None}, ""),
        ({"content": "x"}, "x"),
        ({"content": "x", "is_error": False}, "x"),
        ({"content": "x", "is_error": True}, "Error: x"),
        ({"content": [], "is_error": True}, "Error"),
        ({"content": [{"type": "tool_reference", "tool_name": "f"}]}, "Tool: f"),
    ],
)
def test_results_are_text_and_failed_ones_say_so(fields: dict[str, Any], content: str) -> None:
    (found,) = turns(user({"type": "tool_result", "tool_use_id": "t", **fields}))
    assert found == {"role": "tool", "tool_call_id": "t", "content": content}


def test_earlier_thinking_is_reasoning_and_encrypted_thinking_is_dropped() -> None:
    thought = {"type": "thinking", "thinking": "hm", "signature": "of another server"}
    found = turns(USER, assistant(thought, {"type": "redacted_thinking", "data": "zz"}, text("a")), USER)
    assert found[1] == {"role": "assistant", "content": "a", "reasoning_content": "hm"}


def test_omitted_thinking_is_read_from_its_signature() -> None:
    thought = {"type": "thinking", "thinking": "", "signature": sealed("hm é")}
    assert turns(USER, assistant(thought, text("a")), USER)[1]["reasoning_content"] == "hm é"


@pytest.mark.parametrize("signature", ["", "x", signature_of("hm"), "treadle-text:%", "treadle-text:/w=="])
def test_a_signature_without_a_text_counts_as_none(signature: str) -> None:
    assert unsealed(signature) == ""
    thought = {"type": "thinking", "thinking": "", "signature": signature}
    assert "reasoning_content" not in turns(USER, assistant(thought, text("a")), USER)[1]


def test_documents_and_search_results_are_tagged_text() -> None:
    document = {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "d"}}
    parts = {"type": "document", "source": {"type": "content", "content": [text("e")]}, "citations": {"enabled": False}}
    found = {"type": "search_result", "source": "s", "title": "U", "content": [text("g")]}
    assert turns(user(document, parts, found))[0]["content"] == (
        '<document title="T">\nd\n</document>\n<document>\ne\n</document>\n'
        '<search_result source="s" title="U">\ng\n</search_result>'
    )


def test_successive_messages_of_one_role_are_one_turn() -> None:
    found = turns(USER, user(text("there")), assistant(text("a")), {"role": "assistant", "content": "b"}, USER)
    assert [(turn["role"], turn["content"]) for turn in found] == [
        ("user", "hi\nthere"),
        ("assistant", "ab"),
        ("user", "hi"),
    ]


def test_an_answer_at_the_end_is_continued_unless_it_is_empty() -> None:
    assert read_conversation([USER, assistant(text("It is"))], None)[1]
    assert read_conversation([USER, {"role": "assistant", "content": ""}], None) == ([USER], False)
    assert read_conversation([USER, {"role": "assistant", "content": []}], None) == ([USER], False)
    call = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    assert not read_conversation([USER, assistant(text("a"), call)], None)[1]
    assert not read_conversation([USER, assistant(text("a")), {"role": "system", "content": "b"}], None)[1]


@pytest.mark.parametrize("own", ["functions.weather:0", "a b", "é", "abc123DEF", "call_1"])
def test_an_id_that_the_model_wrote_comes_back_as_it_was(own: str) -> None:
    given = id_for_client(own)
    assert re.fullmatch("[a-zA-Z0-9_-]+", given)
    call = {"type": "tool_use", "id": given, "name": "f", "input": {}}
    found = turns(USER, assistant(call), user({"type": "tool_result", "tool_use_id": given}))
    assert found[1]["tool_calls"][0]["id"] == found[2]["tool_call_id"] == own


@pytest.mark.parametrize("given", ["toolu_own_zz", "toolu_own_ff", "toolu_1", ""])
def test_an_id_that_is_not_ours_stays_as_it_is(given: str) -> None:
    assert id_for_model(given) == given
