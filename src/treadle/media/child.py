"""Image process: `python -m treadle.media.child FD PARENT`. FD is one end of a socket pair, PARENT the server's process
id.

It prepares one image at a time, so that an image that ends it is the one at fault. Nothing it does needs the network or
a file. It exits when the server's end of the socket closes, or with the server.
"""

from __future__ import annotations

import math
import signal
import socket
import sys

import numpy as np

from .. import shared_memory
from ..errors import InvalidRequest, TreadleError
from ..text.work import limits
from ..text.work.messages import read, write
from .decode import decode, open_image, upright_size
from .messages import FULL, Prepare, Prepared, Refused, Start, Started, prepare_of, start_of
from .pixels.families import plan_of, values_of, write_pixels


def prepare(start: Start, order: Prepare, data: bytes) -> Prepared:
    """Make the pixels of an image. Raises InvalidRequest, and OSError where there is no shared memory for them."""
    image = open_image(data, order.media_type, start.pixels)
    plan = plan_of(start.settings, *upright_size(image), low=order.low)
    if plan.size_bytes > order.most_bytes:
        raise InvalidRequest("the image is too large for this server's shared memory: make it smaller")
    decoded = decode(image)
    with shared_memory.create(order.name, plan.size_bytes) as view:
        count = math.prod(plan.shape)
        out = np.frombuffer(view, np.uint8, count).reshape(plan.shape)
        write_pixels(start.settings, plan, decoded, out)
        del out
        view[count : plan.size_bytes] = values_of(start.settings).tobytes()
    return Prepared(plan.shape, plan.layout)


def answer(start: Start, order: Prepare, data: bytes) -> Prepared | Refused:
    """Make the pixels of an image, within the limit of processor time, or refuse it."""
    limits.limit_cpu(start.cpu_s)
    try:
        return prepare(start, order, data)
    except TreadleError as error:
        return Refused(error.code, error.message)
    except MemoryError:
        return Refused(InvalidRequest.code, "the image needs more memory than one may take: make it smaller")
    except OSError as error:
        return Refused(FULL, str(error.strerror))
    finally:
        limits.limit_cpu(0.0)


def serve(sock: socket.socket) -> None:
    """Prepare images until the server closes the socket."""
    first = read(sock, start_of)
    if first is None:
        return
    start: Start = first[0]
    limits.limit_memory(start.memory_bytes)
    write(sock, Started())
    while (frame := read(sock, prepare_of)) is not None:
        write(sock, answer(start, *frame))


def main(argv: list[str]) -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    limits.die_with_parent(int(argv[1]))
    limits.disable_core_dumps()
    serve(socket.socket(fileno=int(argv[0])))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
