"""Limit of open files: each connection needs one descriptor, and so does each one of the engine's next child."""

from __future__ import annotations

import resource

from ..fronts.connections import ConnectionLimits

TARGET_FILES = 65536
MACOS_FILES = 10240  # macOS accepts no more, even if it reports no limit
RESERVED_FILES = (
    128  # the server's own, the engine's next process, the log, and connections that are refused with an answer
)
MAX_GRPC_CONNECTIONS = 4096
MACHINE_CONNECTIONS = 320  # connections that one client's machine may need: 256 streams, and some to spare


def raise_open_files() -> int:
    """Raise this process's soft limit as far as is allowed and useful; return the limit then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return TARGET_FILES
    for limit in (TARGET_FILES, MACOS_FILES):
        target = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        if soft >= target:
            break
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
        except (ValueError, OSError):
            continue
        return target
    return soft


def connection_limits(open_files: int, *, grpc: bool, slots: int) -> ConnectionLimits:
    """Compute the connections that leave enough descriptors. gRPC, if it is served, gets a quarter of them. `slots` is
    the number of sequences that the server holds, all of which one client may use."""
    available = max(open_files // 2, open_files - RESERVED_FILES)
    grpc_limit = min(MAX_GRPC_CONNECTIONS, available // 4) if grpc else 0
    http_limit = available - grpc_limit
    if not grpc:
        return ConnectionLimits(http_limit, _share(http_limit, slots))
    return ConnectionLimits(http_limit, _share(http_limit, slots), grpc_limit, _share(grpc_limit, slots))


def _share(limit: int, slots: int) -> int:
    """Return the most that one address may hold of `limit`: a quarter, or the need of one machine, but not all."""
    return max(1, limit // 4, min(limit * 3 // 4, max(MACHINE_CONNECTIONS, slots + slots // 4)))
