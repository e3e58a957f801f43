"""Pictures of the workload `images`: a size and a seed in a plan, a PNG in a request."""

from __future__ import annotations

import base64
import random
import struct
import zlib
from functools import lru_cache

import msgspec

PATTERN_BYTES = 509
KEPT = 256


class Picture(msgspec.Struct, frozen=True):
    """A picture of `width` x `height` pixels. Two seeds give two pictures."""

    width: int
    height: int
    seed: int


@lru_cache(maxsize=KEPT)
def data_url(picture: Picture) -> str:
    """Return the picture as a data URL: some 10 to 100 KB of it for a megapixel."""
    return f"data:image/png;base64,{base64.b64encode(png(picture)).decode()}"


def png(picture: Picture) -> bytes:
    """Return the picture as a file: each row is a piece of one random pattern, so that it stays small."""
    rng = random.Random(f"picture {picture.seed}")
    pattern = rng.randbytes(PATTERN_BYTES)
    size = 3 * picture.width
    long = pattern * (size // PATTERN_BYTES + 2)
    starts = (rng.randrange(PATTERN_BYTES) for _ in range(picture.height))
    rows = b"".join(b"\0" + long[start : start + size] for start in starts)
    header = struct.pack(">IIBBBBB", picture.width, picture.height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows, 6)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )
