"""What is explored: who asks, and which troubles may come, each as often as its budget says and at any point."""

from __future__ import annotations

from tests.core.drive import Shape

from .callers import Ask, Scenario
from .owner import BAD, POISON

A = Ask("a", prompt=4)  # two chunks, the second of which picks the first of two tokens
B, C = Ask("b", prompt=1, tokens=1), Ask("c", prompt=1, tokens=1)
PAIR = Ask("g", rows=2, prompt=1, tokens=1)
LONG_A, LONG_B = Ask("a", prompt=1, tokens=3), Ask("b", prompt=1, tokens=3)

GRAMMAR_A = Ask("a", prompt=1, tokens=1, grammar="good")
GRAMMAR_PAIR = Ask("g", rows=2, prompt=1, tokens=1, grammar="good")

SMALL = (
    Scenario("one", (A,), budget={"cancel": 1, "match": 1, "die": 1}),
    Scenario("two", (B, C), budget={"cancel": 1}),
    Scenario("group", (PAIR,), budget={"cancel": 1, "crash": 1}),
    Scenario("drafts", (A,), shape=Shape(lookahead=1, drafts=1), budget={"match": 1, "raises late": 1}),
    Scenario("lookahead", (A,), shape=Shape(lookahead=1), budget={"match": 1, "raises": 1, "raises late": 1}),
    Scenario("faults", (A,), budget={"raises": 2, "fails": 1, "breaks": 1}),
    Scenario("waits", (B, PAIR), waiting=3, budget={"short": 1}),
    Scenario("time", (B,), budget={"die": 1, "short": 1, "long": 1, "freeze": 1}),
    Scenario("starts", (B,), budget={"die": 1, "badstart": 2, "nolaunch": 1}),
    Scenario("stops", (B,), budget={"die": 1, "drain": 1, "stop": 1}),
    Scenario("thread", (B,), thread=True, budget={"breaks": 1, "stop": 1, "long": 1}),
    Scenario("turns", (B,), turns=True, budget={"cancel": 1, "die": 1}),
    Scenario("memory", (LONG_A, LONG_B), slots=2, shape=Shape(block=2, blocks=3), growth=0),
    Scenario("poison", (Ask("a", prompt=1, poison=True), B), slots=2),
    Scenario("poison leaves", (Ask("a", prompt=1, poison=True), B), slots=2, budget={"cancel": 1}),
    Scenario("grammar", (GRAMMAR_A, B), budget={"cancel": 1, "die": 1}),
    Scenario("grammar waits", (GRAMMAR_A, GRAMMAR_PAIR), waiting=3, budget={"short": 1}),
    Scenario("bad grammar", (Ask("a", prompt=1, grammar=BAD), B), budget={"cancel": 1}),
    Scenario("poisoned grammar", (Ask("a", prompt=1, poison=True, grammar=POISON), B), slots=2),
    Scenario("frozen", (B,), frozen_ends=True, budget={"long": 1, "freeze": 1, "breaks": 1}),
)
"""For every run of the tests: each in a few hundred states."""

LARGE = (
    Scenario("two die", (A, B), budget={"cancel": 1, "die": 1}),
    Scenario("two slots", (A, B), slots=2, budget={"cancel": 1, "match": 1, "crash": 1}),
    Scenario("two crashes", (A, B), slots=2, budget={"crash": 2, "cancel": 1}),
    Scenario("three", (B, PAIR), slots=2, waiting=3, budget={"cancel": 1, "die": 1}),
    Scenario(
        "two ahead",
        (A, B),
        slots=2,
        shape=Shape(lookahead=1),
        budget={"cancel": 1, "raises": 1, "raises late": 1, "fails": 1},
    ),
    Scenario("two faults", (A, B), slots=2, budget={"raises": 2, "fails": 1, "breaks": 1, "die": 1}),
    Scenario("two wait", (B, PAIR), waiting=3, budget={"die": 1, "short": 1, "long": 1, "freeze": 1}),
    Scenario("many starts", (A,), budget={"die": 3, "badstart": 2, "nolaunch": 2, "long": 1}),
    Scenario("two stop", (A, B), budget={"die": 1, "drain": 1, "stop": 1, "cancel": 1, "long": 1}),
    Scenario("two on a thread", (A, B), thread=True, budget={"breaks": 1, "stop": 1, "long": 1, "raises": 1}),
    Scenario("single turns", (A,), turns=True, budget={"cancel": 1, "die": 1, "stop": 1, "short": 1}),
    Scenario(
        "little memory",
        (LONG_A, LONG_B),
        slots=2,
        shape=Shape(block=2, blocks=3, lookahead=1),
        growth=0,
        budget={"cancel": 1, "die": 1, "raises": 1},
    ),
    Scenario("poison among others", (Ask("a", poison=True), B, C), slots=2, budget={"cancel": 1, "die": 1}),
)
"""By command: tens of thousands of states each."""

SCENARIOS = {scenario.name: scenario for scenario in (*SMALL, *LARGE)}
