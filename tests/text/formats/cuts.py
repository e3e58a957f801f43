"""Random cuts of an answer: into segments and pushes, never inside a special token.

`python -m tests.text.formats.cuts --cuts 10000` tries that many cuts of every vector.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence

from treadle.text.formats.reader import Segment

Pieces = list[list[Segment]]


def cut(segments: Sequence[Segment], draw: random.Random) -> Pieces:
    """Cut text at random places, and distribute the segments over pushes."""
    share = draw.choice((0.02, 0.1, 0.3, 0.7))
    pieces: Pieces = [[]]
    for text, special in segments:
        places = [] if special else [at for at in range(1, len(text)) if draw.random() < share]
        for begin, end in zip([0, *places], [*places, len(text)], strict=True):
            pieces[-1].append((text[begin:end], special))
            if draw.random() < 0.7:
                pieces.append([])
    return pieces


def single_characters(segments: Sequence[Segment]) -> Pieces:
    """Cut text between all characters."""
    return [[(part, special)] for text, special in segments for part in ([text] if special else text)]


def main() -> None:
    from .vectors import all_vectors
    from .vectors.vector import read

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cuts", type=int, default=10_000, help="random cuts of each vector")
    parser.add_argument("--format", default=None, help="name of one format (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    started, vectors = time.monotonic(), [v for v in all_vectors() if args.format in (None, v.setup.format)]
    for vector in vectors:
        draw, segments = random.Random(f"{args.seed} {vector.name}"), vector.segments()
        for number in range(args.cuts):
            pieces = cut(segments, draw)
            found = read(vector.setup, pieces)
            if found != list(vector.events):
                raise SystemExit(f"{vector.setup.format}: {vector.name}, cut {number}: {pieces} gives {found}")
    print(f"{len(vectors)} vectors, {args.cuts} cuts each, no difference ({time.monotonic() - started:.0f} s)")


if __name__ == "__main__":
    main()
