"""Token decoders: the bytes of each token, and incremental decoding of token ids to text.

Most tokenizers' decoders only join the tokens' bytes, so a stream needs a table of bytes and one UTF-8 decoder.
`byte_decoders` detects them; `window_decoder` serves all others.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

TokenLookup = Callable[[int], bytes | None]
"""Returns the bytes of a token id; None for an id without a token."""


class StreamDecoder(Protocol):
    """Incremental decoder of one sequence of token ids."""

    @property
    def pending(self) -> bool:
        """Whether the bytes of an incomplete code point are held back."""
        ...

    def push(self, ids: Sequence[int]) -> str:
        """Return the text that `ids` complete."""
        ...

    def finish(self) -> str:
        """Return the rest of the text; an incomplete code point becomes U+FFFD."""
        ...


class TokenDecoder(Protocol):
    """Decoder of one tokenizer's ids."""

    def bytes_of(self, token: int) -> bytes:
        """Return the token's bytes, possibly part of a code point; b"" for an id without a token."""
        ...

    def stream(self) -> StreamDecoder:
        """Return a decoder for a new sequence; cheap."""
        ...


class _Table(dict[int, bytes]):
    """Cache of token bytes by id, filled on first use; at most one entry a token of the vocabulary."""

    def __init__(self, lookup: TokenLookup) -> None:
        super().__init__()
        self._lookup = lookup

    def knows(self, token: int) -> bool:
        """Whether the tokenizer has a token of this id."""
        return token in self or self._lookup(token) is not None

    def __missing__(self, token: int) -> bytes:
        spelled = self._lookup(token)
        if spelled is None:
            return b""
        self[token] = spelled
        return spelled


class ByteTokenDecoder:
    """Decoder for tokenizers that join the tokens' bytes.

    `lookup_first`, if given, is used for the first token of a text. `strip` leading spaces of a text are removed.
    """

    def __init__(self, lookup: TokenLookup, lookup_first: TokenLookup | None = None, strip: int = 0) -> None:
        self.lookup = lookup
        self.lookup_first = lookup_first
        self.strip = strip
        self._table = _Table(lookup)
        self._first = None if lookup_first is None else _Table(lookup_first)

    def bytes_of(self, token: int) -> bytes:
        return self._table[token]

    def stream(self) -> ByteStreamDecoder:
        return ByteStreamDecoder(self._table, self._first, self.strip)


class ByteStreamDecoder:
    """UTF-8 decoder over the tokens' bytes.

    Holds back at most the three bytes of an incomplete code point; invalid bytes become U+FFFD at once.
    """

    def __init__(self, table: _Table, first: _Table | None, strip: int) -> None:
        self._bytes_of = table.__getitem__
        self._first = first
        self._strip = strip
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def pending(self) -> bool:
        return bool(self._utf8.getstate()[0])

    def push(self, ids: Sequence[int]) -> str:
        data = self._first_bytes(self._first, ids) if self._first is not None else b"".join(map(self._bytes_of, ids))
        return self._utf8.decode(self._strip_spaces(data) if self._strip else data)

    def _first_bytes(self, first: _Table, ids: Sequence[int]) -> bytes:
        for position, token in enumerate(ids):
            if first.knows(token):
                self._first = None
                return first[token] + b"".join(map(self._bytes_of, ids[position + 1 :]))
        return b""

    def _strip_spaces(self, data: bytes) -> bytes:
        while self._strip and data:
            if not data.startswith(b" "):
                self._strip = 0
                break
            data, self._strip = data[1:], self._strip - 1
        return data

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)
