"""Edits of tokenizer.json for llguidance: added tokens, ids that no token has, and normalizers.

llguidance numbers tokens by their count, and tokenizes texts that a grammar forces. An id without a token would shift
those behind it, and a normalizer that changes a text would make tokens of it that the grammar then refuses.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

AddedToken = tuple[int, dict[str, Any]]
"""An id, and the fields of a token in `added_tokens` of tokenizer.json: its content and its flags."""

_SPARE_IDS = 1024
"""Ids without a token that a small vocabulary may have, too."""
_FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}


def for_llguidance(data: bytes, added: Iterable[AddedToken]) -> str:
    """Return tokenizer.json as text: with the tokens in `added` whose content and id it lacks, a special token for each
    id that has none, and without normalizers that change the meaning of a text. Raises msgspec.MsgspecError, and
    ValueError where most ids have none, or where values are nested too deeply."""
    try:
        tokenizer = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    except RecursionError as error:
        raise ValueError("values in tokenizer.json are nested too deeply") from error
    edits = {**_all_tokens(tokenizer, added), **_normalizer(tokenizer)}
    if not edits:
        return data.decode("utf-8")
    tokenizer.update({key: msgspec.Raw(msgspec.json.encode(value)) for key, value in edits.items()})
    return msgspec.json.encode(tokenizer).decode("utf-8")


def _all_tokens(tokenizer: dict[str, msgspec.Raw], added: Iterable[AddedToken]) -> dict[str, Any]:
    """Return the fields that have to change so that every id has a token."""
    own = msgspec.json.decode(tokenizer.get("added_tokens", b"[]"), type=list[dict[str, Any]])
    known = {token.get("content") for token in own} | {token.get("id") for token in own}
    new = [{**_FLAGS, "id": id_, **fields} for id_, fields in added if not known & {id_, fields["content"]}]
    model = msgspec.json.decode(tokenizer.get("model", b"{}"), type=dict[str, msgspec.Raw])
    vocabulary = _ids(model)
    gaps = _gaps(vocabulary, [token["id"] for token in (*own, *new) if isinstance(token.get("id"), int)])
    if not new and not gaps:
        return {}
    fillers = ({**_FLAGS, "id": id_, "content": f"<|no token {id_}|>", "special": True} for id_ in gaps)
    tokens = sorted((*own, *new, *fillers), key=lambda token: int(token["id"]))
    edits: dict[str, Any] = {"added_tokens": tokens}
    last = max(vocabulary.values(), default=-1)
    if inner := {token["content"]: token["id"] for token in tokens if token["id"] < last} if gaps else {}:
        edits["model"] = {**model, "vocab": {**vocabulary, **inner}}
    return edits


def _ids(model: dict[str, msgspec.Raw]) -> dict[str, int]:
    """Return the ids of a model's tokens; none where their places in a list are their ids."""
    vocabulary = model.get("vocab", b"[]")
    return msgspec.json.decode(vocabulary, type=dict[str, int]) if bytes(vocabulary).startswith(b"{") else {}


def _gaps(vocabulary: dict[str, int], others: list[int]) -> list[int]:
    """Return the ids up to the largest one that no token has; none where the vocabulary has no ids of its own. Raises
    ValueError where those are most of them."""
    last = max(vocabulary.values(), default=-1)
    count = max(last, *others, last) + 1
    known = len(vocabulary) + len({id_ for id_ in others if id_ > last})
    if not vocabulary or known == count:
        return []
    if count > 2 * known + _SPARE_IDS:
        raise ValueError(f"its ids go up to {count - 1}, and it has {known} tokens")
    return sorted({*range(count)} - {*vocabulary.values(), *others})


def _normalizer(tokenizer: dict[str, msgspec.Raw]) -> dict[str, Any]:
    """Return the normalizer, if it has to change: of all its parts only those that write a space in another way."""
    given = msgspec.json.decode(tokenizer.get("normalizer", b"null"))
    parts = given.get("normalizers", [given]) if isinstance(given, dict) else []
    kept = [part for part in parts if part.get("type") == "Replace" and part.get("pattern") == {"String": " "}]
    if len(kept) == len(parts):
        return {}
    return {"normalizer": {"type": "Sequence", "normalizers": kept} if kept else None}
