"""The limit of open files: each connection is one, and so is each descriptor that the engine's next child needs."""

from __future__ import annotations

import resource

from ..fronts.connections import ConnectionLimits

ENOUGH = 65536
MODEST = 10240  # macOS takes no more, also where it says that there is no limit
RESERVED = 128  # the server's own, the engine's next process, the log, and connections that are told to come back
MOST_GRPC = 4096
ONE_MACHINE = 320  # connections that one client's machine may need: 256 streams, and some to spare


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


def connection_limits(open_files: int, *, grpc: bool, places: int) -> ConnectionLimits:
    """How many connections leave descriptors for what else must be opened. gRPC, if it is served, gets a quarter of
    them. `places` is how many sequences the server holds, all of which one client may want."""
    left = max(open_files // 2, open_files - RESERVED)
    of_grpc = min(MOST_GRPC, left // 4) if grpc else 0
    of_http = left - of_grpc
    if not grpc:
        return ConnectionLimits(of_http, _share(of_http, places))
    return ConnectionLimits(of_http, _share(of_http, places), of_grpc, _share(of_grpc, places))


def _share(limit: int, places: int) -> int:
    """The most that one address may hold of `limit`: a quarter, or what one machine needs, but not all."""
    return max(1, limit // 4, min(limit * 3 // 4, max(ONE_MACHINE, places + places // 4)))
