"""Runs a program that is sent SIGTERM when its parent ends, on Linux: `leashed.py PARENT PROGRAM ARGUMENT...`.

The process asks for the signal itself and then becomes the program. Asking between fork and exec (`preexec_fn`) would
run Python, and the fork handlers of libraries such as gRPC, in the copy of a process with threads. This file is run by
its path and imports the standard library alone.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Become PROGRAM. Ends with one line where it can't be run."""
    parent, *command = sys.argv[1:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):  # it ended before that was said
        sys.exit(1)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
