"""Limits that a text process puts on itself: memory, processor time, core dumps, its parent's life."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Be killed when the process `parent` ends, also by SIGKILL. Elsewhere than on Linux the end of the socket to it
    must do."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before that was said
            os._exit(0)


def no_core_dumps() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def bound_memory(growth_bytes: int) -> None:
    """Let this process map `growth_bytes` more than it has mapped now. Without effect where the system knows no such
    limit (macOS)."""
    with contextlib.suppress(OSError, ValueError):
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = _mapped_bytes() + growth_bytes
        if hard == resource.RLIM_INFINITY or limit < hard:
            resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def free_memory() -> None:
    """Lift `bound_memory`."""
    with contextlib.suppress(OSError, ValueError):
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))


def bound_cpu(seconds: float) -> None:
    """Be killed by SIGPROF after so much more processor time; 0 lifts the bound. It holds also where one call into a
    library never returns."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


def resident_bytes() -> int:
    """Memory in use; where the system does not say, the most that ever was."""
    try:
        return _statm(1)
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # macOS counts bytes here


def _mapped_bytes() -> int:
    return _statm(0)


def _statm(field: int) -> int:
    return int(Path("/proc/self/statm").read_text().split()[field]) * resource.getpagesize()
