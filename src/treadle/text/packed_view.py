"""Serialized text view: the message from the text processes to the server's process after loading.

The bytes of all tokens form one blob with an index, which adds about four bytes a token.
"""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import ModelError
from .answer_formats import AnswerFormats
from .images import AnySettings
from .text_view import TextView
from .token_decoder import ByteTokenDecoder, TokenDecoder, TokenLookup

if TYPE_CHECKING:
    from .tokenizer import TextModel

MAX_BYTES = 64 << 20
MAX_GROWTH = 64
"""Limit on the growth of a text by a decoder's replacements, as a factor: the server's process runs these decoders."""


class PackedTable(msgspec.Struct, frozen=True, array_like=True):
    """Concatenated bytes of all tokens (`blob`), the end offset of each (`ends`, uint32), and ids without a token."""

    blob: bytes
    ends: bytes
    unknown: list[int]


class PackedByteDecoder(msgspec.Struct, frozen=True, tag=True):
    """A serialized `ByteTokenDecoder`."""

    tokens: PackedTable
    first: PackedTable | None
    strip: int


class PackedWindowDecoder(msgspec.Struct, frozen=True, tag=True):
    """A serialized `WindowTokenDecoder`: token ids by name, and tokenizer.json's decoder as JSON."""

    names: dict[str, int]
    decoder: str
    anchor: list[int]


class Packed(msgspec.Struct, frozen=True):
    """A serialized `TextView`."""

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
    no_chats: str
    prefix: tuple[int, ...]
    formats: AnswerFormats
    token_decoder: PackedByteDecoder | PackedWindowDecoder
    images: AnySettings | None
    no_images: str


def pack(model: TextModel) -> Packed:
    """Serialize the model's text view. Raises ModelError for a decoder that the server's process must not run."""
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
        no_chats=model.no_chats,
        prefix=model.prefix,
        formats=model.formats,
        token_decoder=_pack_decoder(model.token_decoder, model.ids),
        images=model.images,
        no_images=model.no_images,
    )


def unpack(packed: Packed) -> TextView:
    """Return the text view, with a table of bytes in place of the tokenizer."""
    fields = {name: getattr(packed, name) for name in packed.__struct_fields__}
    return TextView(**{**fields, "folder": Path(packed.folder), "token_decoder": _unpack_decoder(packed.token_decoder)})


def _pack_decoder(token_decoder: TokenDecoder, ids: range) -> PackedByteDecoder | PackedWindowDecoder:
    if isinstance(token_decoder, ByteTokenDecoder):
        first = None if token_decoder.lookup_first is None else _pack_table(token_decoder.lookup_first, ids)
        return PackedByteDecoder(_pack_table(token_decoder.lookup, ids), first, token_decoder.strip)
    from .window_decoder import WindowTokenDecoder

    assert isinstance(token_decoder, WindowTokenDecoder)
    _check_decoder(token_decoder.decoder)
    names = {name: i for i in ids if (name := token_decoder.name_of(i)) is not None}
    return PackedWindowDecoder(names, token_decoder.decoder, token_decoder.anchor)


def _pack_table(lookup: TokenLookup, ids: range) -> PackedTable:
    blob, ends, unknown = bytearray(), array("I"), []
    for token in ids:
        spelled = lookup(token)
        if spelled is None:
            unknown.append(token)
        blob += spelled or b""
        if len(blob) > MAX_BYTES:
            raise ModelError(f"the tokenizer's tokens spell more than {MAX_BYTES} bytes in all, which no real one's do")
        ends.append(len(blob))
    return PackedTable(bytes(blob), ends.tobytes(), unknown)


def _unpack_decoder(packed: PackedByteDecoder | PackedWindowDecoder) -> TokenDecoder:
    if isinstance(packed, PackedByteDecoder):
        first = None if packed.first is None else _finder(packed.first)
        return ByteTokenDecoder(_finder(packed.tokens), first, packed.strip)
    from .window_decoder import WindowTokenDecoder

    return WindowTokenDecoder.from_vocabulary(packed.names, packed.decoder, packed.anchor)


def _finder(spelled: PackedTable) -> TokenLookup:
    ends = array("I", [0])
    ends.frombytes(spelled.ends)
    blob, count, unknown = spelled.blob, len(ends) - 1, frozenset(spelled.unknown)

    def lookup(token: int) -> bytes | None:
        if not 0 <= token < count or token in unknown:
            return None
        return blob[ends[token] : ends[token + 1]]

    return lookup


def _check_decoder(decoder: str) -> None:
    """Raise ModelError for a decoder with unbounded work per token: regular expressions, or large replacements."""
    growth = 1.0
    for step in _steps(json.loads(decoder)):
        if step.get("type") != "Replace":
            continue
        pattern = step.get("pattern", {}).get("String")
        if not pattern:
            raise ModelError("the tokenizer's decoder replaces by a regular expression, which is not served here")
        growth *= max(1.0, len(step.get("content", "").encode()) / len(pattern.encode()))
    if growth > MAX_GROWTH:
        raise ModelError(f"the tokenizer's decoder makes texts over {MAX_GROWTH} times longer, which no real one does")


def _steps(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, dict):
        return []
    return [value, *(step for inner in value.get("decoders") or () for step in _steps(inner))]
