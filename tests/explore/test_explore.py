"""The engine's protocol in all interleavings of a few events, as far as a few seconds go (B4, B7, C3, C4, D1, D2).

`python -m tests.explore` goes further: the same in minutes, and larger scenarios.
"""

from __future__ import annotations

import pytest

from .callers import Ask, NotEnabled, Scenario
from .explorer import Search, explore, fails, quiet, shrink, world_after
from .mutants import MUTANTS, Mutant
from .scenarios import SCENARIOS, SMALL

MOST = 220
EACH = 160
"""States of the searches that find nothing: each of them takes all of its states."""


@pytest.mark.parametrize("scenario", SMALL, ids=lambda scenario: scenario.name)
def test_each_interleaving_keeps_the_protocol(scenario: Scenario) -> None:
    found = explore(scenario, most=EACH, every=4)
    assert not found.violation, str(found)
    assert found.states >= EACH, str(found)
    assert found.transitions > found.states * 1.15, str(found)


def test_a_whole_scenario_is_explored() -> None:
    """Nothing is left to try for one request that may be taken back, and an engine that may die."""
    found = explore(Scenario("whole", (Ask("a", prompt=1, tokens=1),), budget={"cancel": 1, "die": 1}), every=2)
    assert found.complete, str(found)
    assert found.states >= 180, str(found)
    assert found.interleavings >= 700, str(found)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_fault_in_the_engine_is_found(mutant: Mutant) -> None:
    with mutant.alive():
        found = explore(SCENARIOS[mutant.scenario], most=MOST)
        assert found.violation
        assert fails(SCENARIOS[mutant.scenario], found.trail)
    with quiet():
        assert fails(SCENARIOS[mutant.scenario], found.trail) == ""


def test_states_that_are_taken_for_one_have_the_same_future() -> None:
    """Without the fingerprint all ways are walked to their ends, and no other states are met on them."""
    scenario = Scenario("tiny", (Ask("a", prompt=1, tokens=1),), budget={"cancel": 1})
    search = Search(scenario)
    search.run()
    met: set[bytes] = set()
    ways = 0

    def walk(trail: tuple[str, ...], before: bytes) -> None:
        nonlocal ways
        with world_after(scenario, trail) as world:
            here, actions = world.state(), world.enabled()
        met.add(here)
        if here == before and trail:
            return
        ways += 1
        for action in actions:
            try:
                walk((*trail, action), here)
            except NotEnabled:
                continue

    with quiet():
        walk((), b"")
    assert met == search.states
    assert ways > 2 * len(met)


def test_a_failure_is_shrunk_to_what_it_takes() -> None:
    leak = next(mutant for mutant in MUTANTS if mutant.name == "a cancelled row keeps its place")
    trail = ["reserve b", "reserve a", "submit b", "submit a", "step 2", "hear", "cancel a.0", "step 1", "hear"]
    scenario = Scenario("pair", (Ask("a"), Ask("b")), budget={"cancel": 1})
    with leak.alive():
        assert shrink(scenario, trail) == ["reserve a", "submit a", "cancel a.0"]
