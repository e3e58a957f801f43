"""Content codings of request bodies: gzip, deflate and zstd, inflated in bounded pieces."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterable
from typing import Protocol

from ...errors import InvalidRequest

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

CODINGS = ("gzip", "deflate", "zstd")
_OTHER_NAMES = {"x-gzip": "gzip"}
_WBITS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
_WINDOW_LOG = 23
"""The largest window of zstd as a content coding: 8 MiB (RFC 9659)."""


class UnsupportedCoding(InvalidRequest):
    """The body has a content coding that is not inflated here."""

    code = "unsupported_content_encoding"
    http_status = 415


class Inflater(Protocol):
    """Decoder of one compressed body. `hungry`: all that can be inflated of the bytes so far has been taken."""

    hungry: bool

    def push(self, data: bytes) -> None:
        """Add compressed bytes, once all before them are used up. Raises InvalidRequest behind the data's end."""
        ...

    def take(self, most: int) -> bytes:
        """Inflate up to `most` bytes, at least 1. Raises InvalidRequest for corrupt data."""
        ...

    def finish(self) -> None:
        """Raise InvalidRequest unless the data has come to its end."""
        ...


def coding_of(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """Return the coding of a body with these headers; None for one that is sent as it is. Raises UnsupportedCoding."""
    values = b",".join(value for name, value in headers if name == b"content-encoding")
    names = [name.strip().lower() for name in values.decode("latin-1").split(",")]
    codings = [_OTHER_NAMES.get(name, name) for name in names if name not in ("", "identity")]
    if len(codings) > 1:
        raise UnsupportedCoding(f"the body has {len(codings)} content codings: use one of {', '.join(CODINGS)}")
    if codings and codings[0] not in CODINGS:
        raise UnsupportedCoding(
            f"the content coding '{codings[0][:40]}' is not supported: use one of {', '.join(CODINGS)}, or none"
        )
    return codings[0] if codings else None


def inflater_of(coding: str) -> Inflater:
    """Return a new decoder of one of CODINGS."""
    return _Zstd() if coding == "zstd" else _Zlib(coding)


class _Zlib:
    """Decoder of gzip and deflate."""

    def __init__(self, coding: str) -> None:
        self.hungry = True
        self._coding = coding
        self._pending = b""
        self._decoder = zlib.decompressobj(_WBITS[coding])

    def push(self, data: bytes) -> None:
        if data and self._decoder.eof:
            raise _trailing(self._coding)
        self._pending = data
        self.hungry = not data

    def take(self, most: int) -> bytes:
        decoder = self._decoder
        try:
            found = decoder.decompress(self._pending, most)
        except zlib.error as error:
            raise _corrupt(self._coding, error) from error
        if decoder.unused_data:
            raise _trailing(self._coding)
        self._pending = decoder.unconsumed_tail
        self.hungry = decoder.eof or (not self._pending and len(found) < most)
        return found

    def finish(self) -> None:
        if not self._decoder.eof:
            raise _truncated(self._coding)


class _Zstd:
    """Decoder of zstd: one frame, of a bounded window."""

    def __init__(self) -> None:
        self.hungry = True
        self._pending = b""
        self._decoder = zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: _WINDOW_LOG})

    def push(self, data: bytes) -> None:
        if data and self._decoder.eof:
            raise _trailing("zstd")
        self._pending = data
        self.hungry = not data

    def take(self, most: int) -> bytes:
        decoder = self._decoder
        try:
            found: bytes = decoder.decompress(self._pending, most)
        except zstd.ZstdError as error:
            raise _corrupt("zstd", error) from error
        if decoder.unused_data:
            raise _trailing("zstd")
        self._pending = b""  # the decoder keeps what it has not used
        self.hungry = decoder.eof or decoder.needs_input
        return found

    def finish(self) -> None:
        if not self._decoder.eof:
            raise _truncated("zstd")


def _corrupt(coding: str, error: Exception) -> InvalidRequest:
    return InvalidRequest(f"the body is not valid {coding} ({str(error)[:120]}): send what its Content-Encoding says")


def _truncated(coding: str) -> InvalidRequest:
    return InvalidRequest(f"the body ends before its {coding} data does: send all of it")


def _trailing(coding: str) -> InvalidRequest:
    return InvalidRequest(f"the body goes on behind the end of its {coding} data: send one {coding} stream alone")
