"""Breadth-first search over all interleavings of a scenario's actions.

A state can't be copied, as it is made of coroutines, so each one is reached by its actions from the beginning. Two
ways that lead to one fingerprint are continued once. Every state is checked, and from every state everything is
brought to its end: in a fair way, with an owner that hangs, and by a stop while the owner hangs. The search is over
when no action leads to a new state: then all interleavings have been seen, whose number is that of the ways through the
graph of states.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from .callers import NotEnabled, Scenario
from .properties import FAIR, HANGS, STOPS, check, complete
from .world import World


@dataclass
class Found:
    """What a search covered, and the actions that lead to the first violation, if there is one."""

    scenario: str
    states: int = 0
    transitions: int = 0
    interleavings: int = 0
    depth: int = 0
    complete: bool = False
    violation: str = ""
    trail: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        how = "all" if self.complete else "the first"
        line = (
            f"{self.scenario}: {how} {self.states} states, {self.transitions} transitions, "
            f"{float(self.interleavings):.3g} interleavings, depth {self.depth}"
        )
        return f"{line}\n  VIOLATION: {self.violation}\n{as_test(self)}" if self.violation else line


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No log lines, and no collection of garbage in the middle of a replay."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        logging.disable(before)
        if enabled:
            gc.enable()


@contextlib.contextmanager
def world_after(scenario: Scenario, trail: Sequence[str]) -> Iterator[World]:
    """The world in which `trail` has happened."""
    world = World(scenario)
    try:
        for action in trail:
            world.do(action)
        yield world
    finally:
        world.close()


class Search:
    """One search of `scenario`, of `most` states at most. Each state is brought to a fair end, and one in `every` to
    the ends in which the owner hangs."""

    def __init__(self, scenario: Scenario, *, most: int | None = None, every: int = 1) -> None:
        self.found = Found(scenario.name)
        self._scenario = scenario
        self._most = most
        self._every = every
        self._states: dict[bytes, int] = {}
        self._edges: list[list[int]] = []
        self._open: deque[tuple[int, tuple[str, ...], list[str]]] = deque()

    def run(self) -> Found:
        with quiet():
            try:
                self._start()
                while self._open and not self._full:
                    self._expand(*self._open.popleft())
            except _Violated as violated:
                self.found.violation, self.found.trail = str(violated), violated.trail
        self.found.complete = not self._open and not self.found.violation
        self.found.states = len(self._states)
        self.found.interleavings = _ways(self._edges)
        return self.found

    @property
    def states(self) -> set[bytes]:
        """Fingerprints of all that were found."""
        return set(self._states)

    @property
    def _full(self) -> bool:
        return self._most is not None and len(self._states) >= self._most

    def _start(self) -> None:
        with world_after(self._scenario, ()) as world:
            self._visit(world, world.state(), ())

    def _expand(self, number: int, trail: tuple[str, ...], actions: list[str]) -> None:
        for action in actions:
            child = self._try(number, trail, action)
            if child is not None:
                self.found.transitions += 1
                self._edges[number].append(child)

    def _try(self, number: int, trail: tuple[str, ...], action: str) -> int | None:
        """The state to which `action` leads; None where it is not possible or changes nothing."""
        way = (*trail, action)
        with world_after(self._scenario, trail) as world:
            try:
                world.do(action)
            except NotEnabled:
                return None
            except AssertionError as error:
                raise _Violated(str(error), way) from error
            state = world.state()
            known = self._states.get(state)
            if known is None:
                return self._visit(world, state, way)
            return None if known == number else known

    def _visit(self, world: World, state: bytes, trail: tuple[str, ...]) -> int:
        number = self._states[state] = len(self._states)
        self._edges.append([])
        self._open.append((number, trail, world.enabled()))
        self.found.depth = max(self.found.depth, len(trail))
        self._judge(world, trail, FAIR)
        for how in (HANGS, STOPS) if number % self._every == 0 else ():
            with world_after(self._scenario, trail) as again:
                self._judge(again, trail, how)
        if number % 200 == 0:
            gc.collect()
        return number

    def _judge(self, world: World, trail: Sequence[str], how: str) -> None:
        try:
            check(world)
            complete(world, how)
        except AssertionError as error:
            raise _Violated("; ".join(filter(None, (str(error), how))), trail) from error


class _Violated(Exception):
    def __init__(self, what: str, trail: Sequence[str]) -> None:
        super().__init__(what)
        self.trail = list(trail)


def _ways(edges: list[list[int]]) -> int:
    """How many ways lead from the first state to one without a successor. Raises ValueError for a circle."""
    ways: dict[int, int] = {}
    stack, entered = [0], set()
    while stack:
        state = stack[-1]
        if state in entered or state in ways:
            stack.pop()
            entered.discard(state)
            ways.setdefault(state, sum(ways[child] for child in edges[state]) or 1)
        else:
            entered.add(state)
            if not entered.isdisjoint(edges[state]):
                raise ValueError("the actions lead in a circle")
            stack.extend(child for child in edges[state] if child not in ways)
    return ways[0]


# Failures -----------------------------------------------------------------------------------------------------------


def fails(scenario: Scenario, trail: Sequence[str]) -> str:
    """What is violated after `trail`, or in how it ends; empty where nothing is. Impossible actions are skipped."""
    for how in (FAIR, HANGS, STOPS):
        world = World(scenario)
        try:
            for action in trail:
                with contextlib.suppress(NotEnabled):
                    world.do(action)
                    check(world)
            complete(world, how)
        except AssertionError as error:
            return str(error) or type(error).__name__
        finally:
            world.close()
    return ""


def shrink(scenario: Scenario, trail: Sequence[str]) -> list[str]:
    """The shortest list of actions that still fails, by delta debugging: no action of it can be left out."""
    with quiet():
        left, size = list(trail), max(1, len(trail) // 2)
        while size:
            start = 0
            while start < len(left):
                shorter = left[:start] + left[start + size :]
                if fails(scenario, shorter):
                    left = shorter
                else:
                    start += size
            size //= 2
    return left


def as_test(found: Found) -> str:
    """A test to paste."""
    actions = ", ".join(f'"{action}"' for action in found.trail)
    return (
        "def test_found_by_the_explorer() -> None:\n"
        f'    """{found.violation}"""\n'
        f'    assert fails(SCENARIOS["{found.scenario}"], [{actions}]) == ""\n'
    )


def explore(scenario: Scenario, *, most: int | None = None, every: int = 1) -> Found:
    """Search `scenario`; the actions of a violation are shrunk."""
    found = Search(scenario, most=most, every=every).run()
    if found.violation:
        found.trail = shrink(scenario, found.trail)
    return found
