"""Pictures of tests, drawn without a file: noise of a seed, gradients, and files of each format."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """An RGB picture of smooth gradients with some noise, the same everywhere."""
    x, y = np.linspace(0, 255, width), np.linspace(0, 255, height)[:, None]
    noise = np.random.default_rng(seed).integers(0, 40, (height, width, 3))
    base = np.stack([x + 0 * y, 0 * x + y, (x + y) / 2], axis=-1)
    return Image.fromarray(np.clip(base * 0.85 + noise, 0, 255).astype(np.uint8))


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """The picture as a file."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def png(width: int = 8, height: int = 6, seed: int = 0) -> bytes:
    return encoded(picture(width, height, seed))


def claimed_png(width: int, height: int) -> bytes:
    """A PNG of a few bytes that says it has `width` x `height` pixels: a bomb."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(bytes(1000))), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )


def animated(kind: str, *seeds: int, width: int = 12, height: int = 9) -> bytes:
    """An animation of several pictures."""
    first, *others = (picture(width, height, seed) for seed in seeds)
    return encoded(first, kind, save_all=True, append_images=others, duration=50, **LOSSLESS.get(kind, {}))


LOSSLESS: dict[str, dict[str, Any]] = {"WEBP": {"lossless": True}}
