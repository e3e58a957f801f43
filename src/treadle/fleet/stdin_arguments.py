"""Launcher that runs a Python program with additional arguments from standard input, one a line.

`ps` shows command lines to every user of a machine, so they must not contain keys. This file is run by its path,
possibly by an interpreter without Treadle, so it imports only the standard library.
"""

from __future__ import annotations

import os
import runpy
import sys


def main() -> None:
    """Run `stdin_arguments.py PROGRAM ARGUMENT...`: PROGRAM runs in this process."""
    program, *arguments = sys.argv[1:]
    more = sys.stdin.read().splitlines()
    sys.path[0] = os.path.dirname(program)  # replaces this file's folder, whose modules must not shadow the program's
    sys.argv = [program, *arguments, *more]
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
