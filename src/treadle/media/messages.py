"""Messages between the server and its image processes. Their frames are those of the text processes
(`text.work.messages`)."""

from __future__ import annotations

import msgspec

from ..text.images import AnySettings, Layout
from ..text.work.messages import Message

FULL = "shared_memory_full"
"""Code of a refusal that is not the image's fault: the machine's shared memory is full."""


class Start(Message, frozen=True):
    """The first message to an image process: the model's settings, and limits of an image's pixels, of the process's
    memory in bytes, and of the processor time for an image in seconds."""

    settings: AnySettings
    pixels: int
    memory_bytes: int
    cpu_s: float


class Started(Message, frozen=True):
    """The image process takes images."""


class Prepare(Message, frozen=True):
    """Make the pixels of the image in the frame's payload, in new shared memory `name`. `media_type` is the client's
    own ("" for none). `low`: few tokens are enough. More than `most_bytes` of pixels are refused."""

    name: str
    media_type: str = ""
    low: bool = False
    most_bytes: int = 1 << 62


class Prepared(Message, frozen=True):
    """The pixels are in the shared memory (`pixels_memory.Pixels`), an array of `shape`."""

    shape: tuple[int, ...]
    layout: Layout


class Refused(Message, frozen=True):
    """The image can't be used. `code` is that of an error."""

    code: str
    message: str


FromChild = Started | Prepared | Refused

start_of: msgspec.msgpack.Decoder[Start] = msgspec.msgpack.Decoder(Start)
prepare_of: msgspec.msgpack.Decoder[Prepare] = msgspec.msgpack.Decoder(Prepare)
from_child: msgspec.msgpack.Decoder[FromChild] = msgspec.msgpack.Decoder(FromChild)
