"""Streams of answers that are read for reasoning and tool calls: tokens in, events out."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from tests.text.formats.byte_model import ByteModel
from tests.text.formats.vectors import all_vectors
from tests.text.formats.vectors.vector import Vector, call, merged
from treadle.core.messages import TokenLogprob
from treadle.text import TextDelta
from treadle.text.answer_stream import AnswerStream
from treadle.text.events import CallStart, Event, Malformed, Reasoning, Text
from treadle.text.formats.reader import ReaderSetup
from treadle.text.formats.reasoning import MARKERS

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|channel|>", "<|message|>", "<|end|>")
MODEL = ByteModel(SPECIAL)
SETUP = ReaderSetup("hermes", MARKERS["think"], tools=("find",))
CALL = '<tool_call>\n{"name": "find", "arguments": {"q": "END"}}\n</tool_call>'
ARGUMENTS = '{"q": "END"}'


def tokens_of(text: str, model: ByteModel = MODEL) -> list[int]:
    return list(text.encode()) if model is MODEL else model.tokens([(text, False)])


def drive(stream: AnswerStream, tokens: Sequence[int], size: int = 1) -> list[TextDelta]:
    deltas = []
    for start in range(0, len(tokens), size):
        part = tokens[start : start + size]
        deltas.append(stream.push(part, [TokenLogprob(-float(start + i)) for i in range(len(part))]))
    return [*deltas, stream.finish()]


def events_of(deltas: Sequence[TextDelta]) -> list[Event]:
    return merged(event for delta in deltas for event in delta.events)


def text_of(deltas: Sequence[TextDelta]) -> str:
    return "".join(delta.text for delta in deltas)


def entries_text(deltas: Sequence[TextDelta]) -> str:
    return bytes(entry.token for delta in deltas for entry in delta.entries).decode()


@pytest.mark.parametrize("vector", all_vectors(), ids=lambda v: f"{v.setup.format}: {v.name}")
def test_tokens_that_cut_markers_and_code_points_give_the_same_events(vector: Vector) -> None:
    model = ByteModel(vector.special)
    tokens, draw = model.tokens(vector.segments()), random.Random(vector.name)
    for size in (1, 2, draw.randint(3, 40), len(tokens)):
        deltas = drive(AnswerStream(model.view, vector.setup, logprobs=True), tokens, max(size, 1))
        assert events_of(deltas) == list(vector.events)
        assert text_of(deltas) == "".join(event.text for event in vector.events if isinstance(event, Text))
        assert sum(delta.tokens for delta in deltas) == len(tokens)


@pytest.mark.parametrize("vector", all_vectors(), ids=lambda v: f"{v.setup.format}: {v.name}")
def test_log_probabilities_are_those_of_the_visible_text(vector: Vector) -> None:
    model = ByteModel(vector.special)
    deltas = drive(AnswerStream(model.view, vector.setup, logprobs=True), model.tokens(vector.segments()))
    visible = [model.token_decoder.bytes_of(entry.token) for delta in deltas for entry in delta.entries]
    assert b"".join(visible).decode() == text_of(deltas)
    shown = 0
    for delta in deltas:
        shown += len(delta.text)
        assert all(entry.text_offset <= shown for entry in delta.entries)


def test_offsets_point_into_the_visible_text() -> None:
    deltas = drive(AnswerStream(MODEL.view, SETUP, logprobs=True), tokens_of(f"<think>Hm</think>\n\nab{CALL}cd"))
    assert [entry.text_offset for delta in deltas for entry in delta.entries] == [0, 1, 2, 3]


def test_a_stop_string_is_found_in_visible_text_alone() -> None:
    text = f"<think>END</think>Yes\n{CALL}\nso END not"
    stream = AnswerStream(MODEL.view, SETUP, ["END"], logprobs=True)
    deltas = drive(stream, tokens_of(text))
    assert events_of(deltas) == [Reasoning("END"), Text("Yes"), *call(0, "find", ARGUMENTS), Text("\nso ")]
    assert stream.stop == "END"
    assert stream.tokens == len(text) - len(" not")
    assert entries_text(deltas) == "Yes\nso "


def test_a_stop_string_does_not_span_a_call() -> None:
    stream = AnswerStream(MODEL.view, SETUP, ["ab"])
    assert events_of(drive(stream, tokens_of(f"a{CALL}b"))) == [Text("a"), *call(0, "find", ARGUMENTS), Text("b")]
    assert stream.stop is None


def test_events_behind_a_stop_string_are_dropped() -> None:
    stream = AnswerStream(MODEL.view, SETUP, ["END"])
    tokens = tokens_of(f"ENDE{CALL}")
    delta = stream.push(tokens)
    assert delta == TextDelta("", 3, (), "END")
    assert stream.ended
    assert stream.finish() == TextDelta()


def test_stop_strings_wait_for_min_tokens() -> None:
    stream = AnswerStream(MODEL.view, SETUP, ["a"], min_tokens=4)
    assert text_of(drive(stream, tokens_of("a b a c"))) == "a b "


def test_tokens_of_reasoning_are_counted_with_its_markers() -> None:
    model = ByteModel(("<think>", "</think>"))
    tokens = model.tokens([("<think>", True), ("abc", False), ("</think>", True), ("\nYes", False)])
    stream = AnswerStream(model.view, SETUP)
    drive(stream, tokens)
    assert stream.reasoning_tokens == 5


def test_reasoning_that_the_prompt_opened_is_counted() -> None:
    stream = AnswerStream(MODEL.view, ReaderSetup(reasoning=MARKERS["think"], opened=True))
    drive(stream, tokens_of("abc</think>Yes"))
    assert stream.reasoning_tokens == len("abc</think>")


def test_special_tokens_that_are_no_markers_are_hidden_unless_they_are_asked_for() -> None:
    tokens = MODEL.tokens([("a", False), ("<|im_start|>", True), ("b", False)])
    assert text_of(drive(AnswerStream(MODEL.view, SETUP), tokens)) == "ab"
    stream = AnswerStream(MODEL.view, SETUP, skip_special_tokens=False)
    assert text_of(drive(stream, tokens)) == "a<|im_start|>b"


def test_a_marker_ends_an_incomplete_code_point() -> None:
    model, half = ByteModel(("<|channel|>", "<|message|>")), "é".encode()[0]
    tokens = [half, *model.tokens([("<|channel|>", True), ("final", False), ("<|message|>", True), ("b", False)])]
    stream = AnswerStream(model.view, ReaderSetup("harmony"))
    assert events_of(drive(stream, tokens)) == [Text("\ufffdb")]


def test_a_stop_token_counts_and_is_not_read() -> None:
    stream = AnswerStream(MODEL.view, SETUP)
    tokens = [*tokens_of("Yes"), MODEL.named_ids["<|im_end|>"]]
    delta = stream.push(tokens, stop_token=True)
    assert (delta.text, delta.tokens) == ("Yes", 4)


def test_what_was_no_call_is_reported() -> None:
    stream = AnswerStream(MODEL.view, SETUP)
    deltas = drive(stream, tokens_of("<tool_call>no"))
    assert events_of(deltas) == [Malformed(""), Text("<tool_call>no")]
    assert len(stream.malformed) == 1
    assert not [event for event in events_of(deltas) if isinstance(event, CallStart)]
