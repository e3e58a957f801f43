from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLTokenizer
from tokenizers import Regex, Tokenizer, normalizers, processors

from tests.support.tiny import make_tiny
from treadle.errors import ConfigError, InvalidRequest, ModelError
from treadle.text import TextModel

from . import builders

TEXTS = ["Hello world", " two  spaces ", "日本語 🙂👍🏽 é", "line\n\nline\t", "", "<|im_end|></s>"]


def folder_of(tmp_path: Path, tokenizer: Tokenizer | None = None, **files: Any) -> Path:
    return builders.write_folder(tmp_path, tokenizer or builders.byte_level(), **files)


# Folders


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("GemmaTokenizer", "GemmaTokenizer"),
        (None, "PreTrainedTokenizerFast"),
        ("", "PreTrainedTokenizerFast"),
        (["GemmaTokenizer"], "PreTrainedTokenizerFast"),
        ("\ud800", "PreTrainedTokenizerFast"),
    ],
)
def test_the_class_of_a_tokenizer_is_that_of_its_settings(given: Any, found: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, tokenizer_config={"tokenizer_class": given})
    assert TextModel.load(folder).tokenizer_class == found


def test_a_folder_without_a_fast_tokenizer_names_cause_and_fix(tmp_path: Path) -> None:
    builders.write_folder(tmp_path, None, config={"vocab_size": 10, "max_position_embeddings": 8})
    with pytest.raises(ModelError, match=r"tokenizer\.json.*save_pretrained"):
        TextModel.load(tmp_path)


def test_a_folder_without_config_is_no_model_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        TextModel.load(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "generation_config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ['{"version": "1.0", "trunc', "[]", "\xff\xfe\x00"])
def test_a_broken_file_is_named(tmp_path: Path, name: str, content: str) -> None:
    folder = folder_of(tmp_path)
    (folder / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(ModelError, match=name):
        TextModel.load(folder)


def test_vocabulary_is_the_models_own_also_when_nested_and_larger_than_the_tokenizers(tmp_path: Path) -> None:
    config = {"text_config": {"vocab_size": 5000, "max_position_embeddings": 64}}
    model = TextModel.load(folder_of(tmp_path, config=config))
    assert (model.vocabulary, model.context) == (5000, 64)
    assert model.token_bytes(4999) == b""
    assert model.token_text(4999) == ""
    assert model.decode([4999]) == ""


def test_a_tokenizer_whose_plain_text_the_model_has_no_tokens_for_is_refused(tmp_path: Path) -> None:
    config = {"vocab_size": 100, "max_position_embeddings": 64}
    with pytest.raises(ModelError, match=r"a tokenizer of another model: .* has 100 tokens .*download it again"):
        TextModel.load(folder_of(tmp_path, config=config))


def test_vocabulary_falls_back_to_the_tokenizers(tmp_path: Path) -> None:
    tokenizer = builders.byte_level()
    model = TextModel.load(folder_of(tmp_path, tokenizer, config={"n_positions": 64}))
    assert model.vocabulary == tokenizer.get_vocab_size()


@pytest.mark.parametrize(
    ("config", "override", "context"),
    [
        ({"max_position_embeddings": 100}, None, 100),
        ({"max_position_embeddings": 100}, 40, 40),
        ({"max_position_embeddings": 100}, 100, 100),
        ({"n_ctx": 70}, None, 70),
        ({}, 30, 30),
        ({"max_position_embeddings": 100, "rope_scaling": {"type": "linear", "factor": 4.0}}, None, 100),
        (
            {
                "max_position_embeddings": 100,
                "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100},
            },
            None,
            400,
        ),
    ],
)
def test_context(tmp_path: Path, config: dict[str, Any], override: int | None, context: int) -> None:
    assert TextModel.load(folder_of(tmp_path, config=config), context=override).context == context


def test_a_context_over_the_models_own_is_refused_with_the_models_own(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="2048"):
        TextModel.load(folder_of(tmp_path), context=2049)


@pytest.mark.parametrize("override", [None, 5])
def test_a_context_of_one_token_is_refused(tmp_path: Path, override: int | None) -> None:
    with pytest.raises(ModelError, match="gives a context of 1 token, which holds no prompt with an answer"):
        TextModel.load(folder_of(tmp_path, config={"max_position_embeddings": 1}), context=override)
    with pytest.raises(ConfigError, match=r"`context` is 1, .*: give 2 or more"):
        TextModel.load(folder_of(tmp_path), context=1)


def test_no_context_anywhere_asks_for_one(tmp_path: Path) -> None:
    config = {"model_max_length": 10**30}
    with pytest.raises(ModelError, match="`context`"):
        TextModel.load(folder_of(tmp_path, config={}, tokenizer_config=config))


# EOS and sampling


@pytest.mark.parametrize(
    ("generation", "config", "tokenizer", "eos"),
    [
        ({"eos_token_id": [7, 9, 7]}, {"eos_token_id": 5}, {"eos_token": "<|im_end|>"}, (7, 9)),
        ({"eos_token_id": 0}, {"eos_token_id": 5}, {}, (0,)),
        ({}, {"eos_token_id": 5}, {"eos_token": "<|im_end|>"}, (5,)),
        ({}, {"text_config": {"eos_token_id": [5]}}, {}, (5,)),
        ({"eos_token_id": None}, {}, {"eos_token": "<|im_end|>"}, "<|im_end|>"),
        ({}, {}, {"eos_token": {"content": "<|im_end|>", "special": True}}, "<|im_end|>"),
        ({"eos_token_id": [10**6, -1, True]}, {"eos_token_id": 5}, {}, (5,)),
        ({}, {}, {"eos_token": "<|absent|>"}, ()),
        ({}, {}, {}, ()),
    ],
)
def test_eos_comes_from_the_first_file_that_names_one(
    tmp_path: Path, generation: Any, config: Any, tokenizer: Any, eos: Any
) -> None:
    config = {"vocab_size": 500, "max_position_embeddings": 64, **config}
    folder = folder_of(tmp_path, config=config, generation_config=generation, tokenizer_config=tokenizer)
    expected = (builders.byte_level().token_to_id(eos),) if isinstance(eos, str) else eos
    assert TextModel.load(folder).eos_token_ids == expected


def test_default_sampling_keeps_valid_values_alone(tmp_path: Path) -> None:
    wanted = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0, "repetition_penalty": 1.05}
    folder = folder_of(tmp_path, generation_config={**wanted, "do_sample": True, "max_length": 20})
    assert TextModel.load(folder).default_sampling == wanted


def test_default_sampling_leaves_out_what_is_out_of_range(tmp_path: Path) -> None:
    broken = {"temperature": -1, "top_p": 0, "top_k": 1.5, "min_p": "0.1", "repetition_penalty": True}
    assert TextModel.load(folder_of(tmp_path, generation_config=broken)).default_sampling == {}


def test_do_sample_false_is_greedy(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, generation_config={"do_sample": False, "temperature": 0.7})
    assert TextModel.load(folder).default_sampling == {"temperature": 0.0}


def test_special_tokens_are_strings_objects_or_in_the_older_map(tmp_path: Path) -> None:
    folder = folder_of(
        tmp_path,
        tokenizer_config={"bos_token": None, "eos_token": {"content": "<|im_end|>"}, "add_bos_token": True},
        special_tokens_map={"bos_token": {"content": "<|endoftext|>"}, "eos_token": "old", "pad_token": "<pad>"},
    )
    expected = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "pad_token": "<pad>"}
    assert TextModel.load(folder).special_tokens == expected


# Encoding


@pytest.mark.parametrize("kind", [*builders.KINDS, *builders.OTHER_KINDS])
@pytest.mark.parametrize("special", [True, False])
def test_encode_is_the_tokenizers_own(text_models: dict[str, TextModel], kind: str, special: bool) -> None:
    model = text_models[kind]
    own = Tokenizer.from_file(str(model.folder / "tokenizer.json"))
    for text in TEXTS:
        assert model.encode(text, add_special_tokens=special) == own.encode(text, add_special_tokens=special).ids


def test_truncation_and_padding_left_in_the_file_do_nothing(tmp_path: Path) -> None:
    tokenizer = builders.byte_level()
    whole = tokenizer.encode("Hello world, " * 50).ids
    tokenizer.enable_truncation(max_length=8)
    tokenizer.enable_padding(length=4096)
    assert TextModel.load(folder_of(tmp_path, tokenizer)).encode("Hello world, " * 50) == whole


def test_a_lone_surrogate_is_refused_before_the_tokenizer_chokes(byte_level: TextModel) -> None:
    with pytest.raises(InvalidRequest, match="surrogate"):
        byte_level.encode("a\ud83d")


def test_a_token_without_an_embedding_is_refused_by_name(tmp_path: Path) -> None:
    tokenizer = builders.byte_level()
    model = TextModel.load(folder_of(tmp_path, tokenizer, config={"vocab_size": 400, "n_ctx": 64}))
    assert model.encode("Hello") == tokenizer.encode("Hello").ids
    with pytest.raises(InvalidRequest, match="<tool call>"):
        model.encode("Hello<tool call>")


def test_tokens_that_only_the_config_declares_are_added_where_their_ids_fit(tmp_path: Path) -> None:
    tokenizer = builders.byte_level()
    size = tokenizer.get_vocab_size()
    declared = {
        str(size): {"content": "<|extra|>", "special": True},
        str(size + 7): {"content": "<|gap|>", "special": True},
        "nonsense": {"content": "<|x|>"},
        "9" * 11: {"content": "<|far|>"},
        "9" * 5000: {"content": "<|farther|>"},
    }
    model = TextModel.load(
        folder_of(
            tmp_path,
            tokenizer,
            config={"vocab_size": 1000, "n_ctx": 64},
            tokenizer_config={"added_tokens_decoder": declared},
        )
    )
    assert model.encode("a<|extra|>") == [*model.encode("a"), size]
    assert size in model.special_ids
    assert len(model.encode("<|gap|>")) > 1


def test_a_named_special_token_of_the_plain_vocabulary_becomes_special(tmp_path: Path) -> None:
    made = json.loads(builders.sentence().to_str())
    made["added_tokens"] = [t for t in made["added_tokens"] if t["content"] != "</s>"]
    folder = folder_of(tmp_path, Tokenizer.from_str(json.dumps(made)), tokenizer_config={"eos_token": "</s>"})
    model = TextModel.load(folder)
    assert model.encode("</s>", add_special_tokens=False) == [2]
    assert model.decode([2]) == ""
    assert model.eos_token_ids == (2,)


def test_bytes_per_token_is_near_what_text_takes(byte_level: TextModel) -> None:
    text = "The ship left the harbour and nobody could say why. " * 20
    assert byte_level.bytes_per_token == pytest.approx(len(text) / len(byte_level.encode(text)), rel=0.6)


# BOS in chats


def test_chat_gets_exactly_one_bos(sentence: TextModel) -> None:
    assert sentence.prefix == (1,)
    with_bos = sentence.encode_chat("<s>[INST] Hello [/INST]")
    without = sentence.encode_chat("[INST] Hello [/INST]")
    assert with_bos[:2].count(1) == without[:2].count(1) == 1
    assert sentence.encode_chat("") == [1]


def test_a_tokenizer_without_bos_gets_none(byte_level: TextModel) -> None:
    assert byte_level.prefix == ()
    assert byte_level.encode_chat("<|im_start|>user") == byte_level.encode("<|im_start|>user")


def test_what_a_tokenizer_puts_around_is_unknown_when_it_spells_nothing(tmp_path: Path) -> None:
    tokenizer = builders.byte_level()
    tokenizer.normalizer = normalizers.Replace(Regex(r"a"), "")
    assert TextModel.load(folder_of(tmp_path, tokenizer)).prefix == ()


def test_what_a_tokenizer_puts_behind_a_text_is_not_put_behind_a_chat(tmp_path: Path) -> None:
    tokenizer = builders.sentence()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="$A $B", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    model = TextModel.load(folder_of(tmp_path, tokenizer))
    assert model.encode("Hello")[-1] == 2
    assert model.encode_chat("Hello") == model.encode("Hello")[:-1]


# Single tokens


def test_byte_level_tokens_give_their_raw_bytes(byte_level: TextModel) -> None:
    text = "Hello wörld 🙂\n<|im_end|><tool call>"
    ids = byte_level.encode(text)
    assert b"".join(map(byte_level.token_bytes, ids)) == text.encode("utf-8")
    assert any(byte_level.token_text(i) == "\ufffd" for i in byte_level.encode("🙃"))


def test_sentence_tokens_give_bytes_and_spaces(sentence: TextModel) -> None:
    ids = sentence.encode("a 🙃\n", add_special_tokens=False)
    assert b"".join(map(sentence.token_bytes, ids)) == " a 🙃\n".encode()
    assert b"\xf0" in [sentence.token_bytes(i) for i in ids]
    assert sentence.token_text(2) == "</s>"


def test_stop_strings_that_are_special_tokens_are_found(byte_level: TextModel) -> None:
    end = byte_level.encode("<|im_end|>")
    assert byte_level.stop_tokens(["\n", "<|im_end|>", "Hello", "<tool call>", "<|im_end|>"]) == tuple(end)


def test_word_piece_tokens_give_what_they_add_to_a_text(text_models: dict[str, TextModel]) -> None:
    model = text_models["word_piece"]
    ids = model.encode("weaved fox")
    assert len(ids) > 2
    assert b"".join(map(model.token_bytes, ids)) == b" weaved fox"


@pytest.mark.parametrize("kind", [*builders.KINDS, *builders.OTHER_KINDS])
@pytest.mark.parametrize("token", [-1, 10**7, 2**32, 2**70])
def test_ids_without_a_token_have_no_bytes(text_models: dict[str, TextModel], kind: str, token: int) -> None:
    assert text_models[kind].token_bytes(token) == b""


# Without a template


def test_chat_without_a_template_names_the_flag(byte_level: TextModel) -> None:
    with pytest.raises(InvalidRequest, match="--chat-template"):
        byte_level.render_chat([{"role": "user", "content": "hi"}])


def test_chat_with_a_template_knows_the_special_tokens(tmp_path: Path) -> None:
    folder = folder_of(
        tmp_path,
        builders.sentence(),
        chat_template=builders.MISTRAL,
        tokenizer_config={"bos_token": "<s>", "eos_token": {"content": "</s>"}},
    )
    model = TextModel.load(folder)
    rendered = model.render_chat([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}])
    assert rendered == "<s>[INST] hi [/INST]ho</s>"
    ids = model.encode_chat(rendered)
    assert (ids[0], ids[-1], ids.count(1)) == (1, 2, 1)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("\nUser:", ("\nUser:",)),
        (["\nUser:", "###"], ("\nUser:", "###")),
        (["", 5, None, "x"], ("x",)),
        (7, ()),
    ],
)
def test_stop_strings_of_the_models_makers(tmp_path: Path, given: Any, found: tuple[str, ...]) -> None:
    folder = folder_of(tmp_path, generation_config={"stop_strings": given})
    assert TextModel.load(folder).stop_strings == found


# Grammars


def test_grammars_name_those_tokens_by_id_that_llguidance_takes_for_special(tmp_path: Path) -> None:
    """Others are matched by their text: an id in a grammar would forbid every other spelling."""
    added = ("<think>", "</think>", "[TC]", "functions.", "<a", "b>")
    folder = make_tiny(tmp_path / "tiny", added=added, special=("[TOOL_CALLS]", "<|call|>"))
    model = TextModel.load(folder)
    vocabulary = LLTokenizer((folder / "tokenizer.json").read_text(), eos_token=list(model.eos_token_ids))
    special = {i for i in range(256, vocabulary.vocab_size) if vocabulary.is_special_token(i)}
    assert set(model.grammar_tokens.values()) == special
    assert {"<think>", "[TOOL_CALLS]", "<|call|>"} <= model.grammar_tokens.keys()
