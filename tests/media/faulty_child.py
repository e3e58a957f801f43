"""An image process that does what its image says: hang, spin, crash, use up memory, or fail in an unknown way."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

from treadle.media import child, decode

real_open = decode.open_image


def open_image(data: bytes, *more: Any) -> Any:
    word = data[:6]
    if word == b"hang  ":
        time.sleep(1000)
    while word == b"spin  ":
        pass
    if word == b"crash ":
        os.kill(os.getpid(), signal.SIGSEGV)
    if word == b"killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if word == b"memory":
        bytearray(1 << 44)
    if word == b"full  ":
        raise OSError(28, "No space left on device")
    if word == b"fault ":
        raise ZeroDivisionError
    if word == b"slow  ":
        time.sleep(float(data[6:12]))
        data = data[12:]
    return real_open(data, *more)


setattr(child, "open_image", open_image)  # noqa: B010

if __name__ == "__main__":
    sys.exit(child.main(sys.argv[1:]))
