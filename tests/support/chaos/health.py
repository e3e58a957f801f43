"""Health prober in a process of its own, not delayed by the load: `python -m tests.support.chaos.health PORT KEY`.

Requests `/health/ready` and `/health/live` in turn, each on a connection of its own, and writes one line for each
answer: time of the request (monotonic clock), seconds until the answer, the path, the status (0: no answer).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass

from .server import ROOT

EVERY_S = 0.05
PATIENCE_S = 5.0
DEATH_S = 1.0  # from the engine's death to "not ready"
HANG_S = 1.0  # beyond --hang-after
RECOVERY_S = 10.0  # beyond the time that a load takes
LIVE_S = 1.0
NICE = -5


@dataclass(frozen=True)
class Probe:
    at: float
    took_s: float
    path: str
    status: int


class Watcher:
    """Prober's process, and its results."""

    def __init__(self, port: int, key: str) -> None:
        command = [sys.executable, "-m", "tests.support.chaos.health", str(port), key]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, env=env, cwd=ROOT)
        self.probes: list[Probe] = []
        threading.Thread(target=self._read, name="chaos-health", daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            at, took_s, path, status = line.decode().split()
            self.probes.append(Probe(float(at), float(took_s), path, int(status)))

    def close(self) -> None:
        self._process.kill()
        self._process.wait(60)
        if self._process.stdout is not None:
            self._process.stdout.close()

    async def seen(self, path: str, status: int, since: float, within_s: float) -> Probe | None:
        """Return the first probe after `since` with that status, waiting up to `within_s` from then; else None."""
        read = 0
        while True:
            new = self.probes[read:]
            read += len(new)
            for probe in new:
                if probe.at + probe.took_s >= since and probe.path == path and probe.status == status:
                    return probe
            if time.monotonic() > since + within_s:
                return None
            await asyncio.sleep(0.02)

    def unfit(self, silent: list[tuple[float, float]], patience: float = 1.0) -> list[str]:
        """Return answers of `live` that were late or not 200, outside of spans in which the server could not answer."""
        return [
            f"live: {probe.status} after {probe.took_s:.2f} s"
            for probe in self.probes
            if probe.path == "live"
            and (probe.status != 200 or probe.took_s > patience * LIVE_S)
            and not any(began <= probe.at + probe.took_s and probe.at <= ended for began, ended in silent)
        ]


def ask(port: int, path: str, key: str) -> int:
    """Return the status of a health route; 0 without an answer."""
    line = f"GET /health/{path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {key}\r\nConnection: close\r\n\r\n"
    try:
        with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as sock:
            sock.sendall(line.encode())
            return int(sock.recv(4096).split()[1])
    except (OSError, ValueError, IndexError):
        return 0


def main() -> None:
    port, key = int(sys.argv[1]), sys.argv[2]
    with contextlib.suppress(OSError):
        os.nice(NICE)  # only root may
    while True:
        for path in ("ready", "live"):
            at = time.monotonic()
            status = ask(port, path, key)
            print(f"{at:.4f} {time.monotonic() - at:.4f} {path} {status}", flush=True)
            time.sleep(EVERY_S)


if __name__ == "__main__":
    main()
