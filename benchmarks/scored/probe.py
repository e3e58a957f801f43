"""Ask one route again and again from a process of its own, and print how long the answers took as JSON.

    python probe.py HOST PORT PATH SECONDS

A prober inside a load generator measures the generator's own event loop too.
"""

from __future__ import annotations

import json
import socket
import sys
import time

PAUSE_S = 0.005
GIVE_UP_S = 5.0


def ask(host: str, port: int, path: str) -> float | None:
    """Seconds until the whole answer; None where none came."""
    began = time.perf_counter()
    try:
        with socket.create_connection((host, port), timeout=GIVE_UP_S) as sock:
            sock.sendall(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
            while sock.recv(65536):
                pass
    except OSError:
        return None
    return time.perf_counter() - began


def main() -> None:
    host, port, path, seconds = sys.argv[1], int(sys.argv[2]), sys.argv[3], float(sys.argv[4])
    until = time.perf_counter() + seconds
    took: list[float | None] = []
    while time.perf_counter() < until:
        took.append(ask(host, port, path))
        time.sleep(PAUSE_S)
    print(json.dumps(took))


if __name__ == "__main__":
    main()
