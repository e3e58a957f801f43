"""Limits of a text process on itself: memory, processor time, core dumps, exit with its parent."""

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
    """Have this process killed when process `parent` exits. Linux only; elsewhere the closed socket must suffice."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it exited before prctl took effect
            os._exit(0)


def disable_core_dumps() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def limit_memory(growth_bytes: int) -> None:
    """Limit the mapped memory to the present size plus `growth_bytes`. No effect without RLIMIT_AS (macOS)."""
    with contextlib.suppress(OSError, ValueError):
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = _mapped_bytes() + growth_bytes
        if hard == resource.RLIM_INFINITY or limit < hard:
            resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def lift_memory_limit() -> None:
    """Undo `limit_memory`."""
    with contextlib.suppress(OSError, ValueError):
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))


def limit_cpu(seconds: float) -> None:
    """Have this process killed by SIGPROF after `seconds` more of processor time, even within a library call. 0 lifts
    the limit."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


def resident_bytes() -> int:
    """Return the resident memory in bytes; without /proc, its peak."""
    try:
        return _statm(1)
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in bytes on macOS


def _mapped_bytes() -> int:
    return _statm(0)


def _statm(field: int) -> int:
    return int(Path("/proc/self/statm").read_text().split()[field]) * resource.getpagesize()
