"""A hub model's folder without its weights: small files as they are, safetensors files as their headers over a hole.

Made from range requests of a few hundred kilobytes, it is a folder that every check and estimate reads like the real
one; the tensors' values are never there. Imported late, as it asks the hub.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePath

from ..errors import ModelError
from .remote import Listing, RemoteFile, read

_AT_ONCE = 8
_FIRST_BYTES = 1 << 17  # most headers are shorter
_LONGEST_HEADER = 100_000_000
_LONGEST_SMALL = 4_000_000
_STAND_IN = {"tokenizer.json": b"{}"}


def draw(listing: Listing, folder: Path) -> None:
    """Write the sketch of `listing` into `folder`. Raises the errors of `huggingface_hub`, and ModelError where a
    weight file has no header."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for _ in pool.map(lambda file: _draw(listing, file, folder / file.name), _plain(listing)):
            pass


def _plain(listing: Listing) -> list[RemoteFile]:
    """Files that lie in the repository's own folder."""
    return [file for file in listing.files if PurePath(file.name).name == file.name and file.name not in ("", "..")]


def _draw(listing: Listing, file: RemoteFile, path: Path) -> None:
    if file.name in _STAND_IN:
        path.write_bytes(_STAND_IN[file.name])
    elif path.match("model*.safetensors"):
        _draw_weights(listing, file, path)
    elif path.suffix in (".json", ".jinja") and file.size <= _LONGEST_SMALL:
        path.write_bytes(read(listing, file.name, 0, file.size) if file.size else b"")
    else:
        path.touch()  # its name is all that counts


def _draw_weights(listing: Listing, file: RemoteFile, path: Path) -> None:
    head = read(listing, file.name, 0, min(file.size, _FIRST_BYTES))
    end = 8 + int.from_bytes(head[:8], "little")
    if len(head) < 8 or end > min(file.size, _LONGEST_HEADER):
        raise ModelError(f"{listing.model}: {file.name} is not a safetensors file")
    if end > len(head):
        head += read(listing, file.name, len(head), end - len(head))
    with path.open("wb") as hole:
        hole.write(head[:end])
        hole.truncate(file.size)
