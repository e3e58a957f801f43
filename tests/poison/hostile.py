"""Hostile model folders, each a file in `folders/`: what is changed in a good one, and what the server says of it.

A file has `why`, and words that the one line `says` with which the server refuses to start; `by = "check"` where it
does before anything is loaded. With `serves = true` it serves nevertheless; then `chat` is the status of a chat (200),
and `says` are words of its answer. Its tables name files of the folder: `text` and `bytes` replace them (each character
of `bytes` is one byte), `merge` adds to a JSON object, `header` is a safetensors file with that header, `fill`
overwrites all weights with one byte, `cut` shortens, `normalizer` doubles a text so many times, and `remove`, `links`,
`pipes` and `folders` do as they are called. `<3 x ab>` stands for ababab, and CANARY for the path of a file beside the
folder that only code of the folder's would write.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.poison.corpus import expanded

FOLDER = Path(__file__).with_name("folders")
CANARY = "CANARY"
BODY = bytes(64)


def cases() -> dict[str, dict[str, Any]]:
    """Every case by its name."""
    return {file.stem: tomllib.loads(file.read_text(encoding="utf-8")) for file in sorted(FOLDER.glob("*.toml"))}


def canary_of(folder: Path) -> Path:
    """The file that is there once code of `folder` has run."""
    return folder.with_name("canary")


def spoil(folder: Path, case: Mapping[str, Any]) -> None:
    """Change the good model in `folder` as `case` says."""
    canary = str(canary_of(folder))
    for edit, change in EDITS.items():
        for name, value in case.get(edit, {}).items():
            change(folder / name, value.replace(CANARY, canary) if isinstance(value, str) else value)


def _merge(path: Path, value: str) -> None:
    """Python writes NaN and infinities into JSON, and reads them, as models' authors do."""
    found = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(found | json.loads(expanded(value))), encoding="utf-8")


def _header(path: Path, value: str) -> None:
    header = expanded(value).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + BODY)


def _fill(path: Path, value: int) -> None:
    """Everything behind the header."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    path.write_bytes(data[:start] + bytes([value]) * (len(data) - start))


def _cut(path: Path, value: int) -> None:
    path.write_bytes(path.read_bytes()[:value])


def _normalizer(path: Path, value: int) -> None:
    twice = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    _merge(path, json.dumps({"normalizer": {"type": "Sequence", "normalizers": [twice] * value}}))


EDITS: dict[str, Callable[[Path, Any], object]] = {
    "remove": lambda path, value: path.unlink(),
    "merge": _merge,
    "normalizer": _normalizer,
    "fill": _fill,
    "cut": _cut,
    "header": _header,
    "text": lambda path, value: path.write_text(expanded(value), encoding="utf-8"),
    "bytes": lambda path, value: path.write_bytes(expanded(value).encode("latin-1")),
    "links": lambda path, value: path.symlink_to(value),
    "pipes": lambda path, value: os.mkfifo(path),
    "folders": lambda path, value: path.mkdir(),
}
