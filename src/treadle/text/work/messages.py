"""Messages between the server, the fork server and its workers, and their frames on a socket.

A frame is a header (length of the message, length of the payload; four bytes each, big-endian), the message as
msgpack, and the payload as raw bytes, so that bodies and token ids are not copied into messages.
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


class LogLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of a text process's log: the logger's name, the level, the message, and the event's fields."""

    logger: str
    level: int
    message: str
    fields: tuple[tuple[str, Any], ...] = ()


class LogLines(msgspec.Struct, frozen=True, omit_defaults=True):
    """Lines of a text process's log, and the number of further ones."""

    lines: tuple[LogLine, ...]
    dropped: int = 0


# To the fork server


class Load(Message, frozen=True):
    """Load a model. `check` and `jobs` are "module:name". `check` is a function that takes the folder and raises
    ModelError if it is unfit ("" for none); `jobs` is the mapping of the workers' jobs by name. `memory_bytes` limits
    the memory mapped by loading, `worker_bytes` a worker's growth. The parsers are those of `TextModel.load`."""

    folder: str
    chat_template: str | None
    context: int | None
    check: str
    jobs: str
    memory_bytes: int
    worker_bytes: int
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"


class Fork(Message, frozen=True):
    """Fork worker `number`. Its end of a socket pair is passed along as a descriptor."""

    number: int


class Kill(Message, frozen=True):
    """Kill worker `number`, if it is still running."""

    number: int


# From the fork server


class Stage(Message, frozen=True):
    """Loading has entered stage `name`, which may take `cpu_s` seconds of processor time."""

    name: str
    cpu_s: float


class FolderChecked(Message, frozen=True):
    """The model's folder has passed `Load.check`."""


class Speeds(Message, frozen=True):
    """Speeds of this machine: bytes of JSON parsed and bytes of text tokenized in a second of processor time, and
    seconds to render a short conversation."""

    parse_bytes: float
    tokenize_bytes: float
    render_s: float


class Loaded(Message, frozen=True):
    """The model is loaded. Workers can be forked."""

    view: Packed
    speeds: Speeds
    log: LogLines | None = None


class LoadFailed(Message, frozen=True):
    """The model can't be loaded. The fork server exits."""

    code: str
    message: str
    param: str | None = None
    log: LogLines | None = None


class Forked(Message, frozen=True):
    """Worker `number` is running as process `pid`."""

    number: int
    pid: int


class Exited(Message, frozen=True):
    """Worker `number` has exited, by `signal` (0: by itself), in `stage` of an item ("" if it was idle)."""

    number: int
    signal: int
    stage: str


# To and from a worker


class Order(Message, frozen=True):
    """Run `job` on the frame's payload, within `cpu_s` seconds of processor time."""

    job: str
    params: bytes
    cpu_s: float


class Done(Message, frozen=True, omit_defaults=True):
    """The frame's payload is the job's result. `last`: the worker has exited after it. `compiled`: the job ended with
    the check of a grammar."""

    last: bool = False
    compiled: bool = False
    log: LogLines | None = None


class Failed(Message, frozen=True, omit_defaults=True):
    """The job failed with this error. `fault` says what went wrong where the job did not refuse the request."""

    code: str
    message: str
    param: str | None = None
    last: bool = False
    fault: str = ""
    log: LogLines | None = None


ToServer = Load | Fork | Kill
FromServer = Stage | FolderChecked | Loaded | LoadFailed | Forked | Exited
FromWorker = Done | Failed

to_server: msgspec.msgpack.Decoder[ToServer] = msgspec.msgpack.Decoder(ToServer)
from_server: msgspec.msgpack.Decoder[FromServer] = msgspec.msgpack.Decoder(FromServer)
order_of: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)
from_worker: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)

_encoder = msgspec.msgpack.Encoder()


def frame_start(message: Message, payload_bytes: int = 0) -> bytes:
    """Return a frame's header and message, without its payload."""
    body = _encoder.encode(message)
    return HEADER.pack(len(body), payload_bytes) + body


# Blocking ends, for the fork server and its workers


def write(sock: socket.socket, message: Message, payload: bytes = b"") -> None:
    """Send one frame."""
    sock.sendall(frame_start(message, len(payload)))
    if payload:
        sock.sendall(payload)


def read(sock: socket.socket, decoder: msgspec.msgpack.Decoder[Any], start: bytes = b"") -> tuple[Any, bytes] | None:
    """Receive one frame; returns message and payload, None at the end of the stream. `start`: header bytes already
    read."""
    rest = _read_exactly(sock, HEADER.size - len(start))
    header = None if rest is None else start + rest
    if header is None:
        return None
    size, payload_bytes = HEADER.unpack(header)
    body, payload = _read_exactly(sock, size), _read_exactly(sock, payload_bytes)
    return None if body is None or payload is None else (decoder.decode(body), bytes(payload))


def _read_exactly(sock: socket.socket, size: int) -> bytearray | None:
    data = bytearray(size)
    view, at = memoryview(data), 0
    while at < size:
        count = sock.recv_into(view[at:])
        if not count:
            return None
        at += count
    return data
