"""Write a tiny random model that Treadle and its peers serve: all of the serving, next to none of the arithmetic.

    python benchmarks/tiny_model.py OUT [--context 8192] [--layers 2] [--seed 0]

The llama that the tests use (float32, one token a byte, a chat template), changed to generate printable ASCII only:
each token is a piece of text at once, also on servers that hold back half characters, and none is an end token, so that
an answer is as long as the request allows on servers that do not know `ignore_eos` too. The same seed writes the same
files. Needs the Python that Treadle is installed in.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.support.tiny import make_tiny

from treadle.models.safetensors_file import read_header

PRINTABLE = range(0x20, 0x7F)


def only_printable(weights: Path) -> None:
    """Give every token outside of PRINTABLE a logit of 0, which is never the highest of many random ones."""
    head = read_header(weights)["lm_head.weight"]
    row_bytes = (head.end - head.start) // head.shape[0]
    with weights.open("r+b") as file:
        data = 8 + int.from_bytes(file.read(8), "little")
        for token in range(head.shape[0]):
            if token not in PRINTABLE:
                file.seek(data + head.start + token * row_bytes)
                file.write(bytes(row_bytes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--context", type=int, default=8192, metavar="TOKENS")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.out.exists() and (not options.out.is_dir() or any(options.out.iterdir())):
        sys.exit(f"{options.out} is there already: name a new folder")
    make_tiny(options.out, context=options.context, layers=options.layers, seed=options.seed)
    only_printable(options.out / "model.safetensors")
    print(options.out)


if __name__ == "__main__":
    main()
