"""Zip of a model folder's tokenizer, for gateways that do not have the folder."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...text import ChatTemplate

CHUNK_BYTES = 64 * 1024
FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "config.json",
    "generation_config.json",
    "chat_template.json",
)
PARSED = ("tokenizer.json", "config.json")
"""Files that the server has parsed itself: links to them may lead anywhere."""
TEMPLATE = "chat_template.jinja"
EPOCH = (1980, 1, 1, 0, 0, 0)  # the same folder gives the same bytes


def bundle_of(folder: Path, template: ChatTemplate | None) -> bytes:
    """Build a zip of tokenizer, configuration, and the chat template in use. It holds no weights, no code, and no file
    outside of the folder that a link in an untrusted folder names."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
        for name in FILES:
            path = folder / name
            if path.is_file() and (name in PARSED or _belongs_to_model(path, folder)):
                archive.writestr(_entry(name), path.read_bytes())
        if template is not None:
            archive.writestr(_entry(TEMPLATE), template.source)
    return buffer.getvalue()


def _belongs_to_model(path: Path, folder: Path) -> bool:
    """Whether a file lies in the folder, or among the files that the hub's cache links its snapshots to."""
    real, home = path.resolve(), folder.resolve()
    in_cache = home.parent.name == "snapshots" and real.is_relative_to(home.parent.parent / "blobs")
    return in_cache or real.is_relative_to(home)


def chunks_of(bundle: bytes) -> Iterator[tuple[bytes, str]]:
    """Yield pieces of CHUNK_BYTES; the hexadecimal sha256 of the whole comes with the last, and is empty before."""
    digest = hashlib.sha256(bundle).hexdigest()
    for at in range(0, len(bundle), CHUNK_BYTES):
        yield bundle[at : at + CHUNK_BYTES], digest if at + CHUNK_BYTES >= len(bundle) else ""


def _entry(name: str) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name, EPOCH)
    entry.compress_type = zipfile.ZIP_DEFLATED
    return entry
