from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.core.messages import TokenLogprob
from treadle.text import TextDelta, TextModel, TextStream

TEXT = "Hello 🙂 world\nUser: naïve café 🙃 END of it"


def entries_of(ids: Sequence[int]) -> list[TokenLogprob]:
    return [TokenLogprob(-float(i)) for i in range(len(ids))]


def drive(stream: TextStream, ids: Sequence[int], size: int = 1, *, stop_token: bool = False) -> list[TextDelta]:
    logprobs, deltas = entries_of(ids), []
    for start in range(0, len(ids), size):
        last = stop_token and start + size >= len(ids)
        part = slice(start, start + size)
        deltas.append(stream.push(ids[part], logprobs[part], stop_token=last))
    return [*deltas, stream.finish()]


def text_of(deltas: Sequence[TextDelta]) -> str:
    return "".join(delta.text for delta in deltas)


def test_plain_text_comes_whole_and_counts_every_token(byte_level: TextModel) -> None:
    ids = byte_level.encode(TEXT)
    deltas = drive(TextStream(byte_level), ids)
    assert text_of(deltas) == TEXT
    assert sum(delta.tokens for delta in deltas) == len(ids)
    assert [e.token for delta in deltas for e in delta.entries] == ids


def test_usage_counts_to_the_token_that_completed_the_stop_and_drops_the_rest(byte_level: TextModel) -> None:
    head, tail = byte_level.encode("Hello world\nUser:"), byte_level.encode(" and more")
    stream = TextStream(byte_level, ["\nUser:"])
    delta = stream.push([*head, *tail])
    assert delta == TextDelta("Hello world", len(head), (), "\nUser:")
    assert stream.ended
    assert stream.push(tail) == TextDelta(stop="\nUser:")
    assert stream.finish() == TextDelta()
    assert stream.tokens == len(head)


@settings(deadline=None)
@given(size=st.integers(1, 40), stops=st.lists(st.sampled_from(["END", "\nUser:", "🙃", "lo 🙂", "xyz"]), max_size=3))
def test_however_tokens_arrive_the_outcome_is_the_same(byte_level: TextModel, size: int, stops: list[str]) -> None:
    ids = byte_level.encode(TEXT)
    one, many = (drive(TextStream(byte_level, stops), ids, n) for n in (1, size))
    assert text_of(one) == text_of(many)
    assert sum(d.tokens for d in one) == sum(d.tokens for d in many)
    assert [e for d in one for e in d.entries] == [e for d in many for e in d.entries]


@pytest.mark.parametrize("stops", [[], ["END"], ["\nUser:"], ["café"], ["🙃"]])
def test_entries_come_with_their_text_and_never_before(byte_level: TextModel, stops: list[str]) -> None:
    shown = 0
    for delta in drive(TextStream(byte_level, stops), byte_level.encode(TEXT)):
        shown += len(delta.text)
        assert all(entry.text_offset <= shown for entry in delta.entries)
        assert not delta.entries or max(e.text_offset for e in delta.entries) < max(shown, 1)


def test_entries_of_a_split_code_point_wait_for_it_and_share_its_offset(byte_level: TextModel) -> None:
    ids = byte_level.encode("🙃")
    stream = TextStream(byte_level)
    deltas = [stream.push([i], [TokenLogprob(-1.0)]) for i in ids]
    assert [len(delta.entries) for delta in deltas] == [0] * (len(ids) - 1) + [len(ids)]
    assert {entry.text_offset for entry in deltas[-1].entries} == {0}


def test_entries_of_a_possible_stop_wait_and_come_when_it_is_none(byte_level: TextModel) -> None:
    ids = byte_level.encode("a EN") + byte_level.encode("X")
    stream = TextStream(byte_level, ["END"])
    held = [len(stream.push([i], [TokenLogprob(-1.0)]).entries) for i in ids[:-1]]
    assert sum(held) < len(ids) - 1
    assert sum(held) + len(stream.push(ids[-1:], [TokenLogprob(-1.0)]).entries) == len(ids)


def test_entries_of_the_stop_itself_never_come(byte_level: TextModel) -> None:
    before, stop = byte_level.encode("Hello"), byte_level.encode("END")
    deltas = drive(TextStream(byte_level, ["END"]), [*before, *stop])
    assert [e.token for d in deltas for e in d.entries] == before
    assert sum(d.tokens for d in deltas) == len(before) + len(stop)


def test_a_token_partly_before_the_cut_keeps_its_entry(byte_level: TextModel) -> None:
    ids = byte_level.encode("Hello")
    word = byte_level.token_text(ids[-1])
    assert len(word) > 1
    deltas = drive(TextStream(byte_level, [word[-1]]), ids[-1:])
    assert text_of(deltas) == word[:-1].split(word[-1])[0]
    assert len([e for d in deltas for e in d.entries]) == 1


def test_text_offsets_point_into_the_shown_text(byte_level: TextModel) -> None:
    ids = byte_level.encode(TEXT)
    deltas = drive(TextStream(byte_level), ids, 5)
    shown = text_of(deltas)
    for entry in (e for d in deltas for e in d.entries):
        whole = byte_level.token_text(entry.token)
        if "\ufffd" not in whole:
            assert shown[entry.text_offset :].startswith(whole)


def test_a_stop_token_counts_and_shows_nothing(byte_level: TextModel) -> None:
    ids = byte_level.encode("Hello world.")
    deltas = drive(TextStream(byte_level), ids, 3, stop_token=True)
    assert text_of(deltas) == "Hello world"
    assert sum(d.tokens for d in deltas) == len(ids)
    assert [e.token for d in deltas for e in d.entries] == ids[:-1]


def test_include_stop_shows_stop_strings_and_stop_tokens(byte_level: TextModel) -> None:
    ids = byte_level.encode("Hello. END and")
    assert text_of(drive(TextStream(byte_level, ["END"], include_stop=True), ids)) == "Hello. END"
    ids = byte_level.encode("Hello.")
    assert text_of(drive(TextStream(byte_level, include_stop=True), ids, stop_token=True)) == "Hello."


def test_stops_are_not_looked_for_before_min_tokens(byte_level: TextModel) -> None:
    ids = byte_level.encode("END") + byte_level.encode("xEND")
    first = len(byte_level.encode("END"))
    stream = TextStream(byte_level, ["END"], min_tokens=first)
    assert text_of(drive(stream, ids)) == "ENDx"
    assert stream.stop == "END"


def test_finish_releases_held_text_and_half_code_points(byte_level: TextModel) -> None:
    ids = byte_level.encode("so EN") + byte_level.encode("🙃")[:2]
    stream = TextStream(byte_level, ["END"])
    deltas = drive(stream, ids)
    assert text_of(deltas) == "so EN\ufffd"
    assert len([e for d in deltas for e in d.entries]) == len(ids)
    assert stream.stop is None
    assert stream.finish() == TextDelta()


def test_a_stop_completed_only_by_the_end_is_found(byte_level: TextModel) -> None:
    ids = byte_level.encode("a🙃")[:-1]
    deltas = drive(TextStream(byte_level, ["\ufffd"]), ids)
    assert text_of(deltas) == "a"
    assert deltas[-1].stop == "\ufffd"


def test_special_tokens_show_on_request_only(byte_level: TextModel) -> None:
    ids = byte_level.encode("a<|im_end|>b")
    assert text_of(drive(TextStream(byte_level), ids)) == "ab"
    assert text_of(drive(TextStream(byte_level, skip_special_tokens=False), ids)) == "a<|im_end|>b"
