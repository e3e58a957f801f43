"""What each token spells, as bytes, and how bytes become text while tokens still arrive.

Most decoders only join the tokens' bytes, so a table of bytes and one UTF-8 decoder are all that a stream needs.
`decoders.py` recognises them; every other decoder is served by `window.py`.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

Find = Callable[[int], bytes | None]
"""The bytes of a token id; None for an id that has no token."""


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


class TokenBytes(Protocol):
    """What every token of one tokenizer spells."""

    def bytes_of(self, token: int) -> bytes:
        """The token's own bytes, maybe a part of a code point; b"" for an id the tokenizer does not know."""
        ...

    def joiner(self) -> Joiner:
        """A fresh joiner; cheap."""
        ...


class _Table(dict[int, bytes]):
    """Token id to bytes, filled as tokens are first met: at most the vocabulary."""

    def __init__(self, find: Find) -> None:
        super().__init__()
        self._find = find

    def knows(self, token: int) -> bool:
        """Whether there is a token of this id."""
        return token in self or self._find(token) is not None

    def __missing__(self, token: int) -> bytes:
        spelled = self._find(token)
        if spelled is None:
            return b""
        self[token] = spelled
        return spelled


class BytePieces:
    """Tokens whose texts are their bytes, joined. `find_first` spells the first token of a text, where that differs."""

    def __init__(self, find: Find, find_first: Find | None = None, strip: int = 0) -> None:
        self.find = find
        self.find_first = find_first
        self.strip = strip
        self._table = _Table(find)
        self._first = None if find_first is None else _Table(find_first)

    def bytes_of(self, token: int) -> bytes:
        return self._table[token]

    def joiner(self) -> ByteJoiner:
        return ByteJoiner(self._table, self._first, self.strip)


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
