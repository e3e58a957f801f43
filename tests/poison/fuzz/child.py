"""A process that reads hostile files, and may be ended: python -m tests.poison.fuzz.child KIND SEED FIRST COUNT.

It writes `begin N` before each case and `end N OUTCOME` after it.
"""

from __future__ import annotations

import random
import resource
import sys
import tempfile
from pathlib import Path

from tests.poison.fuzz.files import Bench, tried

MEMORY_BYTES = 6 << 30


def main() -> None:
    kind, seed, first, count = sys.argv[1], *map(int, sys.argv[2:5])
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with tempfile.TemporaryDirectory() as root:
        bench = Bench(Path(root))
        for number in range(first, first + count):
            print(f"begin {number}", flush=True)
            outcome = tried(kind, random.Random(f"{kind}:{seed}:{number}"), bench)
            print(f"end {number} {outcome}", flush=True)


if __name__ == "__main__":
    main()
