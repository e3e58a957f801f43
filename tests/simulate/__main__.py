"""Simulates days of traffic: `python -m tests.simulate --days 2 --seed 1`.

Prints what the days came to and how fast they passed; ends with an AssertionError where a property does not hold. The
same seed, days and load give the same run.
"""

from __future__ import annotations

import argparse
import sys
import time

from .simulation import Days


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulate", description=__doc__)
    parser.add_argument("--days", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--load", type=float, default=1.0, help="demand over what the slots take (%(default)s)")
    options = parser.parse_args(argv)
    began = time.monotonic()
    outcome = Days(options.seed, options.days, load=options.load).run()
    seconds = time.monotonic() - began
    print(f"seed {options.seed}, load {options.load:g}: {options.days:g} days in {seconds:.0f} s\n{outcome}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
