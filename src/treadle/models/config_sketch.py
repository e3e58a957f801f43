"""Sketch of a hub model: its folder with small files and weight headers, but without weights.

A sketch is made by range requests of a few hundred kilobytes. Safetensors files are sparse: a header and a hole. Folder
checks and memory estimates read a sketch like the real folder. Imported late, as it imports `huggingface_hub`.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePath

from ..errors import ModelError
from ..weight_names import is_weights
from .remote import Listing, RemoteFile, read

_CONCURRENCY = 8
_FIRST_BYTES = 1 << 17  # most headers are shorter
_MAX_HEADER = 100_000_000
_MAX_SMALL = 4_000_000
_STAND_IN = {"tokenizer.json": b"{}"}


def write_sketch(listing: Listing, folder: Path) -> None:
    """Write the sketch of `listing` into `folder`. Raises the errors of `huggingface_hub`, and ModelError for a weight
    file that is not a safetensors file."""
    with ThreadPoolExecutor(_CONCURRENCY) as pool:
        for _ in pool.map(lambda file: _write_file(listing, file, folder / file.name), _top_level_files(listing)):
            pass


def _top_level_files(listing: Listing) -> list[RemoteFile]:
    """Return the files in the repository's top folder."""
    return [file for file in listing.files if PurePath(file.name).name == file.name and file.name not in ("", "..")]


def _write_file(listing: Listing, file: RemoteFile, path: Path) -> None:
    if file.name in _STAND_IN:
        path.write_bytes(_STAND_IN[file.name])
    elif is_weights(file.name):
        _write_weight_header(listing, file, path)
    elif path.suffix in (".json", ".jinja") and file.size <= _MAX_SMALL:
        path.write_bytes(read(listing, file.name, 0, file.size) if file.size else b"")
    else:
        path.touch()  # checks need only the name


def _write_weight_header(listing: Listing, file: RemoteFile, path: Path) -> None:
    head = read(listing, file.name, 0, min(file.size, _FIRST_BYTES))
    end = 8 + int.from_bytes(head[:8], "little")
    if len(head) < 8 or end > min(file.size, _MAX_HEADER):
        raise ModelError(f"{listing.model}: {file.name} is not a safetensors file")
    if end > len(head):
        head += read(listing, file.name, len(head), end - len(head))
    with path.open("wb") as hole:
        hole.write(head[:end])
        hole.truncate(file.size)
