"""Serve a model through the SMG gateway with the worker that SMG has for MLX: gateway and worker as one command.

    python benchmarks/servicer.py FOLDER --port N

Give it to `treadle bench run --start "python benchmarks/servicer.py FOLDER --port {port}"`, beside
`--start "treadle fleet FOLDER --replicas 1 --port {port}"`. Both packages come from `python benchmarks/peers.py install
smg-servicer`. Needs nothing but Python 3.11 or newer. Ends with SIGTERM, and takes both processes along.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

PROGRAMS = Path(__file__).resolve().parent.parent / ".peers" / "smg-servicer" / "bin"


def free_ports(besides: int) -> tuple[int, int]:
    """Return two different ports that no program listens on now."""
    with socket.socket() as one, socket.socket() as other, socket.socket() as spare:
        ports = []
        for sock in (one, other, spare):
            sock.bind(("127.0.0.1", 0))
            ports.append(int(sock.getsockname()[1]))
    first, second, *_ = (port for port in ports if port != besides)
    return first, second


def answers(port: int) -> bool:
    """Whether a program listens there."""
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="FOLDER")
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args()
    if not (PROGRAMS / "smg").is_file():
        sys.exit("the servicer is not installed: python benchmarks/peers.py install smg-servicer")
    grpc, metrics = free_ports(besides=options.port)
    members: list[subprocess.Popen[bytes]] = []

    def stop(*_: object) -> None:
        for member in reversed(members):
            member.kill()
        os._exit(0)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    worker: list[str | Path] = [
        PROGRAMS / "python",
        "-m",
        "smg_grpc_servicer.mlx.server",
        "--model",
        options.model.resolve(),
    ]
    members.append(subprocess.Popen([*worker, "--host", "127.0.0.1", "--port", str(grpc)]))
    while not answers(grpc):
        if members[0].poll() is not None:
            sys.exit(f"the worker ended with {members[0].returncode}")
        time.sleep(0.2)
    gateway: list[str | Path] = [PROGRAMS / "smg", "launch", "--host", "127.0.0.1", "--port", str(options.port)]
    gateway += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics)]
    members.append(subprocess.Popen([*gateway, "--worker-urls", f"grpc://127.0.0.1:{grpc}"]))
    while all(member.poll() is None for member in members):
        time.sleep(0.2)
    stop()


if __name__ == "__main__":
    main()
