from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from treadle.text import Detokenizer, TextModel
from treadle.text.token_decoder import ByteTokenDecoder
from treadle.text.window_decoder import WindowTokenDecoder

from . import builders

ALL = [*builders.KINDS, *builders.OTHER_KINDS]
texts = st.lists(
    st.sampled_from(
        ["Hello", " world", "  ", "\n", "é", "日本", "🙂", "👍🏽", "👨‍👩‍👧", "</s>", "<|im_end|>", "a", "\ufffd"]
    )
    | st.characters(exclude_categories=["Cs"]),
    max_size=20,
).map("".join)
shared = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=150)


def streamed(model: TextModel, chunks: Iterable[Sequence[int]], *, skip: bool = True) -> list[str]:
    detokenizer = Detokenizer(model, skip_special_tokens=skip)
    return [*(detokenizer.push(chunk) for chunk in chunks), detokenizer.finish()]


def cut(ids: Sequence[int], borders: Sequence[int]) -> list[Sequence[int]]:
    places = sorted({0, len(ids), *(b % (len(ids) + 1) for b in borders)})
    return [ids[a:b] for a, b in itertools.pairwise(places)]


def test_joining_bytes_serves_every_kind_that_allows_it(text_models: dict[str, TextModel]) -> None:
    served = {kind: type(model.token_decoder) for kind, model in text_models.items()}
    bytewise = dict.fromkeys([*builders.KINDS, "metaspace"], ByteTokenDecoder)
    assert served == {**bytewise, "word_piece": WindowTokenDecoder}


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("skip", [True, False])
@shared
@given(text=texts, borders=st.lists(st.integers(0, 1000), max_size=8))
def test_any_chunking_gives_the_full_decode(
    text_models: dict[str, TextModel], kind: str, skip: bool, text: str, borders: list[int]
) -> None:
    model = text_models[kind]
    own = Tokenizer.from_file(str(model.folder / "tokenizer.json"))
    ids = model.encode(text)
    expected = own.decode(ids, skip_special_tokens=skip)
    assert "".join(streamed(model, cut(ids, borders), skip=skip)) == expected
    assert "".join(streamed(model, [[i] for i in ids], skip=skip)) == expected
    assert model.decode(ids, skip_special_tokens=skip) == expected


@pytest.mark.parametrize("kind", ALL)
@shared
@given(data=st.data())
def test_any_ids_give_the_same_text_in_any_chunking(
    text_models: dict[str, TextModel], kind: str, data: st.DataObject
) -> None:
    model = text_models[kind]
    ids = data.draw(st.lists(st.integers(0, model.vocabulary + 3), max_size=30))
    borders = data.draw(st.lists(st.integers(0, 1000), max_size=8))
    assert "".join(streamed(model, cut(ids, borders))) == "".join(streamed(model, [ids])) == model.decode(ids)


@shared
@given(data=st.data())
def test_any_ids_of_a_byte_level_tokenizer_give_the_tokenizers_own_text(
    byte_level: TextModel, data: st.DataObject
) -> None:
    own = Tokenizer.from_file(str(byte_level.folder / "tokenizer.json"))
    ids = data.draw(st.lists(st.integers(0, byte_level.vocabulary - 1), max_size=30))
    assert "".join(streamed(byte_level, [[i] for i in ids])) == own.decode(ids)


@pytest.mark.parametrize("kind", ["byte_level", "sentence", "gemma"])
def test_a_code_point_comes_whole_with_its_last_token(text_models: dict[str, TextModel], kind: str) -> None:
    model = text_models[kind]
    ids = model.encode("🙃", add_special_tokens=False)
    parts = streamed(model, [[i] for i in ids])
    assert len(ids) > 1
    assert parts[-2:] == ["🙃", ""]
    assert "".join(parts).strip() == "🙃"


@pytest.mark.parametrize("kind", ["byte_level", "sentence"])
def test_bytes_that_form_no_text_are_shown_at_once_and_hold_nothing_back(
    text_models: dict[str, TextModel], kind: str
) -> None:
    model = text_models[kind]
    broken = next(i for i in range(model.vocabulary) if model.token_bytes(i) == b"\xff")
    letter = next(i for i in range(model.vocabulary) if model.token_bytes(i) == b"d")
    detokenizer = Detokenizer(model)
    assert [detokenizer.push([broken]) for _ in range(1000)] == ["\ufffd"] * 1000
    assert detokenizer.push([letter]) == "d"
    assert not detokenizer.pending


def test_half_a_code_point_ends_as_one_replacement(sentence: TextModel) -> None:
    ids = [i for b in b"\xf0\x9f" for i in range(sentence.vocabulary) if sentence.token_bytes(i) == bytes([b])]
    detokenizer = Detokenizer(sentence)
    assert detokenizer.push(ids) == ""
    assert detokenizer.pending
    assert detokenizer.finish() == "\ufffd"


def test_a_real_replacement_character_is_not_held(byte_level: TextModel) -> None:
    detokenizer = Detokenizer(byte_level)
    assert detokenizer.push(byte_level.encode("\ufffd")) == "\ufffd"


def test_only_the_texts_first_space_is_stripped_also_after_special_tokens(sentence: TextModel) -> None:
    ids = sentence.encode("Hello", add_special_tokens=False)
    assert "".join(streamed(sentence, [ids, [2], ids, [2, 2], ids])) == "Hello Hello Hello"


@pytest.mark.parametrize("kind", builders.KINDS)
@shared
@given(text=texts.map(lambda text: text.replace("\ufffd", "")))
def test_windows_give_the_same_text_as_joined_bytes(text_models: dict[str, TextModel], kind: str, text: str) -> None:
    model = text_models[kind]
    ids = model.encode(text, add_special_tokens=False)
    stream = WindowTokenDecoder(Tokenizer.from_file(str(model.folder / "tokenizer.json"))).stream()
    assert "".join([*(stream.push([i]) for i in ids), stream.finish()]) == model.decode(ids, skip_special_tokens=False)


def test_windows_hold_half_a_code_point_and_no_more(sentence: TextModel) -> None:
    broken = next(i for i in range(sentence.vocabulary) if sentence.token_bytes(i) == b"\xff")
    stream = WindowTokenDecoder(Tokenizer.from_file(str(sentence.folder / "tokenizer.json"))).stream()
    parts = [stream.push([broken]) for _ in range(1001)]
    assert all(parts[15:1001:16])
    assert "".join(parts) == "\ufffd" * (1001 - 1001 % 16)
    assert stream.pending
    assert stream.finish() == "\ufffd" * (1001 % 16)


def test_a_tokenizer_without_a_decoder_gives_its_own_text(tmp_path: Path) -> None:
    tokenizer = builders.byte_level()
    tokenizer.decoder = None
    model = TextModel.load(builders.write_folder(tmp_path, tokenizer))
    ids = model.encode("Hello world")
    assert "".join(streamed(model, [[i] for i in ids])) == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", builders.KINDS)
def test_special_tokens_are_hidden_unless_asked_for(text_models: dict[str, TextModel], kind: str) -> None:
    model = text_models[kind]
    special, plain = min(model.special_ids - {0}), model.encode("Hello", add_special_tokens=False)
    ids = [*plain, special]
    assert "".join(streamed(model, [ids])) == "Hello"
    assert "".join(streamed(model, [ids], skip=False)) == "Hello" + model.token_text(special)
