"""What each token spells, as bytes, and how bytes become text while tokens still arrive.

Most decoders only join the tokens' bytes, so a table of bytes and one UTF-8 decoder are all that a stream needs. They
are recognised by the steps of tokenizer.json's decoder and then checked against the tokenizer itself. Every other
decoder is served by `window.py`.
"""

from __future__ import annotations

import codecs
import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_CHECK_IDS = 64
_CHECK_ROUNDS = 6


class Joiner(Protocol):
    """Turns one sequence of token ids into text as they come."""

    @property
    def pending(self) -> bool:
        """Whether bytes of an unfinished code point are held."""
        ...

    def push(self, ids: Sequence[int]) -> str:
        """The text that `ids` complete."""
        ...

    def finish(self) -> str:
        """What is still held; an unfinished code point becomes U+FFFD."""
        ...


class Pieces(Protocol):
    """What every token of one tokenizer spells."""

    def bytes_of(self, token: int) -> bytes:
        """The token's own bytes, maybe a part of a code point; b"" for an id the tokenizer does not know."""
        ...

    def joiner(self) -> Joiner:
        """A fresh joiner; cheap."""
        ...


@dataclass(frozen=True)
class Start:
    """How the very start of a text differs from its middle: up to `strip` spaces go, or the first token loses all
    its `marker`s."""

    strip: int = 0
    marker: str = ""


class _Table(dict[int, bytes]):
    """Token id to bytes, filled as tokens are first met: at most the vocabulary."""

    def __init__(self, tokenizer: Tokenizer, spell: Callable[[str], bytes]) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._spell = spell

    def _name(self, token: int) -> str | None:
        return self._tokenizer.id_to_token(token) if 0 <= token < 2**32 else None

    def knows(self, token: int) -> bool:
        """Whether the tokenizer has a token of this id."""
        return token in self or self._name(token) is not None

    def __missing__(self, token: int) -> bytes:
        name = self._name(token)
        if name is None:
            return b""
        found = self[token] = self._spell(name)
        return found


class BytePieces:
    """Tokens whose texts are their bytes, joined."""

    def __init__(self, tokenizer: Tokenizer, spell: Callable[[str], bytes], start: Start) -> None:
        self._table = _Table(tokenizer, spell)
        # In the first token the marker vanishes, so it is cut out before the spelling turns it into a space.
        self._first = _Table(tokenizer, lambda name: spell(name.replace(start.marker, ""))) if start.marker else None
        self._strip = start.strip

    def bytes_of(self, token: int) -> bytes:
        return self._table[token]

    def joiner(self) -> ByteJoiner:
        return ByteJoiner(self._table, self._first, self._strip)


class ByteJoiner:
    """One UTF-8 decoder over the tokens' bytes.

    It holds only what can still become a code point, so at most three bytes; what can't becomes U+FFFD at once.
    """

    def __init__(self, table: _Table, first: _Table | None, strip: int) -> None:
        self._spelling = table.__getitem__
        self._first = first
        self._strip = strip
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def pending(self) -> bool:
        return bool(self._utf8.getstate()[0])

    def push(self, ids: Sequence[int]) -> str:
        data = self._started(self._first, ids) if self._first is not None else b"".join(map(self._spelling, ids))
        return self._utf8.decode(self._stripped(data) if self._strip else data)

    def _started(self, first: _Table, ids: Sequence[int]) -> bytes:
        for position, token in enumerate(ids):
            if first.knows(token):
                self._first = None
                return first[token] + b"".join(map(self._spelling, ids[position + 1 :]))
        return b""

    def _stripped(self, data: bytes) -> bytes:
        while self._strip and data:
            if not data.startswith(b" "):
                self._strip = 0
                break
            data, self._strip = data[1:], self._strip - 1
        return data

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


def byte_pieces(tokenizer: Tokenizer, samples: Sequence[Sequence[int]]) -> BytePieces | None:
    """The tokenizer's pieces as bytes, or None when its decoder does more than join bytes.

    `samples` are id sequences of ordinary text; on them and on random ids the result agrees with the tokenizer.
    """
    if tokenizer.decoder is None:
        return None
    read = _read_steps(_steps(json.loads(tokenizer.decoder.__getstate__())))
    if read is None:
        return None
    pieces = BytePieces(tokenizer, *read)
    return pieces if _agrees(tokenizer, pieces, samples) else None


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
