"""Launcher that ties a program to its parent: `die_with_parent.py PARENT PROGRAM ARGUMENT...`.

PARENT is `pid=NUMBER` where the kernel sends the signal (Linux, PR_SET_PDEATHSIG). Elsewhere it is `fd=NUMBER`, the
read end of a pipe whose only write end the fleet holds: a process beside the program reads from it until the end.

The process prepares itself and then executes the program. A `preexec_fn` would instead run Python, and the fork
handlers of libraries such as gRPC, in the fork of a process with threads. This file is run by its path and imports only
the standard library.
"""

from __future__ import annotations

import os
import select
import signal
import sys

PR_SET_PDEATHSIG = 1
LOOK_EVERY_S = 1.0
"""How often the process beside the program looks whether the program has ended."""


def main() -> None:
    """Become PROGRAM. Ends with one line where it can't be run."""
    parent, *command = sys.argv[1:]
    kind, _, number = parent.partition("=")
    if kind == "pid":
        _ask_kernel(int(number))
    else:
        _watch_pipe(int(number))
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")


def _ask_kernel(parent: int) -> None:
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it ended before that was said
        sys.exit(1)


def _watch_pipe(pipe: int) -> None:
    program = os.getpid()
    if os.fork():
        os.close(pipe)
        return
    for fd in (0, 1, 2):
        os.close(fd)
    while os.getppid() == program:
        if select.select([pipe], [], [], LOOK_EVERY_S)[0]:  # nobody writes: this is its end
            os.kill(program, signal.SIGTERM)
            break
    os._exit(0)


if __name__ == "__main__":
    main()
