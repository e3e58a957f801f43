"""How many files the server may have open: each connection is one, and so is what the engine's next child needs."""

from __future__ import annotations

import resource

ENOUGH = 65536
MODEST = 10240  # macOS takes no more, also where it says that there is no limit
RESERVED = 64  # for the engine's process, the model's files and the log


def raise_open_files() -> int:
    """Raise this process's soft limit as far as is allowed and of use; the limit then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return ENOUGH
    for most in (ENOUGH, MODEST):
        wanted = most if hard == resource.RLIM_INFINITY else min(most, hard)
        if soft >= wanted:
            break
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (ValueError, OSError):
            continue
        return wanted
    return soft


def most_connections(open_files: int) -> int:
    """How many connections leave room for what else must be opened."""
    return max(open_files // 2, open_files - RESERVED)
