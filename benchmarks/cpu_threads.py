"""Times of a decode step on this CPU by number of BLAS threads, alone and beside a server's other processes.

    python benchmarks/cpu_threads.py [--threads 1 2] [--seconds 6] [--json]

One step is a chain of float32 products in the demo model's shapes (18 layers of 640 to 2048 and back, a head of 65,536
rows), for M rows at once. Its neighbours are nothing, an event loop that works 30 % of the time (the front of a busy
server, in its own process), or one or two processes that never rest. Times are a step's median and its longest; the
ratio is between medians, to the first number of threads. Shown as well: the cores used by other processes; without a
neighbour they must be near 0.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace

from treadle.runner.device import blas
from treadle.runner.device.blas_threads import machine_busy_s

LAYERS, HIDDEN, INTERMEDIATE, HEAD = 18, 640, 2048, 65_536
ROWS = (1, 8, 64)
ROUNDS = 6

# Both end with their standard input, so that nothing outlives this program.
ENDING = "import os, sys, threading\nthreading.Thread(target=lambda: (sys.stdin.read(), os._exit(0))).start()\n"
EVENT_LOOP = """
import asyncio, json, time
async def serve():
    while True:
        until = time.perf_counter() + 0.003
        while time.perf_counter() < until:
            json.dumps({"choices": [{"delta": {"content": "token"}}]})
        await asyncio.sleep(0.007)
asyncio.run(serve())
"""
BUSY = "while True:\n    sum(range(1000))\n"
BESIDE: dict[str, list[str]] = {
    "nothing": [],
    "event loop at 30 %": [EVENT_LOOP],
    "busy process": [BUSY],
    "two busy processes": [BUSY, BUSY],
}


@dataclass
class Line:
    """Effect of one neighbour on a step: `others` are the cores used by other processes; median and longest, in ms."""

    others: float
    step_ms: dict[int, float]
    longest_ms: dict[int, float]
    rows: int = 0
    beside: str = ""


@contextlib.contextmanager
def beside(codes: list[str]) -> Iterator[None]:
    """Context manager that runs each of `codes` in a process of its own."""
    with contextlib.ExitStack() as stack:
        for code in codes:
            process = subprocess.Popen([sys.executable, "-c", ENDING + code], stdin=subprocess.PIPE)
            stack.enter_context(process)
            stack.callback(process.communicate, timeout=10)
        if codes:
            time.sleep(0.5)  # for their start
        yield


def chain(rows: int) -> Callable[[], None]:
    """Return a decode-like step of `rows` rows."""
    import mlx.core as mx

    up = [mx.random.normal((INTERMEDIATE, HIDDEN)) * 0.05 for _ in range(LAYERS)]
    down = [mx.random.normal((HIDDEN, INTERMEDIATE)) * 0.05 for _ in range(LAYERS)]
    head, first = mx.random.normal((HEAD, HIDDEN)), mx.random.normal((rows, HIDDEN))
    mx.eval(up, down, head, first)

    def step() -> None:
        x = first
        for wide, narrow in zip(up, down, strict=True):
            x = x + mx.maximum(x @ wide.T, 0) @ narrow.T
        mx.eval(mx.argmax(x @ head.T, axis=-1))

    return step


def others_cpu_s() -> float:
    """Return the CPU seconds that other processes have used."""
    return (machine_busy_s() or 0.0) - time.process_time()


def measure(step: Callable[[], None], counts: list[int], seconds: float, set_threads: Callable[[int], None]) -> Line:
    """Time steps with each number of threads in turn, repeatedly, so that a change of the neighbours affects all
    alike."""
    times: dict[int, list[float]] = {count: [] for count in counts}
    began, others = time.perf_counter(), others_cpu_s()
    for _ in range(ROUNDS):
        for count in counts:
            set_threads(count)
            step()
            end = time.perf_counter() + seconds / ROUNDS
            while time.perf_counter() < end:
                start = time.perf_counter()
                step()
                times[count].append(1000 * (time.perf_counter() - start))
    cores = (others_cpu_s() - others) / (time.perf_counter() - began)
    medians = {count: statistics.median(found) for count, found in times.items()}
    return Line(round(cores, 2), medians, {count: max(found) for count, found in times.items()})


def table(counts: list[int], seconds: float, set_threads: Callable[[int], None]) -> list[Line]:
    """Measure one line for each number of rows and neighbour."""
    lines = []
    for rows in ROWS:
        step = chain(rows)
        for name, codes in BESIDE.items():
            with beside(codes):
                line = measure(step, counts, seconds, set_threads)
            lines.append(replace(line, rows=rows, beside=name))
    return lines


def formatted(line: Line, counts: list[int]) -> str:
    base = line.step_ms[counts[0]]
    cells = [
        f"{line.step_ms[count]:7.1f} max {line.longest_ms[count]:6.0f} ms ({base / line.step_ms[count]:4.2f}x)"
        for count in counts
    ]
    return f"M={line.rows:<2} {line.beside:19} {line.others:5.2f} cores  " + "  ".join(cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", help="numbers to try (1, 2 and the default)")
    parser.add_argument("--seconds", type=float, default=6.0, help="how long to measure each")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    default = blas.default_threads()
    counts: list[int] = options.threads or sorted({1, 2, default})
    report = blas.prepare(max(counts))
    if report.set_threads is None:
        sys.exit(f"{report}: its threads are not ours to choose. {report.warning}".strip())
    lines = table(counts, options.seconds, report.set_threads)
    if options.json:
        values = [asdict(line) for line in lines]
        print(json.dumps({"blas": report.name, "default": default, "lines": values}, indent=2))
        return
    print(f"{report.name}; {default} threads by default here; tried {counts}, gain over {counts[0]} in brackets")
    for line in lines:
        print(formatted(line, counts))


if __name__ == "__main__":
    main()
