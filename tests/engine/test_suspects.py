"""The search for who kills the engine, driven by models of culprits: a death is a function of who is in flight."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import pytest

from treadle.engine.deaths import Cause
from treadle.engine.suspects import CALM_S, MARGINS, MAX_SOLO_KILLS, Suspects, Verdict

CROWD = ["p", "a", "b", "c", "d"]
LENGTH = 40  # tokens of each sequence


def died(search: Suspects, *in_flight: str, cause: Cause = Cause.CRASH, now: float = 0.0) -> Verdict | None:
    return search.died(cause, in_flight, now)


@dataclass
class World:
    """Simulated engine that dies when `deadly` is true for the tokens of the sequences in flight. One token each a
    round."""

    deadly: Callable[[dict[str, int]], bool]
    cause: Cause = Cause.CRASH
    tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CROWD, 0))
    flying: set[str] = field(default_factory=set)
    search: Suspects = field(default_factory=Suspects)
    verdicts: list[Verdict] = field(default_factory=list)
    done: list[str] = field(default_factory=list)
    deaths: int = 0
    goal: int = 0
    joined_at: dict[str, int] = field(default_factory=dict)

    def run(self, most_deaths: int = 12) -> None:
        self.fly(*self.tokens)
        while self.tokens:
            assert self.deaths <= most_deaths, "it does not end"
            self.round()

    def fly(self, *ids: str) -> None:
        for id_ in ids:
            self.flying.add(id_)
            self.joined_at[id_] = self.tokens[id_]

    def round(self) -> None:
        if self.deadly({id_: self.tokens[id_] for id_ in self.flying}):
            self.die()
            return
        for id_ in sorted(self.flying):
            self.tokens[id_] += 1
            if self.tokens[id_] == LENGTH:
                self.end(id_)
                self.done.append(id_)
        current = self.search.current
        if current is not None and self.tokens[current] >= self.goal:
            self.search.passed(beside=len(self.flying) > 1)
            self.go_on()

    def die(self) -> None:
        self.deaths += 1
        order = sorted(self.flying, key=lambda id_: (self.tokens[id_], CROWD.index(id_)))
        self.flying.clear()
        verdict = self.search.died(self.cause, order, float(self.deaths))
        if verdict is not None:
            self.verdicts.append(verdict)
            del self.tokens[verdict.id]
        if self.search.on_trial and not self.search.is_solo:
            self.fly(*(id_ for id_ in self.tokens if id_ in self.search.cleared))
        self.go_on()

    def go_on(self) -> None:
        if (id_ := self.search.next_suspect()) is not None:
            self.goal = self.tokens[id_] + self.search.margin
            self.fly(id_)
        else:
            self.fly(*self.tokens.keys() - self.flying)

    def end(self, id_: str) -> None:
        was_tried = self.search.current == id_
        del self.tokens[id_]
        self.flying.discard(id_)
        self.search.ended(id_)
        if was_tried:
            self.go_on()

    @property
    def guilty(self) -> list[str]:
        return [verdict.id for verdict in self.verdicts]


# Culprits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 1, 7, LENGTH - 1])
@pytest.mark.parametrize("culprit", CROWD)
def test_one_that_dies_at_a_token_is_found_and_all_others_end(culprit, at):
    world = World(lambda tokens: tokens.get(culprit, -1) >= at)
    world.run()
    assert world.guilty == [culprit]
    assert sorted(world.done) == sorted(set(CROWD) - {culprit})
    assert world.deaths <= 4
    assert world.verdicts[0].deaths == world.deaths, "all of them are explained"


def test_the_likeliest_one_costs_two_deaths():
    world = World(lambda tokens: "p" in tokens)
    world.run()
    assert (world.guilty, world.deaths) == (["p"], 2)


@pytest.mark.parametrize("culprit", CROWD)
def test_one_that_dies_only_beside_others_is_found(culprit):
    world = World(lambda tokens: culprit in tokens and len(tokens) > 1)
    world.run()
    assert world.guilty in ([culprit], []), "or it ends where the others have ended before it"
    assert sorted({*world.done, *world.guilty}) == sorted(CROWD)
    assert world.deaths <= 5


@pytest.mark.parametrize("pair", list(itertools.combinations(CROWD, 2)))
def test_of_two_that_die_only_together_one_at_most_is_blamed(pair):
    world = World(lambda tokens: set(pair) <= tokens.keys())
    world.run()
    assert set(world.guilty) <= set(pair)
    assert len(world.guilty) <= 1
    assert sorted({*world.done, *world.guilty}) == sorted(CROWD)


@pytest.mark.parametrize("culprit", CROWD)
@pytest.mark.parametrize("after", [3, 20])
def test_one_that_acts_some_tokens_after_it_joined_is_found(culprit, after):
    """Its replay gets past the point of its death, and dies later."""
    world = World(lambda tokens: culprit in tokens and tokens[culprit] - world.joined_at[culprit] >= after)
    world.run()
    assert world.guilty in ([culprit], []), "it may have come to its end in between"
    assert set(CROWD) - {culprit} <= set(world.done)


def test_two_culprits_are_found_one_after_the_other():
    world = World(lambda tokens: "a" in tokens or "c" in tokens)
    world.run()
    assert sorted(world.guilty) == ["a", "c"]
    assert sorted(world.done) == ["b", "d", "p"]


def test_a_crowd_of_two_that_die_only_together_ends_wholly_alone():
    world = World(lambda tokens: len(tokens) > 1, tokens={"a": 0, "b": 0})
    world.run()
    assert world.guilty == []
    assert sorted(world.done) == ["a", "b"]


# Deaths that nobody is to blame for --------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(60))
def test_three_kills_in_a_row_blame_nobody(seed):
    """Whenever they come, also while one sequence is alone on trial."""
    chance = random.Random(seed)
    kills = [chance.random() < 0.25 for _ in range(400)]
    left = [3]

    def deadly(tokens: Collection[str]) -> bool:
        if left[0] and kills.pop():
            left[0] -= 1
            return True
        return False

    world = World(deadly, cause=Cause.KILLED)
    world.run()
    assert (world.guilty, sorted(world.done)) == ([], sorted(CROWD))


def test_the_first_kill_sends_everything_on_at_once():
    search = Suspects()
    assert died(search, "a", "b", cause=Cause.KILLED) is None
    assert not search.on_trial
    assert died(search, "a", "b", cause=Cause.KILLED, now=CALM_S + 1) is None
    assert not search.on_trial, "the first one was long ago"
    assert died(search, "a", "b", cause=Cause.KILLED, now=CALM_S + 2) is None
    assert (search.on_trial, search.next_suspect()) == (True, "a")


@pytest.mark.parametrize("culprit", CROWD)
def test_one_that_is_killed_each_time_is_given_up_without_proof(culprit):
    """The system kills what takes too much memory."""
    world = World(lambda tokens: culprit in tokens, cause=Cause.KILLED)
    world.run()
    assert world.verdicts == [Verdict(culprit, deaths=0, proven=False)]
    assert sorted(world.done) == sorted(set(CROWD) - {culprit})
    assert world.deaths <= 3 + MAX_SOLO_KILLS


def test_a_kill_within_a_trial_repeats_it():
    search = Suspects()
    died(search, "a", "b")
    assert search.next_suspect() == "a"
    assert died(search, "a", cause=Cause.KILLED) is None
    assert (search.next_suspect(), search.margin) == ("a", MARGINS[0])
    search.passed(beside=False)
    assert search.next_suspect() == "b"
    assert died(search, "a", "b") is None
    assert [search.next_suspect(), search.next_suspect()] == ["b", "a"], "the one that had just joined is tried first"


def test_a_death_with_nothing_in_flight_is_nobodys():
    search = Suspects()
    assert died(search) is None
    assert not search.on_trial
    died(search, "a", "b")
    assert died(search) is None
    assert search.next_suspect() == "a", "the trial is still due"


def test_a_first_death_alone_is_no_proof():
    """Suspects run alone once more."""
    search = Suspects()
    assert died(search, "a") is None
    assert search.next_suspect() == "a"
    assert died(search, "a") == Verdict("a", deaths=2, proven=True)
    assert not search.on_trial


# Bookkeeping -------------------------------------------------------------------------------------------------------


def test_a_death_of_none_of_the_candidates_begins_anew():
    search = Suspects()
    died(search, "a", "b", "c")
    search.next_suspect()
    died(search, "a", "b")
    assert search.cleared == {"c"}
    died(search, "c")
    assert (search.cleared, search.next_suspect(), search.next_suspect()) == ({"a", "b"}, "c", None)


def test_the_end_of_a_candidate_ends_its_trial():
    search = Suspects()
    died(search, "a", "b", "c")
    assert search.next_suspect() == "a"
    search.ended("b")
    search.ended("a")
    assert search.current is None
    assert search.next_suspect() == "c"
    search.ended("c")
    assert not search.on_trial


def test_a_crowd_that_dies_again_after_its_trial_is_tried_for_longer():
    search = Suspects()
    for round_ in range(4):
        died(search, "a", "b")
        assert search.margin == MARGINS[min(round_, 2)]
        for id_ in ("a", "b"):
            assert search.next_suspect() == id_
            search.passed(beside=id_ == "b")
        assert search.next_suspect() is None
