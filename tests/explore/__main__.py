"""Explores the engine's protocol: `python -m tests.explore`.

Every scenario of `scenarios`, in as many processes as are asked for; `--mutants` puts faults into the engine and
prints how each was found; `--replay NAME ACTION...` performs one list of actions. Ends with 1 where a property fails.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys

from .command import timed
from .explorer import explore, fails, quiet, shrink
from .mutants import MUTANTS
from .scenarios import LARGE, SCENARIOS, SMALL


def _all(names: list[str], most: int | None, processes: int) -> int:
    founds = []
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for found, seconds in pool.imap_unordered(timed, [(name, most) for name in names]):
            print(f"{found} ({seconds:.0f} s of one core)", flush=True)
            founds.append(found)
    states, ways = sum(f.states for f in founds), sum(f.transitions for f in founds)
    count = sum(f.interleavings for f in founds)
    print(f"in all: {states} states, {ways} transitions, {float(count):.3g} interleavings")
    return int(any(found.violation for found in founds))


def _mutants(most: int) -> int:
    missed = 0
    for mutant in MUTANTS:
        with mutant.alive():
            found = explore(SCENARIOS[mutant.scenario], most=most)
        missed += not found.violation
        what = f"{found.violation}\n    after {found.trail}" if found.violation else "NOT FOUND"
        print(f"{mutant.name} ({found.states} states of '{mutant.scenario}'): {what}", flush=True)
    return int(missed > 0)


def _replay(name: str, actions: list[str]) -> int:
    with quiet():
        violation = fails(SCENARIOS[name], actions)
    print(f"{violation}\n{shrink(SCENARIOS[name], actions)}" if violation else "holds")
    return int(bool(violation))


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.explore", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"scenarios: {', '.join(SCENARIOS)} (default: all)")
    parser.add_argument("--most", type=int, default=20_000, help="states of a scenario at most; 0: all (%(default)s)")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--small", action="store_true", help="the scenarios of the tests alone")
    parser.add_argument("--mutants", action="store_true")
    parser.add_argument("--replay", nargs="+", metavar=("NAME", "ACTION"))
    options = parser.parse_args(argv)
    if options.mutants:
        return _mutants(options.most)
    if options.replay:
        return _replay(options.replay[0], options.replay[1:])
    names = options.names or [scenario.name for scenario in (SMALL if options.small else (*LARGE, *SMALL))]
    return _all(names, options.most or None, options.processes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
