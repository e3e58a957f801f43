from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny import make_tiny
from treadle.errors import ModelError
from treadle.text.same_tokens import check_same_tokens, token_texts

Edit = Callable[[dict[str, Any]], None]


def edited(folder: Path, edit: Edit, name: str = "tokenizer.json") -> Path:
    path = folder / name
    value = json.loads(path.read_text())
    edit(value)
    path.write_text(json.dumps(value))
    return folder


def swap(tokenizer: dict[str, Any]) -> None:
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]


def rename(tokenizer: dict[str, Any]) -> None:
    tokenizer["added_tokens"][2]["content"] = "<|end|>"


def drop(tokenizer: dict[str, Any]) -> None:
    tokenizer["added_tokens"] = tokenizer["added_tokens"][:-1]


def test_models_of_one_family_have_the_same_tokens_whatever_the_padding_of_their_embeddings(tmp_path: Path) -> None:
    target = make_tiny(tmp_path / "target")
    check_same_tokens(target, make_tiny(tmp_path / "draft", architecture="qwen3", vocabulary_extra=64, context=128))


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (swap, r"id 97 is 'b' there and 'a' here, and 1 others differ"),
        (rename, r"id 258 is '<\|end\|>' there and '<eos>' here: give"),
        (drop, r"id 260 is no token there and '<\|im_end\|>' here: give"),
    ],
)
def test_a_difference_is_named_with_both_texts(tmp_path: Path, edit: Edit, told: str) -> None:
    """Sizes say nothing: a swapped pair has the same."""
    target, draft = make_tiny(tmp_path / "target"), edited(make_tiny(tmp_path / "draft"), edit)
    with pytest.raises(ModelError, match=f"draft has other tokens than target: {told}") as caught:
        check_same_tokens(target, draft)
    assert caught.value.param == "draft"


def test_tokens_that_only_the_configuration_declares_count(tmp_path: Path) -> None:
    target, draft = make_tiny(tmp_path / "target", added=("<think>",)), make_tiny(tmp_path / "draft")
    with pytest.raises(ModelError, match="id 261 is no token there"):
        check_same_tokens(target, draft)
    declared = {"261": {"content": "<think>", "special": False}}
    edited(draft, lambda config: config.update(added_tokens_decoder=declared), "tokenizer_config.json")
    check_same_tokens(target, draft)


def test_places_in_a_list_with_scores_are_ids(tmp_path: Path) -> None:
    pieces = [["<unk>", 0.0], ["\u2581a", -1.5]]
    folder = edited(make_tiny(tmp_path / "a"), lambda tokenizer: tokenizer.update(model={"vocab": pieces}))
    assert {id_: text for id_, text in token_texts(folder).items() if id_ < 256} == {0: "<unk>", 1: "\u2581a"}


@pytest.mark.parametrize("content", ["{", '{"model": {"vocab": {"a": "b"}}}', '{"added_tokens": [{"id": 3}]}'])
def test_a_torn_tokenizer_is_named(tmp_path: Path, content: str) -> None:
    folder = make_tiny(tmp_path / "a")
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match=r"can't read the tokens in .*tokenizer\.json"):
        token_texts(folder)
