"""Launcher for Linux that ties a program to its parent: `die_with_parent.py PARENT PROGRAM ARGUMENT...`.

The process requests SIGTERM at its parent's end (PR_SET_PDEATHSIG) and then executes the program. A `preexec_fn` would
instead run Python, and the fork handlers of libraries such as gRPC, in the fork of a process with threads. This file is
run by its path and imports only the standard library.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Execute PROGRAM. Exits with a one-line error when it can't be run."""
    parent, *command = sys.argv[1:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):  # the parent ended before prctl took effect
        sys.exit(1)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
