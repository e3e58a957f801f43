"""Messages between the server, the fork server and its workers, and their frames on a socket.

A frame is a header (length of the message, length of the payload; four bytes each, big-endian), the message as
msgpack, and the payload as it is: bodies and token ids are not copied into messages.
"""

from __future__ import annotations

import socket
import struct
from typing import Any

import msgspec

from ..packed_view import Packed

HEADER = struct.Struct(">II")


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of every message."""


# To the fork server


class Load(Message, frozen=True):
    """Load this model. `check` and `jobs` are "module:name": a function that takes the folder and raises ModelError for
    one that is unfit ("" for none), and the jobs that workers do, by name. `memory_bytes` bounds what loading may map
    beside the program itself; `worker_bytes` bounds a worker's growth."""

    folder: str
    chat_template: str | None
    context: int | None
    check: str
    jobs: str
    memory_bytes: int
    worker_bytes: int


class Fork(Message, frozen=True):
    """Fork worker `number`; its end of a socket pair comes along as a descriptor."""

    number: int


class Kill(Message, frozen=True):
    """Kill worker `number`, if it still runs."""

    number: int


# From the fork server


class Stage(Message, frozen=True):
    """Loading does this now, and may take `cpu_s` seconds of processor time for it."""

    name: str
    cpu_s: float


class Checked(Message, frozen=True):
    """The model's folder has passed its check."""


class Speeds(Message, frozen=True):
    """What this machine does in a second of processor time: bytes of JSON read, bytes tokenized; and seconds to render
    a short conversation."""

    parse_bytes: float
    tokenize_bytes: float
    render_s: float


class Loaded(Message, frozen=True):
    """The model is loaded; workers may be forked."""

    view: Packed
    speeds: Speeds


class Broken(Message, frozen=True):
    """The model can't be loaded; the fork server ends."""

    code: str
    message: str
    param: str | None = None


class Forked(Message, frozen=True):
    """Worker `number` runs."""

    number: int
    pid: int


class Gone(Message, frozen=True):
    """Worker `number` has ended, by `signal` (0: by itself), in `stage` of its work ("" between pieces)."""

    number: int
    signal: int
    stage: str


# To and from a worker


class Order(Message, frozen=True):
    """One piece of work; the frame's payload is its input. It may take `cpu_s` seconds of processor time."""

    job: str
    params: bytes
    cpu_s: float


class Done(Message, frozen=True):
    """The frame's payload is the result. A worker whose `last` piece this was has ended."""

    last: bool = False


class Failed(Message, frozen=True):
    """The piece of work failed with this error."""

    code: str
    message: str
    param: str | None = None
    last: bool = False


ToServer = Load | Fork | Kill
FromServer = Stage | Checked | Loaded | Broken | Forked | Gone
FromWorker = Done | Failed

to_server: msgspec.msgpack.Decoder[ToServer] = msgspec.msgpack.Decoder(ToServer)
from_server: msgspec.msgpack.Decoder[FromServer] = msgspec.msgpack.Decoder(FromServer)
order_of: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)
from_worker: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)

_encoder = msgspec.msgpack.Encoder()


def head(message: Message, payload_bytes: int = 0) -> bytes:
    """Everything of a frame but its payload."""
    body = _encoder.encode(message)
    return HEADER.pack(len(body), payload_bytes) + body


# Blocking ends, for the fork server and its workers


def write(sock: socket.socket, message: Message, payload: bytes = b"") -> None:
    """Send one frame."""
    sock.sendall(head(message, len(payload)))
    if payload:
        sock.sendall(payload)


def read(sock: socket.socket, decoder: msgspec.msgpack.Decoder[Any], start: bytes = b"") -> tuple[Any, bytes] | None:
    """The next frame's message and payload; None at the end of the stream. `start` was read before."""
    rest = _exactly(sock, HEADER.size - len(start))
    header = None if rest is None else start + rest
    if header is None:
        return None
    size, payload_bytes = HEADER.unpack(header)
    body, payload = _exactly(sock, size), _exactly(sock, payload_bytes)
    return None if body is None or payload is None else (decoder.decode(body), bytes(payload))


def _exactly(sock: socket.socket, size: int) -> bytearray | None:
    data = bytearray(size)
    view, at = memoryview(data), 0
    while at < size:
        count = sock.recv_into(view[at:])
        if not count:
            return None
        at += count
    return data
