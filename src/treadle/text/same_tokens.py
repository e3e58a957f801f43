"""Comparison of two models' tokens: what one computes is of use to the other only if each id means the same text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from ..errors import ModelError, one_line
from ..regular_files import read_regular
from .folder import FolderConfig

_MOST_CHARS = 40


def check_same_tokens(target: Path, draft: Path, param: str = "draft") -> None:
    """Raise ModelError unless the tokenizers in both folders have the same tokens, special ones included, by the same
    ids. Ids without a token, of padding in the embedding, don't count. `param` is the setting that names the second
    model."""
    own, other = token_texts(target), token_texts(draft)
    if own == other:
        return
    different = sorted(id_ for id_ in own.keys() | other.keys() if own.get(id_) != other.get(id_))
    first, more = different[0], len(different) - 1
    others = f", and {more:,} others differ" if more else ""
    texts = f"{_quoted(other.get(first))} there and {_quoted(own.get(first))} here"
    raise ModelError(
        f"`{param}` {draft.name} has other tokens than {target.name}: id {first} is {texts}{others}: give a smaller "
        "model of the same family, or leave it out",
        param=param,
    )


def token_texts(folder: Path) -> dict[int, str]:
    """Return each token as tokenizer.json writes it, by its id, with those that tokenizer_config.json adds. Raises
    ModelError."""
    path = folder / "tokenizer.json"
    try:
        parts = msgspec.json.decode(read_regular(path), type=dict[str, msgspec.Raw])
        model = msgspec.json.decode(parts.get("model", b"{}"), type=dict[str, msgspec.Raw])
        texts = _vocabulary(bytes(model.get("vocab", b"{}")))
        added = msgspec.json.decode(parts.get("added_tokens", b"[]"), type=list[dict[str, Any]])
        texts |= {int(token["id"]): str(token["content"]) for token in added}
    except (OSError, ValueError, KeyError, TypeError, RecursionError, msgspec.MsgspecError) as error:
        raise ModelError(f"can't read the tokens in {path}: {one_line(error)}; download it again") from error
    declared = {id_: str(token["content"]) for id_, token in FolderConfig.read(folder).declared_tokens()}
    return declared | texts


def _vocabulary(data: bytes) -> dict[int, str]:
    """The tokens of a model: texts with their ids, or a list of texts with scores, whose places are the ids."""
    if data.startswith(b"["):
        pairs = msgspec.json.decode(data, type=list[tuple[str, float]])
        return {id_: text for id_, (text, _) in enumerate(pairs)}
    return {id_: text for text, id_ in msgspec.json.decode(data, type=dict[str, int]).items()}


def _quoted(text: str | None) -> str:
    return "no token" if text is None else repr(text[:_MOST_CHARS])
