"""GGUF reader: metadata and tensor positions.

A vocabulary of 262,144 strings is read in one pass; the `gguf` package's reader takes ten seconds for it.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import ModelError, one_line

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_UINT64 = struct.Struct("<Q")


@dataclass(frozen=True)
class GgufTensor:
    """Position of a tensor. `shape`: row-major. `kind`: GGML type number. `start`: byte offset in the file."""

    name: str
    shape: tuple[int, ...]
    kind: int
    start: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))


class GgufFile:
    """A memory-mapped GGUF file (version 2 or 3, little-endian). The mapping lives as long as a view into it.

    `metadata` maps names to ints, floats, bools, strings and lists of them; `tensors` are in the file's order.
    Raises ModelError when the file is not GGUF or ends too early.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self.metadata, self.tensors = _parse(self._map)
        except (struct.error, ValueError, KeyError, IndexError, OverflowError) as error:
            raise ModelError(f"{path} is not a complete GGUF file: {one_line(error)}") from error

    def raw(self, tensor: GgufTensor, byte_count: int) -> npt.NDArray[np.uint8]:
        """Return the first `byte_count` stored bytes of the tensor as a view of the file. Raises ModelError past the
        file's end."""
        if tensor.start + byte_count > len(self._map):
            raise ModelError(f"{self.path} ends inside the tensor {tensor.name}: the file is torn")
        return np.frombuffer(self._map, dtype=np.uint8, count=byte_count, offset=tensor.start)


class _Cursor:
    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0

    def take(self, code: str, count: int = 1) -> tuple[Any, ...]:
        layout = struct.Struct(f"<{count}{code}")
        values = layout.unpack_from(self.data, self.at)
        self.at += layout.size
        return values

    def number(self, code: str) -> Any:
        return self.take(code)[0]

    def text(self) -> str:
        return self.texts(1)[0]

    def texts(self, count: int) -> list[str]:
        data, at, found = self.data, self.at, []
        for _ in range(count):
            (length,) = _UINT64.unpack_from(data, at)
            start, at = at + 8, at + 8 + length
            if at > len(data):
                raise IndexError(f"a string ends {at - len(data)} bytes after the file")
            found.append(data[start:at].decode("utf-8"))
        self.at = at
        return found

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self.array()
        return self.number(_SCALARS[kind])

    def array(self) -> list[Any]:
        kind, count = self.number("I"), self.number("Q")
        if kind == _STRING:
            return self.texts(count)
        return list(self.take(_SCALARS[kind], count))


def _parse(data: mmap.mmap) -> tuple[Mapping[str, Any], tuple[GgufTensor, ...]]:
    cursor = _Cursor(data)
    magic, version = data[:4], cursor.take("I", 2)[1]
    if magic != b"GGUF" or version not in (2, 3):
        raise IndexError(f"it starts with {magic!r}, version {version}")
    tensor_count, value_count = cursor.number("Q"), cursor.number("Q")
    metadata: dict[str, Any] = {}
    for _ in range(value_count):
        name = cursor.text()
        metadata[name] = cursor.value(cursor.number("I"))
    places = [_read_tensor_info(cursor) for _ in range(tensor_count)]
    align = metadata.get("general.alignment", 32)
    if type(align) is not int or align < 1:
        raise ValueError(f"general.alignment is {one_line(align)}")
    base = -(-cursor.at // align) * align
    return metadata, tuple(GgufTensor(name, shape, kind, base + start) for name, shape, kind, start in places)


def _read_tensor_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name, dimensions = cursor.text(), cursor.number("I")
    shape = tuple(reversed(cursor.take("Q", dimensions)))
    return name, shape, cursor.number("I"), cursor.number("Q")
