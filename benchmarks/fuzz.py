"""Fuzz the server and its parsers: mutated requests, messages, bytes, templates and files of models.

    python benchmarks/fuzz.py [KIND ...] [--seconds 60] [--seed 1] [--case N]

json, http, http2 and grpc go to a server of a tiny model, beside a client whose greedy answer must stay the same;
template, safetensors, gguf, config and tokenizer are read in a process with limits. Each kind takes `--seconds`. A case
is made from kind, seed and number alone, so `--seed 1 --case 17` sends that one again. The exit status is 1 if
a case got neither a typed error nor an answer, or if the server's state changed.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.poison.attacked import attacked
from tests.poison.fuzz import files, wires
from tests.poison.fuzz.runs import Run, over_files, over_wires

ENDLESS = 1 << 40


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join((*wires.KINDS, *files.KINDS))}")
    parser.add_argument("--seconds", type=float, default=60.0, metavar="S")
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    parser.add_argument("--case", type=int, metavar="N", help="this one alone")
    options = parser.parse_args()
    if unknown := set(options.kinds) - {*wires.KINDS, *files.KINDS}:
        parser.error(f"there is no kind {min(unknown)!r}")
    runs = [one(kind, options) for kind in options.kinds or (*wires.KINDS, *files.KINDS)]
    return 1 if any(run.wrong for run in runs) else 0


def one(kind: str, options: argparse.Namespace) -> Run:
    """Run all cases of one kind, and print the result."""
    end = time.monotonic() + options.seconds
    first, count = (0, ENDLESS) if options.case is None else (options.case, 1)
    if kind in files.KINDS:
        run = over_files(kind, options.seed, first, count, end)
    else:
        run = to_a_server(kind, options.seed, itertools.islice(itertools.count(first), count), options.seconds)
    print(run, flush=True)
    return run


def to_a_server(kind: str, seed: int, numbers: itertools.islice[int], seconds: float) -> Run:
    with tempfile.TemporaryDirectory() as folder, attacked(Path(folder), context=512) as target:
        return over_wires(kind, target, seed, numbers, time.monotonic() + seconds)


if __name__ == "__main__":
    sys.exit(main())
