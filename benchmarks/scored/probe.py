"""Request one route at even intervals from a process of its own, and print the times of the answers.

    python probe.py HOST PORT PATH SECONDS EVERY_S [BODY]

A prober inside a load generator measures the generator's own event loop too. Prints a JSON list of [status, seconds
until the answer's head]; status 0 if none came within GIVE_UP_S. With BODY, a JSON text, it is a POST.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import time

GIVE_UP_S = 10.0


def request(host: str, path: str, body: str) -> bytes:
    method = "POST" if body else "GET"
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", "Connection: close"]
    if body:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, "", body]).encode()


def ask(host: str, port: int, data: bytes) -> tuple[int, float]:
    """Return the status, and seconds until the first bytes; the rest of the answer is read and not timed."""
    began = time.perf_counter()
    head, took = b"", GIVE_UP_S
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=GIVE_UP_S) as sock:
        sock.sendall(data)
        head = sock.recv(65536)
        took = time.perf_counter() - began
        while sock.recv(65536):
            pass
    words = head.split(b" ", 2)
    return (int(words[1]), took) if len(words) > 1 else (0, time.perf_counter() - began)


def main() -> None:
    host, port, path, seconds, every_s = sys.argv[1], int(sys.argv[2]), sys.argv[3], *map(float, sys.argv[4:6])
    data = request(host, path, *sys.argv[6:] or [""])
    now = due = time.perf_counter()
    until, took = now + seconds, []
    while now < until:
        took.append(ask(host, port, data))
        now = time.perf_counter()
        due = max(due + every_s, now)
        time.sleep(due - now)
    print(json.dumps(took))


if __name__ == "__main__":
    main()
