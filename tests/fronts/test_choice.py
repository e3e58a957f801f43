"""Choices: deltas of a generation in, pieces with events out."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest

from tests.support.aio import in_loop
from tests.text.formats.byte_model import ByteModel
from tests.text.formats.vectors.vector import call, merged
from treadle.core.messages import CancelReason, Finish, FinishReason, Output, Submit
from treadle.engine.generation import Generation
from treadle.fronts.generation.choice import Choice
from treadle.fronts.generation.pieces import LENGTH, STOP, Piece
from treadle.telemetry.access_log import RequestRecord
from treadle.text import TextStream
from treadle.text.answer_stream import AnswerStream
from treadle.text.events import CallArguments, CallStart, Malformed, Reasoning, Text
from treadle.text.formats.reader import ReaderSetup
from treadle.text.formats.reasoning import MARKERS

MODEL = ByteModel(("<|end|>",))
END = MODEL.named_ids["<|end|>"]
SETUP = ReaderSetup("hermes", MARKERS["think"], tools=("find",))
CALL = '<tool_call>\n{"name": "find", "arguments": {"q": 1}}\n</tool_call>'


class Scripted:
    """A generation whose tokens and end are given."""

    def __init__(self, tokens: Sequence[int], finish: Finish) -> None:
        self.cancelled: list[CancelReason] = []
        submit = Submit("a", (1,), max_tokens=len(tokens))
        self.generation = Generation(
            submit, kind="chat", tag="chatcmpl-1", now=0.0, cancel=lambda _, reason: self.cancelled.append(reason)
        )
        self.generation.push(Output("a", admitted=True, tokens=tuple(tokens), finish=finish), 0.0)

    async def pieces(self, text: TextStream) -> tuple[Choice, list[Piece]]:
        record = RequestRecord("1", "POST", "/", 0.0)
        choice = Choice(0, self.generation, text, record, lambda: 0.0, text_logprobs=False, abortable=False)
        return choice, [piece async for piece in choice.pieces()]


def stopped(text: str) -> Scripted:
    return Scripted([*text.encode(), END], Finish(FinishReason.STOP, stop_token_id=END))


@in_loop
async def test_pieces_have_the_events_of_their_text() -> None:
    scripted = stopped(f"<think>Hm</think>Yes\n{CALL}")
    choice, pieces = await scripted.pieces(AnswerStream(MODEL.view, SETUP))
    events = merged(event for piece in pieces for event in piece.events)
    assert events == [Reasoning("Hm"), Text("Yes"), *call(0, "find", '{"q": 1}')]
    assert "".join(piece.text for piece in pieces) == "Yes"
    assert pieces[-1].finish_reason == STOP
    assert choice.reasoning_tokens == len(">Hm</think>")  # it begins with the token that completes the marker
    assert choice.completion_tokens == len(f"<think>Hm</think>Yes\n{CALL}") + 1


@in_loop
async def test_a_call_that_is_cut_off_keeps_what_came() -> None:
    text = '<tool_call>{"name": "find", "arguments": {"q": "a'
    scripted = Scripted(list(text.encode()), Finish(FinishReason.LENGTH))
    _, pieces = await scripted.pieces(AnswerStream(MODEL.view, SETUP))
    assert merged(pieces[-1].events) == [CallStart(0, "find"), CallArguments(0, '{"q": "a')]
    assert pieces[-1].finish_reason == LENGTH


@in_loop
async def test_a_stop_string_in_the_text_ends_the_choice() -> None:
    scripted = stopped(f"<think>END</think>a END b{CALL}")
    _, pieces = await scripted.pieces(AnswerStream(MODEL.view, SETUP, ["END"]))
    assert merged(pieces[-1].events) == [Reasoning("END"), Text("a ")]
    assert (pieces[-1].finish_reason, pieces[-1].stop_string) == (STOP, "END")
    assert scripted.generation.ended


@in_loop
async def test_malformed_calls_are_text_and_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        _, pieces = await stopped("<tool_call>no</tool_call>").pieces(AnswerStream(MODEL.view, SETUP))
    assert merged(pieces[-1].events) == [Malformed(""), Text("<tool_call>no</tool_call>")]
    assert "request chatcmpl-1" in caplog.text
    assert "--tool-parser" in caplog.text


@in_loop
async def test_text_that_is_not_read_has_no_events() -> None:
    choice, pieces = await stopped(CALL).pieces(TextStream(MODEL.view))
    assert pieces[-1].events == ()
    assert pieces[-1].text == CALL
    assert choice.reasoning_tokens == 0
