"""Hours of seeded traffic in seconds: everything ends, waits are bounded, and nothing is left (B4, B7, D1, D2, R2).

`python -m tests.simulate --days N --seed S` goes further.
"""

from __future__ import annotations

import pytest

from tests.explore.mutants import MUTANTS

from .simulation import Days

HALF_AN_HOUR = 0.5 / 24


@pytest.mark.parametrize(("seed", "load"), [(1, 0.8), (2, 1.5), (3, 3.0), (4, 8.0)])
def test_hours_of_traffic_leave_nothing_behind(seed: int, load: float) -> None:
    outcome = Days(seed, HALF_AN_HOUR, load=load).run()
    told = str(outcome)
    assert outcome.asked >= 150 * load, told
    assert outcome.ends["served"] >= (0.9 if load < 2 else 0.3) * outcome.asked, told
    assert not outcome.ends.keys() - {
        *("served", "Busy", "EngineUnavailable", "EngineDied", "RequestCancelled", "ReaderStalled", "StepFailed"),
    }, told
    assert outcome.objects[-1] < 10_000, told


def test_a_seed_replays_its_run() -> None:
    assert str(Days(7, 0.01, load=2.0).run()) == str(Days(7, 0.01, load=2.0).run())


@pytest.mark.parametrize("name", ["a cancelled row keeps its place", "tokens stay taken in the gate"])
def test_a_leak_is_found(name: str) -> None:
    with next(mutant for mutant in MUTANTS if mutant.name == name).alive(), pytest.raises(AssertionError):
        Days(1, 0.02, load=1.5).run()
