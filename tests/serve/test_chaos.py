"""The whole server under a seeded chaos: real processes, sockets and signals, clients of every kind over HTTP and gRPC.

Requests and faults are the same each time. `benchmarks/chaos.py` is the same at any length, with all faults.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.support.chaos.plan import Fault, Manner, Plan, Planned, Segment
from tests.support.chaos.run import OPTIONS, Chaos
from tests.support.chaos.server import Server, raise_own_limit
from tests.support.tiny import make_tiny

SEED = 16
CLIENTS = 70
"""In each segment; with those of keep-alive connections about 80 requests."""
FAULTS = (
    (Fault.RAISE, Fault.KILL),
    (Fault.FLUSH, Fault.RAISE_READ, Fault.STEP_ABORT),
    (Fault.STOP_CONT, Fault.ALLOCATE, Fault.SEGV),
)


class Short(Plan):
    """Segments of the plan with these faults, one after the other."""

    def segment(self, index: int) -> Segment:
        planned = super().segment(index)
        faults = FAULTS[index]
        at = [(i + 1) * self.size // (len(faults) + 1) for i in range(len(faults))]
        return Segment(index, 10, planned.requests, [Planned(*both) for both in zip(at, faults, strict=True)])


async def attack(folder: Path) -> Chaos:
    """The run. Its bounds on time are not what is tested: other tests keep the machine busy."""
    raise_own_limit()
    plan = Short(SEED, pool=16, size=CLIENTS)
    server = Server(make_tiny(folder / "tiny", context=4096), folder, OPTIONS)
    async with Chaos(plan, server, patience=10.0) as chaos:
        await chaos.run(range(len(FAULTS)))
    return chaos


def test_every_request_has_its_end_whatever_fails(tmp_path: Path) -> None:
    chaos = asyncio.run(attack(tmp_path))
    assert not chaos.problems, f"seed {SEED}\n" + "\n".join(str(problem) for problem in chaos.problems[:20])
    assert chaos.attack.deaths == 3
    assert chaos.requests > 200
    assert chaos.ends["complete"] > 40
    assert {one.split()[1] for one in chaos.manners} >= set(Manner) - {Manner.RAISES}
