"""Cost of a refusal on the event loop, by the number of tickets in line and of their tenants.

    python benchmarks/refusal_cost.py [--tickets 4096] [--tenants 4096 400 64 1] [--slots 16]

`again`: ticket holders that return too early. `newcomer`: other clients, while the table is full. Median and p99 in
milliseconds. `entries`: length of the list by which tickets expire, and the number of tickets.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterable

from treadle.core.gate import Gate, GateLimits
from treadle.core.virtual_queue import Arrival
from treadle.errors import Busy, EngineUnavailable

SERVICE_S = 10.0
ROUNDS = 600


def full_gate(slots: int) -> Gate:
    limits = GateLimits(slots, slots, 4.0)
    gate = Gate(limits, EngineUnavailable("loading"))
    gate.open_(limits)
    for i in range(limits.places):
        arrival = Arrival(tenant=f"inside {i % slots}")
        lease = gate.admit(rows=1, tokens=1, now=0.0, service_s=SERVICE_S, certain=True, arrival=arrival)
        if i < slots:
            gate.started(lease, 0.0, 0.0)
    return gate


def refusals(gate: Gate, numbers: Iterable[int], tenants: int, began: float, *, repeat: bool) -> list[float]:
    """Return the milliseconds of each refusal, without admitted requests."""
    took, now = [], began
    for number in numbers:
        now += 0.0005
        arrival = Arrival(tenant=f"s{number % tenants}", fingerprint=number + 1, repeat=repeat)
        start = time.perf_counter()
        try:
            gate.check_room(now, arrival)
        except Busy:
            took.append(1000 * (time.perf_counter() - start))
    return took


def measure(tickets: int, tenants: int, slots: int) -> None:
    gate = full_gate(slots)
    refusals(gate, range(tickets), tenants, 0.1, repeat=False)
    again = refusals(gate, (i * 13 % tickets for i in range(ROUNDS)), tenants, 3.0, repeat=True)
    new = refusals(gate, range(tickets, tickets + ROUNDS), tenants, 3.5, repeat=False)
    queue = gate._virtual_queue
    print(
        f"{tickets} tickets, {tenants} tenants, {slots} slots: again {_formatted(again)}, newcomer {_formatted(new)}; "
        f"entries {len(queue._ends)} of {len(queue._tickets)}"
    )


def _formatted(took: list[float]) -> str:
    return f"{statistics.median(took):.3f} / {statistics.quantiles(took, n=100)[98]:.3f} ms" if took else "none"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tickets", type=int, default=4096)
    parser.add_argument("--tenants", type=int, nargs="+", default=[4096, 400, 64, 1])
    parser.add_argument("--slots", type=int, default=16)
    options = parser.parse_args()
    for tenants in options.tenants:
        measure(options.tickets, tenants, options.slots)


if __name__ == "__main__":
    main()
