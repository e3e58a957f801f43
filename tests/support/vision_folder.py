"""Folder of a tiny Qwen3-VL that chats: with a tokenizer of bytes, a chat template and the settings of its images."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.support.embedding_models import write_json
from tests.support.images import MARKS, TEMPLATE
from tests.support.tiny_vision import END, IMAGE, SIDE, START, config_of, make_vision

FAMILY = "qwen3_vl"
EOS = 255
_IDS = dict(zip(MARKS, (START, IMAGE, END), strict=True))


def make_vision_chat(folder: Path, *, context: int = 2048, ends: Sequence[int] = (EOS,)) -> Path:
    """Write the folder: an image has a token for each 16 x 16 pixels, 64 at most. `ends` are tokens that end an
    answer."""
    text = {**config_of(FAMILY)["text_config"], "max_position_embeddings": context}
    make_vision(folder, FAMILY, more={"text_config": text, "eos_token_id": list(ends)})
    _write_tokenizer(folder)
    write_json(
        folder / "preprocessor_config.json",
        {"patch_size": SIDE, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 256, "max_pixels": 1 << 14},
    )
    return folder


def _write_tokenizer(folder: Path) -> None:
    """A token for each byte. Marks are in place of bytes that UTF-8 does not have."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    from tests.support.tiny import _byte_symbols

    names = {place: name for name, place in _IDS.items()}
    symbols = {names.get(byte, symbol): byte for byte, symbol in enumerate(_byte_symbols())}
    tokenizer = Tokenizer(models.BPE(symbols, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in _IDS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    write_json(folder / "tokenizer_config.json", settings)
