"""Reading of files that a user names, which may be pipes or devices."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def read_regular(path: Path, most: int = -1) -> bytes:
    """Read a regular file of at most `most` bytes (-1: any number). Raises OSError, also for a pipe or a device:
    opening a pipe would wait for a writer, and reading a device might not end."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        content = file.read(-1 if most < 0 else most + 1)
    if 0 <= most < len(content):
        raise OSError(errno.EFBIG, f"it has more than {most} bytes")
    return content
