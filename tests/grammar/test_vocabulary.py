"""The vocabulary for grammars, from every kind of tokenizer.json."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer, normalizers

from tests.text import builders
from treadle.errors import ModelError
from treadle.grammar.tokenizer_json import AddedToken
from treadle.grammar.vocabulary import VocabularyThread, read_vocabulary


def written(folder: Path, tokenizer: Tokenizer) -> Path:
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.mark.parametrize("build", [builders.byte_level, builders.sentence, partial(builders.sentence, strip=False)])
def test_tokens_have_the_bytes_that_the_model_means(tmp_path: Path, build: Callable[[], Tokenizer]) -> None:
    tokenizer = build()
    vocabulary = read_vocabulary(written(tmp_path, tokenizer))
    text = "ab cd"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert vocabulary.decode_str(ids).strip() == tokenizer.decode(ids).strip()


def test_a_vocabulary_has_the_size_of_the_logits(tmp_path: Path) -> None:
    tokenizer = builders.byte_level()
    own = tokenizer.get_vocab_size(with_added_tokens=True)
    path = written(tmp_path, tokenizer)
    assert read_vocabulary(path, size=own + 100).vocab_size == own + 100
    assert read_vocabulary(path).vocab_size == own
    assert read_vocabulary(path, size=own - 1).vocab_size == own, "the runner cuts masks to its logits"


def test_tokens_beyond_the_tokenizer_are_never_allowed(tmp_path: Path) -> None:
    tokenizer = builders.byte_level()
    own = tokenizer.get_vocab_size(with_added_tokens=True)
    vocabulary = read_vocabulary(written(tmp_path, tokenizer), size=own + 40)
    mask = LLMatcher(vocabulary, r"start: /(.|\n)*/").compute_bitmask()
    bits = [mask[i // 8] >> i % 8 & 1 for i in range(own + 40)]
    assert any(bits)
    assert not any(bits[own:])


def test_stop_tokens_are_the_given_ones(tmp_path: Path) -> None:
    path = written(tmp_path, builders.byte_level())
    assert read_vocabulary(path, eos_token_ids=(5, 3)).eos_tokens == [5, 3]


def test_tokens_that_only_the_configuration_declares_are_there(tmp_path: Path) -> None:
    tokenizer = builders.byte_level()
    own = tokenizer.get_vocab_size(with_added_tokens=True)
    path = written(tmp_path, tokenizer)
    added: list[AddedToken] = [(own, {"content": "<call>", "special": True}), (own + 1, {"content": "plain one"})]
    vocabulary = read_vocabulary(path, added=added)
    assert vocabulary.is_special_token(own)
    assert not vocabulary.is_special_token(own + 1)
    assert vocabulary.decode_str([own + 1]) == "plain one"
    again: list[AddedToken] = [(own + 2, {"content": content}) for content in ("<other>",)]
    assert read_vocabulary(path, added=[*added, *again]).vocab_size == own + 3


@pytest.mark.parametrize("id_", [5_000, 999_999_999])
def test_ids_of_which_most_have_no_token_are_refused(tmp_path: Path, id_: int) -> None:
    """Before, a token was made for each of them, in all the memory of the machine."""
    path = written(tmp_path, builders.byte_level())
    with pytest.raises(ModelError, match=f"its ids go up to {id_}, and it has [0-9]+ tokens"):
        read_vocabulary(path, added=[(id_, {"content": "<far>"})])


def test_what_the_tokenizer_has_is_not_added_again(tmp_path: Path) -> None:
    path = written(tmp_path, builders.byte_level())
    (first, *_) = msgspec.json.decode(path.read_bytes())["added_tokens"]
    size = read_vocabulary(path).vocab_size
    assert read_vocabulary(path, added=[(first["id"], first), (size, first)]).vocab_size == size


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        (b"", "truncated"),
        (b"[]", "Expected `object`"),
        (b'{"added_tokens": 3}', "Expected `array`"),
        (b'{"version": "1.0"}', "tokenizer.json"),
        (b'{"version": "\xff"}', "tokenizer.json"),
        pytest.param(b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply", id="deep"),
    ],
)
def test_a_file_that_is_none_is_refused_with_the_reason(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ModelError, match=message) as caught:
        read_vocabulary(path)
    assert "\n" not in caught.value.message


def test_a_tokenizer_that_llguidance_does_not_know_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"can't use tokenizer\.json: can't determine decoder type.*Metaspace"):
        read_vocabulary(written(tmp_path, builders.metaspace()))


def test_a_thread_reads_it_beside_other_work(tmp_path: Path) -> None:
    path = written(tmp_path, builders.byte_level())
    goes_on = threading.Event()

    def read() -> LLTokenizer:
        assert goes_on.wait(60)
        return read_vocabulary(path)

    thread = VocabularyThread(read)
    goes_on.set()
    assert thread.result().vocab_size == read_vocabulary(path).vocab_size
    assert thread.result() is thread.result()
    assert thread.seconds > 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_goes_wrong_in_the_thread_is_raised_by_its_result() -> None:
    def refuse() -> LLTokenizer:
        raise ModelError("not this one")

    def panic() -> LLTokenizer:
        raise BaseException("in Rust")

    with pytest.raises(ModelError, match="not this one"):
        VocabularyThread(refuse).result()
    with pytest.raises(ModelError, match="see the log"):
        VocabularyThread(panic).result()


def edited(tokenizer: Tokenizer, edit: Callable[[dict[str, Any]], None], folder: Path) -> Path:
    fields = json.loads(tokenizer.to_str())
    edit(fields)
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(fields))
    return path


@pytest.mark.parametrize("missing", [3, 40])
def test_tokens_keep_their_ids_behind_ids_that_no_token_has(tmp_path: Path, missing: int) -> None:
    def move(fields: dict[str, Any]) -> None:
        ids = fields["model"]["vocab"]
        last = max(ids, key=lambda token: int(ids[token]))
        ids[last] = 500
        fields["added_tokens"].append({**fields["added_tokens"][0], "id": 500 + missing, "content": "<call>"})

    tokenizer = builders.byte_level()
    (last,) = (token for token, id_ in tokenizer.get_vocab().items() if id_ == 399)
    path = edited(tokenizer, move, tmp_path)
    vocabulary = read_vocabulary(path, added=[(600, {"content": "<declared>", "special": True})])
    assert vocabulary.vocab_size == 601
    assert vocabulary.decode_str([500]) == last.replace("Ġ", " ")
    assert vocabulary.decode_str([500 + missing, 600]) == "<call><declared>"
    mask = LLMatcher(vocabulary, r"start: /(.|\n)*/").compute_bitmask()
    bits = [mask[i // 8] >> i % 8 & 1 for i in range(601)]
    assert bits[500]
    assert not any(bits[404:500])
    assert not any(bits[501:])


@pytest.mark.parametrize("normalizer", [normalizers.NFC(), normalizers.Sequence([normalizers.Lowercase()])])
def test_a_forced_text_is_written_as_it_is_whatever_the_tokenizer_makes_of_prompts(
    tmp_path: Path, normalizer: normalizers.Normalizer
) -> None:
    tokenizer = builders.byte_level()
    tokenizer.normalizer = normalizer
    vocabulary = read_vocabulary(written(tmp_path, tokenizer))
    text = "Cafe\u0301 [end]"
    matcher = LLMatcher(vocabulary, f"start: {json.dumps(text, ensure_ascii=False)}")
    tokens = matcher.compute_ff_tokens()
    assert vocabulary.decode_str(tokens) == text
    assert matcher.consume_tokens(tokens)
