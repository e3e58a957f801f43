"""Runs a Python program with more arguments than its command line shows: those on standard input, one a line.

`ps` shows command lines to every user of a machine, so a key must not stand in one. This file is run by its path, maybe
by an interpreter that has no Treadle: it imports the standard library alone.
"""

from __future__ import annotations

import os
import runpy
import sys


def main() -> None:
    """`keyed.py PROGRAM ARGUMENT...`: run PROGRAM in this process."""
    program, *arguments = sys.argv[1:]
    more = sys.stdin.read().splitlines()
    sys.path[0] = os.path.dirname(program)  # in place of this file's folder, whose modules the program must not see
    sys.argv = [program, *arguments, *more]
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
