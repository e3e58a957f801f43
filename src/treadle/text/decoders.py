"""Which decoders only join the tokens' bytes: read from the steps of tokenizer.json's decoder, and then checked against
the tokenizer itself."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from .token_bytes import BytePieces, Find

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_CHECK_IDS = 64
_CHECK_ROUNDS = 6


@dataclass(frozen=True)
class Start:
    """How the very start of a text differs from its middle: up to `strip` spaces go, or the first token loses all
    its `marker`s."""

    strip: int = 0
    marker: str = ""


def byte_pieces(tokenizer: Tokenizer, samples: Sequence[Sequence[int]]) -> BytePieces | None:
    """The tokenizer's pieces as bytes, or None when its decoder does more than join bytes.

    `samples` are id sequences of ordinary text; on them and on random ids the result agrees with the tokenizer.
    """
    if tokenizer.decoder is None:
        return None
    read = _read_steps(_steps(json.loads(tokenizer.decoder.__getstate__())))
    if read is None:
        return None
    spell, start = read
    first = _finder(tokenizer, lambda name: spell(name.replace(start.marker, ""))) if start.marker else None
    pieces = BytePieces(_finder(tokenizer, spell), first, start.strip)
    return pieces if _agrees(tokenizer, pieces, samples) else None


def _finder(tokenizer: Tokenizer, spell: Callable[[str], bytes]) -> Find:
    """The bytes of an id, by `spell`. In a text's first token the marker vanishes, so it is cut out before the spelling
    turns it into a space."""

    def find(token: int) -> bytes | None:
        name = tokenizer.id_to_token(token) if 0 <= token < 2**32 else None
        return None if name is None else spell(name)

    return find


def _steps(spec: dict[str, Any]) -> list[dict[str, Any]]:
    if spec["type"] != "Sequence":
        return [spec]
    return [step for inner in spec["decoders"] for step in _steps(inner)]


def _read_steps(steps: list[dict[str, Any]]) -> tuple[Callable[[str], bytes], Start] | None:
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return _spell_byte_level, Start()
    return _read_sentence_steps(steps)


def _read_sentence_steps(steps: list[dict[str, Any]]) -> tuple[Callable[[str], bytes], Start] | None:
    """Steps that replace within a token, turn byte tokens into bytes, fuse, and strip the start; else None."""
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
    except KeyError:  # an added token, written as it is
        return name.encode("utf-8")


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE's alphabet: printable Latin-1 stands for itself, every other byte for U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _agrees(tokenizer: Tokenizer, pieces: BytePieces, samples: Sequence[Sequence[int]]) -> bool:
    size, dice = tokenizer.get_vocab_size(with_added_tokens=True), random.Random(0)
    drawn = [[dice.randrange(size) for _ in range(_CHECK_IDS)] for _ in range(_CHECK_ROUNDS)]
    # Bytes that form no text are where decoders differ on purpose: each makes its own U+FFFD of them.
    whole = [[i for i in ids if _is_text(pieces.bytes_of(i))] for ids in drawn]
    return all(_joined(pieces, ids) == tokenizer.decode(ids, skip_special_tokens=False) for ids in [*samples, *whole])


def _is_text(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _joined(pieces: BytePieces, ids: Sequence[int]) -> str:
    joiner = pieces.joiner()
    return joiner.push(ids) + joiner.finish()
