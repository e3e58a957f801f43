"""A text view as one message: what the text processes send to the server's process once a model is loaded.

The bytes of all tokens are one blob with an index, about four bytes a token more than the tokens' own.
"""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import ModelError
from .token_bytes import BytePieces, Find, TokenBytes
from .view import TextView

if TYPE_CHECKING:
    from .tokenizer import TextModel

MOST_BYTES = 64 << 20
MOST_GROWTH = 64
"""How much longer a decoder's replacements may make a text: the server's own process runs these decoders."""


class Spelled(msgspec.Struct, frozen=True, array_like=True):
    """Every token's bytes, one after the other, with the end of each; `unknown` are ids without a token."""

    blob: bytes
    ends: bytes
    unknown: list[int]


class JoinedBytes(msgspec.Struct, frozen=True, tag=True):
    """`BytePieces`."""

    tokens: Spelled
    first: Spelled | None
    strip: int


class Windowed(msgspec.Struct, frozen=True, tag=True):
    """`WindowPieces`: the tokens' ids by name, and tokenizer.json's decoder."""

    names: dict[str, int]
    decoder: str
    anchor: list[int]


class Packed(msgspec.Struct, frozen=True):
    """A `TextView`, field by field."""

    folder: str
    vocabulary: int
    context: int
    eos_token_ids: tuple[int, ...]
    default_sampling: dict[str, float | int]
    stop_strings: tuple[str, ...]
    special_tokens: dict[str, str]
    special_ids: frozenset[int]
    named_ids: dict[str, int]
    bytes_per_token: float
    longest_token: int
    model_type: str
    architectures: tuple[str, ...]
    has_template: bool
    prefix: tuple[int, ...]
    pieces: JoinedBytes | Windowed


def pack(model: TextModel) -> Packed:
    """Raises ModelError where the model's decoder can't leave the text processes."""
    return Packed(
        folder=str(model.folder),
        vocabulary=model.vocabulary,
        context=model.context,
        eos_token_ids=model.eos_token_ids,
        default_sampling=dict(model.default_sampling),
        stop_strings=model.stop_strings,
        special_tokens=dict(model.special_tokens),
        special_ids=model.special_ids,
        named_ids=dict(model.named_ids),
        bytes_per_token=model.bytes_per_token,
        longest_token=model.longest_token,
        model_type=model.model_type,
        architectures=model.architectures,
        has_template=model.has_template,
        prefix=model.prefix,
        pieces=_packed_pieces(model.pieces, model.ids),
    )


def unpack(packed: Packed) -> TextView:
    """The view, with a table of bytes in place of the tokenizer."""
    fields = {name: getattr(packed, name) for name in packed.__struct_fields__}
    return TextView(**{**fields, "folder": Path(packed.folder), "pieces": _pieces(packed.pieces)})


def _packed_pieces(pieces: TokenBytes, ids: range) -> JoinedBytes | Windowed:
    if isinstance(pieces, BytePieces):
        first = None if pieces.find_first is None else _spelled(pieces.find_first, ids)
        return JoinedBytes(_spelled(pieces.find, ids), first, pieces.strip)
    from .window import WindowPieces

    assert isinstance(pieces, WindowPieces)
    _check_decoder(pieces.decoder)
    names = {name: i for i in ids if (name := pieces.name_of(i)) is not None}
    return Windowed(names, pieces.decoder, pieces.anchor)


def _spelled(find: Find, ids: range) -> Spelled:
    blob, ends, unknown = bytearray(), array("I"), []
    for token in ids:
        spelled = find(token)
        if spelled is None:
            unknown.append(token)
        blob += spelled or b""
        if len(blob) > MOST_BYTES:
            raise ModelError(
                f"the tokenizer's tokens spell more than {MOST_BYTES} bytes in all, which no real one's do"
            )
        ends.append(len(blob))
    return Spelled(bytes(blob), ends.tobytes(), unknown)


def _pieces(packed: JoinedBytes | Windowed) -> TokenBytes:
    if isinstance(packed, JoinedBytes):
        first = None if packed.first is None else _finder(packed.first)
        return BytePieces(_finder(packed.tokens), first, packed.strip)
    from .window import WindowPieces

    return WindowPieces.of(packed.names, packed.decoder, packed.anchor)


def _finder(spelled: Spelled) -> Find:
    ends = array("I", [0])
    ends.frombytes(spelled.ends)
    blob, count, unknown = spelled.blob, len(ends) - 1, frozenset(spelled.unknown)

    def find(token: int) -> bytes | None:
        if not 0 <= token < count or token in unknown:
            return None
        return blob[ends[token] : ends[token + 1]]

    return find


def _check_decoder(decoder: str) -> None:
    """Raise ModelError for a decoder whose work per token has no small bound."""
    growth = 1.0
    for step in _steps(json.loads(decoder)):
        if step.get("type") != "Replace":
            continue
        pattern = step.get("pattern", {}).get("String")
        if not pattern:
            raise ModelError("the tokenizer's decoder replaces by a regular expression, which is not served here")
        growth *= max(1.0, len(step.get("content", "").encode()) / len(pattern.encode()))
    if growth > MOST_GROWTH:
        raise ModelError(f"the tokenizer's decoder makes texts over {MOST_GROWTH} times longer, which no real one does")


def _steps(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, dict):
        return []
    return [value, *(step for inner in value.get("decoders") or () for step in _steps(inner))]
