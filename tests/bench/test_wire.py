"""What is sent, and what an answer's bytes say, however they are cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.bench.plan import PromptMessage, Request
from treadle.bench.wire import AnswerReader, body_of, error_of

TALK = (PromptMessage("system", "Be brief."), PromptMessage("user", "Hi"))


def chunk(**delta: Any) -> bytes:
    finish = delta.pop("finish_reason", None)
    return b"data: " + json.dumps({"choices": [{"delta": delta, "finish_reason": finish}]}).encode() + b"\n\n"


WHOLE = (
    chunk(role="assistant", content="")
    + chunk(content="a")
    + b": keep-alive\n\n"
    + chunk(content="\u00e9\u4e2d")
    + chunk(finish_reason="stop")
    + b'data: {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3, '
    b'"prompt_tokens_details": {"cached_tokens": 4}}}\r\n\r\n'
    b"data: [DONE]\n\n"
)


@given(st.lists(st.integers(0, len(WHOLE)), max_size=20))
def test_an_answer_says_the_same_however_it_is_cut(cuts: list[int]) -> None:
    reader, at = AnswerReader(stream=True), 0
    pieces = 0
    for cut in [*sorted(cuts), len(WHOLE)]:
        pieces += reader.feed(WHOLE[at:cut])
        at = cut
    assert (pieces, reader.finish_reason, reader.done, reader.whole, reader.error) == (2, "stop", True, True, "")
    assert [reader.count(f"{name}_tokens") for name in ("prompt", "completion", "cached")] == [5, 3, 4]


def test_reasoning_and_tool_calls_are_pieces_too() -> None:
    reader = AnswerReader(stream=True)
    assert reader.feed(chunk(reasoning_content="hm") + chunk(tool_calls=[{"index": 0}]) + chunk(reasoning="x")) == 3


def test_text_completions_speak_as_text() -> None:
    reader = AnswerReader(stream=True)
    assert reader.feed(b'data: {"choices": [{"text": "a"}]}\n\ndata: {"choices": [{"text": ""}]}\n\n') == 1
    assert not reader.whole


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b'data: {"error": {"code": "engine_died", "message": "gone"}}\n\n', "engine_died"),
        (b'data: {"error": "out of memory"}\n\n', "out of memory"),
        (b"data: {torn\n\n", "not JSON"),
        (b"data: [1]\n\n", "not an object"),
    ],
)
def test_an_error_inside_an_answer_is_an_error(data: bytes, error: str) -> None:
    reader = AnswerReader(stream=True)
    reader.feed(chunk(content="a") + data)
    assert reader.error == error


def test_an_answer_in_one_piece_is_read_at_its_end() -> None:
    reader = AnswerReader(stream=False)
    body = json.dumps(
        {"choices": [{"message": {"content": "a"}, "finish_reason": "length"}], "usage": {"completion_tokens": 1}}
    ).encode()
    assert (reader.feed(body[:9]), reader.feed(body[9:]), reader.pieces) == (0, 0, 0)
    reader.end()
    assert (reader.pieces, reader.whole, reader.count("completion_tokens")) == (1, True, 1)


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (b'{"error": {"code": "text_generation_busy"}}', "text_generation_busy"),
        (b'{"error": {"code": null, "type": "overloaded"}}', "overloaded"),
        (b'{"detail": "no"}', "no"),
        (b"<h1>Bad Gateway</h1>", "<h1>Bad Gateway</h1>"),
        (b"", ""),
    ],
)
def test_an_error_has_a_short_name(body: bytes, name: str) -> None:
    assert error_of(body) == name


def test_both_routes_ask_for_the_same() -> None:
    request = Request("1", TALK, 7)
    chat = json.loads(body_of(request, "m", "chat", {"ignore_eos": True}))
    text = json.loads(body_of(request, "m", "completions", {}))
    assert chat["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert text["prompt"] == "system: Be brief.\n\nuser: Hi\n\nassistant:"
    for body in (chat, text):
        assert (body["model"], body["max_tokens"], body["temperature"], body["stream"]) == ("m", 7, 0, True)
        assert body["stream_options"] == {"include_usage": True}
    assert chat["ignore_eos"] is True
    assert "stream" not in json.loads(body_of(Request("1", TALK, 7, stream=False), "m", "chat", {}))
