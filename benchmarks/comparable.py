"""Copy a model so that servers which treat it differently have the same work to do.

    python benchmarks/comparable.py MODEL OUT [--endless] [--float32]

`--endless`: no answer ends before its limit of tokens. The peers do not know `ignore_eos`, so their answers would be
shorter than Treadle's. The end token is replaced by one that the model has no use for (named "unused" or "reserved" in
its tokenizer, else its last one), and texts that end an answer are left out.
`--float32`: bfloat16 weights as float32, which every bfloat16 number is exactly. On a CPU, Treadle computes in float32
with OpenBLAS, and the peers in the dtype of the weights, without any BLAS: with this copy and
`peers.py command --openblas` they do the same arithmetic.

Give the copy to all servers, Treadle too. Needs nothing but Python 3.11 or newer.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

BLOCK = 1 << 24
OMITTED = ("treadle-manifest.json", "model.safetensors.index.json")  # they describe the original files
UNUSED = re.compile(r"unused|reserved", re.IGNORECASE)


def change(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Edit the JSON object in `path`, if there is one."""
    if path.is_file():
        value = json.loads(path.read_text(encoding="utf-8"))
        edit(value)
        path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def unused_token(folder: Path) -> tuple[int, str]:
    """Return the id and the text of a token that the model has no use for."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    tokens = {int(entry["id"]): str(entry["content"]) for entry in tokenizer.get("added_tokens", ())}
    named = [id_ for id_ in sorted(tokens) if UNUSED.search(tokens[id_])]
    tokens = {int(id_): str(text) for text, id_ in tokenizer["model"]["vocab"].items()} | tokens
    chosen = named[0] if named else max(tokens)
    return chosen, tokens[chosen]


def endless(folder: Path) -> None:
    """Let only the limit of tokens end an answer."""
    id_, text = unused_token(folder)

    def config(value: dict[str, Any]) -> None:
        value["eos_token_id"] = id_
        value.pop("stop_strings", None)

    change(folder / "config.json", config)
    change(folder / "generation_config.json", config)
    change(folder / "tokenizer_config.json", lambda value: value.update(eos_token=text))
    print(f"end token: {id_} {text}")


def as_float32(source: Path, target: Path) -> None:
    """Write the tensors of the safetensors file `source`, those of bfloat16 as float32."""
    with source.open("rb") as file, target.open("wb") as out:
        length = int.from_bytes(file.read(8), "little")
        tensors = json.loads(file.read(length))
        tensors.pop("__metadata__", None)
        header = json.dumps(float32_header(tensors)).encode()
        header += b" " * (-len(header) % 8)
        out.write(len(header).to_bytes(8, "little") + header)
        for entry in tensors.values():
            start, end = entry["data_offsets"]
            file.seek(8 + length + start)
            for block in blocks(file, end - start):
                out.write(to_float32(block) if entry["dtype"] == "BF16" else block)


def float32_header(tensors: dict[str, Any]) -> dict[str, Any]:
    """Return the header of the same tensors, in the same order, with float32 for bfloat16."""
    header, at = {}, 0
    for name, entry in tensors.items():
        start, end = entry["data_offsets"]
        size = (end - start) * (2 if entry["dtype"] == "BF16" else 1)
        dtype = "F32" if entry["dtype"] == "BF16" else entry["dtype"]
        header[name] = {"dtype": dtype, "shape": entry["shape"], "data_offsets": [at, at + size]}
        at += size
    return header


def blocks(file: BinaryIO, size: int) -> Iterator[bytes]:
    """Yield the next `size` bytes of `file`, in pieces."""
    while size:
        block = file.read(min(size, BLOCK))
        if not block:
            sys.exit(f"{file.name} is torn: copy it again")
        size -= len(block)
        yield block


def to_float32(block: bytes) -> bytes:
    """Convert bfloat16 numbers to float32: the same upper half, and zeros."""
    wide = bytearray(2 * len(block))
    wide[2::4], wide[3::4] = block[0::2], block[1::2]
    return bytes(wide)


def copy(model: Path, out: Path, float32: bool) -> None:
    """Copy all files of `model`; unchanged weights become links."""
    out.mkdir(parents=True)
    for path in sorted(model.iterdir()):
        if path.name in OMITTED or not path.is_file():
            continue
        if path.suffix != ".safetensors":
            shutil.copyfile(path, out / path.name)
        elif float32:
            as_float32(path, out / path.name)
        else:
            os.symlink(path.resolve(), out / path.name)
    if float32:
        change(out / "config.json", lambda value: value.update(torch_dtype="float32"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL", help="a model folder")
    parser.add_argument("out", type=Path, metavar="OUT", help="a folder that is not there yet")
    parser.add_argument("--endless", action="store_true")
    parser.add_argument("--float32", action="store_true")
    options = parser.parse_args()
    if not (options.model / "config.json").is_file():
        sys.exit(f"{options.model} is not a model folder: name one that holds config.json, weights and a tokenizer")
    if options.out.exists():
        sys.exit(f"{options.out} is there already: name a new folder")
    copy(options.model, options.out, options.float32)
    if options.endless:
        endless(options.out)
    print(options.out)


if __name__ == "__main__":
    main()
