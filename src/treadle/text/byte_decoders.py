"""Detection of tokenizers whose decoder only joins the tokens' bytes.

The steps of tokenizer.json's decoder are parsed into a function from token to bytes, and the result is compared with
the tokenizer's own on sample texts.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from .token_decoder import ByteTokenDecoder, TokenLookup

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_CHECK_IDS = 64
_CHECK_ROUNDS = 6


@dataclass(frozen=True)
class Start:
    """Special handling of a text's start: up to `strip` leading spaces are removed, or the first token loses all its
    `marker`s (Metaspace)."""

    strip: int = 0
    marker: str = ""


def byte_token_decoder(tokenizer: Tokenizer, samples: Sequence[Sequence[int]]) -> ByteTokenDecoder | None:
    """Return a decoder over the tokens' bytes, or None when the tokenizer's decoder does more than join bytes.

    `samples` are id sequences of ordinary text. The result agrees with the tokenizer on them and on random ids.
    """
    if tokenizer.decoder is None:
        return None
    read = _parse_steps(_steps(json.loads(tokenizer.decoder.__getstate__())))
    if read is None:
        return None
    spell, start = read
    # The first token drops its marker before `spell` turns markers into spaces.
    first = _finder(tokenizer, lambda name: spell(name.replace(start.marker, ""))) if start.marker else None
    token_decoder = ByteTokenDecoder(_finder(tokenizer, spell), first, start.strip)
    return token_decoder if _agrees(tokenizer, token_decoder, samples) else None


def _finder(tokenizer: Tokenizer, spell: Callable[[str], bytes]) -> TokenLookup:
    """Look up a token's name by id and convert it with `spell`."""

    def lookup(token: int) -> bytes | None:
        name = tokenizer.id_to_token(token) if 0 <= token < 2**32 else None
        return None if name is None else spell(name)

    return lookup


def _steps(spec: dict[str, Any]) -> list[dict[str, Any]]:
    if spec["type"] != "Sequence":
        return [spec]
    return [step for inner in spec["decoders"] for step in _steps(inner)]


def _parse_steps(steps: list[dict[str, Any]]) -> tuple[Callable[[str], bytes], Start] | None:
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return _spell_byte_level, Start()
    return _parse_sentence_steps(steps)


def _parse_sentence_steps(steps: list[dict[str, Any]]) -> tuple[Callable[[str], bytes], Start] | None:
    """Parse a SentencePiece-style decoder: replace within a token, byte fallback, fuse, strip the start. None for any
    other step."""
    replacements: list[tuple[str, str]] = []
    start, byte_tokens, fused = Start(), False, False
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if not fused:
                replacements.append((old, new))
            case {"type": "Metaspace", "replacement": str(old)} if len(steps) == 1:
                replacements.append((old, " "))
                start = Start(marker="" if step.get("prepend_scheme") == "never" else old)
            case {"type": "ByteFallback"} if not fused:
                byte_tokens = True
            case {"type": "Fuse"}:
                fused = True
            case {"type": "Strip", "content": " ", "start": int(strip), "stop": 0} if fused and not start.strip:
                start = Start(strip=strip)
            case _:
                return None
    return _sentence_speller(replacements, byte_tokens), start


def _sentence_speller(replacements: list[tuple[str, str]], byte_tokens: bool) -> Callable[[str], bytes]:
    def spell(name: str) -> bytes:
        if byte_tokens and (byte := _BYTE_TOKEN.fullmatch(name)):
            return bytes.fromhex(byte[1])
        for old, new in replacements:
            name = name.replace(old, new)
        return name.encode("utf-8")

    return spell


def _spell_byte_level(name: str) -> bytes:
    try:
        return bytes(map(_BYTE_OF.__getitem__, name))
    except KeyError:  # an added token, stored as plain text
        return name.encode("utf-8")


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE's alphabet (GPT-2): printable Latin-1 maps to itself, the remaining bytes to U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = sorted(set(range(256)) - set(printable))
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(unprintable)}


_BYTE_OF = _byte_alphabet()


def _agrees(tokenizer: Tokenizer, token_decoder: ByteTokenDecoder, samples: Sequence[Sequence[int]]) -> bool:
    size, dice = tokenizer.get_vocab_size(with_added_tokens=True), random.Random(0)
    drawn = [[dice.randrange(size) for _ in range(_CHECK_IDS)] for _ in range(_CHECK_ROUNDS)]
    # Tokens with incomplete UTF-8 are left out: decoders differ in their number of U+FFFD for them.
    whole = [[i for i in ids if _is_text(token_decoder.bytes_of(i))] for ids in drawn]
    return all(
        _decode_all(token_decoder, ids) == tokenizer.decode(ids, skip_special_tokens=False)
        for ids in [*samples, *whole]
    )


def _is_text(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _decode_all(token_decoder: ByteTokenDecoder, ids: Sequence[int]) -> str:
    stream = token_decoder.stream()
    return stream.push(ids) + stream.finish()
