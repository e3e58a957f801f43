"""Reader and writer of safetensors files, without a tensor library.

A file is eight bytes of header length, a JSON header, and the data. Reading checks the header against the file's size,
which detects torn downloads before loading.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ModelError, one_line

_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}
_MAX_HEADER = 100_000_000
_MAX_TENSORS = 300_000


@dataclass(frozen=True)
class Tensor:
    """One tensor of a file. `start`, `end`: byte offsets from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def read_header(path: Path) -> dict[str, Tensor]:
    """Read the header and return the tensors by name. Raises ModelError when the file is torn or malformed."""
    if path.exists() and not path.is_file():  # opening a pipe would wait for a writer
        raise ModelError(f"can't read {path}: it is not a regular file")
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or not 2 <= length <= min(size - 8, _MAX_HEADER):
                raise ModelError(f"{path} is torn or not a safetensors file: download it again")
            data = file.read(length)
        if (count := data.count(b'"data_offsets"')) > _MAX_TENSORS:
            raise ModelError(f"{path} names {count} tensors, which no model has: use another")
        header = json.loads(data)
    except OSError as error:
        raise ModelError(f"can't read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} has a broken header: download it again ({error})") from error
    if not isinstance(header, dict):
        raise ModelError(f"{path} has a broken header: download it again")
    header.pop("__metadata__", None)
    tensors = {name: _check_entry(path, name, entry, size - 8 - length) for name, entry in header.items()}
    _check_places(path, tensors, size - 8 - length)
    return tensors


def _check_entry(path: Path, name: str, entry: Any, data_bytes: int) -> Tensor:
    try:
        tensor = Tensor(str(entry["dtype"]), tuple(entry["shape"]), *entry["data_offsets"])
        sane = all(type(n) is int and n >= 0 for n in (*tensor.shape, tensor.start, tensor.end))
        sane = sane and tensor.start <= tensor.end
    except (KeyError, TypeError, ValueError):
        sane = False
    if not sane:
        raise ModelError(f"{path}: the header's entry for '{one_line(name)}' is malformed")
    if tensor.end > data_bytes:
        missing = tensor.end - data_bytes
        raise ModelError(f"{path} is torn: '{one_line(name)}' ends {missing} bytes after the file; download it again")
    width = _BYTES.get(tensor.dtype)
    if width is not None and tensor.end - tensor.start != width * math.prod(tensor.shape):
        shape = one_line(list(tensor.shape))
        raise ModelError(f"{path}: '{one_line(name)}' does not have the bytes of {tensor.dtype} {shape}")
    return tensor


def _check_places(path: Path, tensors: Mapping[str, Tensor], data_bytes: int) -> None:
    """Raise ModelError unless the tensors cover the data without gaps and overlaps, as the format demands: other files
    are damaged or forged, and give wrong weights."""
    at, before = 0, ""
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].start):
        if tensor.start == tensor.end:
            continue
        if tensor.start < at:
            raise ModelError(
                f"{path} is damaged: '{one_line(name)}' overlaps '{one_line(before)}'; download it again, or save the "
                "model anew"
            )
        if tensor.start > at:
            raise _uncovered(path, at, tensor.start)
        at, before = tensor.end, name
    if at < data_bytes:
        raise _uncovered(path, at, data_bytes)


def _uncovered(path: Path, start: int, end: int) -> ModelError:
    return ModelError(
        f"{path} is damaged: {end - start} of its bytes (from {start} on) belong to no tensor; download it again, or "
        "save the model anew"
    )


def write(path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]], data: Mapping[str, Iterable[bytes]]) -> str:
    """Write a file and return its sha256, in hex.

    `tensors` gives each name's dtype (BF16, F32, ...) and shape, `data` its content in blocks, little-endian. Blocks
    are consumed one at a time, so the model is never wholly in memory. The file is synced to disk.
    """
    header, at = {}, 0
    for name, (dtype, shape) in tensors.items():
        end = at + _BYTES[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps({"__metadata__": {"format": "mlx"}, **header}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for block in _blocks(text, tensors, data):
            file.write(block)
            digest.update(block)
        file.flush()
        os.fsync(file.fileno())
    if path.stat().st_size != 8 + len(text) + at:
        raise ValueError(f"{path}: the contents do not have the size that their shapes say")
    return digest.hexdigest()


def _blocks(header: bytes, names: Mapping[str, Any], data: Mapping[str, Iterable[bytes]]) -> Iterator[bytes]:
    yield len(header).to_bytes(8, "little")
    yield header
    for name in names:
        yield from data[name]
