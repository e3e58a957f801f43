"""Serve every hostile model folder of the corpus, and report the ones not answered as their files require.

    python benchmarks/folders.py [NAME ...] [--at-once 2]

Each folder is served by a `treadle serve` of its own. It has to refuse to start in one line that names the cause, or to
serve if that is harmless; /health/live has to answer meanwhile. The exit status is 1 if one does not.
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.scored.figures import quantile
from tests.poison.hostile import cases
from tests.poison.starts import Start, start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="files of tests/poison/folders; all by default")
    parser.add_argument("--at-once", type=int, default=2, metavar="N")
    options = parser.parse_args()
    known = cases()
    if unknown := [name for name in options.names if name not in known]:
        parser.error(f"there is no tests/poison/folders/{unknown[0]}.toml")
    chosen = {name: known[name] for name in options.names or known}
    with ThreadPoolExecutor(options.at_once) as pool:
        found = dict(zip(chosen, pool.map(start, chosen.values()), strict=True))
    wrong = {name: text for name, one in found.items() if (text := one.wrong(chosen[name]))}
    for name, text in wrong.items():
        print(f"{name}: {text}")
    print(summary(list(found.values()), len(wrong)))
    return 1 if wrong else 0


def summary(starts: list[Start], wrong: int) -> str:
    refused = [one.took_s for one in starts if one.code is not None]
    slowest = f", p50 {quantile(refused, 0.5):.1f} s, max {max(refused):.1f} s" if refused else ""
    return f"{len(starts)} folders: {len(refused)} refused{slowest}; {len(starts) - len(refused)} served; {wrong} wrong"


if __name__ == "__main__":
    sys.exit(main())
