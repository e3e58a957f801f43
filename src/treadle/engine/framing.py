"""Message framing on a byte stream: four bytes of length, big-endian, then msgpack."""

from __future__ import annotations

import struct

import msgspec

from ..core.messages import FromOwner, ToOwner

HEADER = struct.Struct(">I")

to_owner: msgspec.msgpack.Decoder[ToOwner] = msgspec.msgpack.Decoder(ToOwner)
from_owner: msgspec.msgpack.Decoder[FromOwner] = msgspec.msgpack.Decoder(FromOwner)

_encoder = msgspec.msgpack.Encoder()


def frame(message: object) -> bytes:
    """Serialize `message` as one frame."""
    body = _encoder.encode(message)
    return HEADER.pack(len(body)) + body
