"""Seeded random lives of clients over a real loop: whatever they do and whatever breaks, no place is ever lost."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import ExitStack, suppress

import pytest

from tests.support.aio import in_loop
from tests.support.faults import Faults, FaultyRunner, plain
from tests.support.owners import Clock, settle
from treadle.core.messages import CancelReason, Submit
from treadle.engine import deaths as deaths_module
from treadle.engine.admission import AdmissionLimits
from treadle.engine.client import EngineClient
from treadle.engine.generation import Generation
from treadle.engine.inline import InlineOwner
from treadle.engine.owner import OwnerLimits
from treadle.errors import TreadleError
from treadle.runner.base import Progress, Runner, RunnerBroken


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(deaths_module, "BACKOFF_S", (0.0,))


class Caller:
    """One client request: its reservation, its generations and how each of them ended."""

    def __init__(self, client: EngineClient, rows: int, prompt: int) -> None:
        self.stack = ExitStack()
        self.rows, self.prompt = rows, prompt
        self.reservation = self.stack.enter_context(
            client.reserve(rows=rows, prompt_tokens=rows * prompt, completion_tokens=6, kind="chat", tag="t")
        )
        self.generations: list[Generation] = []
        self.readers: list[asyncio.Task[None]] = []
        self.tokens: dict[str, list[int]] = {}
        self.ends: list[BaseException | None] = []
        self.left = False

    def resize(self, prompt: int) -> None:
        self.prompt = prompt
        with suppress(TreadleError):
            self.reservation.resize(prompt_tokens=self.rows * prompt)

    def submit(self, max_tokens: int) -> None:
        with suppress(TreadleError):
            request = Submit(id="", prompt=tuple(range(self.prompt)), max_tokens=max_tokens)
            self.generations = self.reservation.submit([request] * self.rows)
            self.readers = [asyncio.create_task(self._read(generation)) for generation in self.generations]

    def leave(self) -> None:
        self.left = True
        self.stack.close()

    async def _read(self, generation: Generation) -> None:
        tokens = self.tokens[generation.id] = []
        try:
            async for delta in generation:
                tokens.extend(delta.tokens)
        except TreadleError as error:
            self.ends.append(error)
        else:
            self.ends.append(None)
        assert tokens == [plain(generation.request, i) for i in range(len(tokens))]


class Crowd:
    """One seed's random operations."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.clock = Clock()
        self.owner: InlineOwner
        self.callers: list[Caller] = []
        self.gone: list[Caller] = []
        self.running = self.chance.choice((1, 2, 5))
        self.budget = self.chance.choice((0, 60))
        self.client = EngineClient(self.launch, AdmissionLimits(self.running, 3, 2.0), clock=self.clock)

    def launch(self) -> InlineOwner:
        self.owner = InlineOwner(self.build, OwnerLimits(self.running, 16), clock=self.clock)
        return self.owner

    def build(self, progress: Progress) -> Runner:
        broken = RunnerBroken("by lot") if self.chance.random() < 0.4 else None
        faults = Faults(steps={self.chance.randint(3, 40): broken or ValueError("by lot")})
        return FaultyRunner(faults, can={"context": 64, "kv_token_bytes": 1, "kv_budget_bytes": self.budget})

    async def act(self) -> None:
        chance = self.chance
        self.clock.now += chance.choice((0.0, 0.01, 0.3))
        caller = chance.choice(self.callers) if self.callers else None
        match chance.choice("eessscclrrrrrtk"):
            case "e":
                with suppress(TreadleError):
                    self.callers.append(Caller(self.client, chance.choice((1, 1, 2)), chance.randint(1, 12)))
            case "s" if caller and not caller.generations:
                caller.submit(chance.randint(1, 8))
            case "c" if caller and not caller.generations:
                caller.resize(chance.randint(1, 30))
            case "l" if caller:
                caller.leave()
                self.callers.remove(caller)
                self.gone.append(caller)
            case "t" if caller:
                caller.reservation.cancel(chance.choice(list(CancelReason)))
            case "k" if chance.random() < 0.1:
                self.owner.kill()
            case "r":
                self.owner.run_once()
        await settle(chance.choice((0, 1, 5)))

    async def end(self, *, stop: bool) -> None:
        if stop:
            await self.client.stop()
        for _ in range(200):
            self.owner.run_once()
            await settle(3)
        for caller in self.callers:
            caller.leave()
        for _ in range(3):
            await settle()
            self.owner.run_once()
        await settle()


@pytest.mark.untraced
@pytest.mark.parametrize("stop", [False, True])
@pytest.mark.parametrize("seed", range(25))
@in_loop
async def test_no_place_is_lost_and_each_sequence_ends_once(seed, stop):
    """B4, B7, C3, D1: reserving, correcting, sending, cancelling and leaving in any order, while owners break and are
    replaced."""
    crowd = Crowd(seed)
    client = crowd.client
    await client.start()
    for _ in range(400):
        await crowd.act()
        gate = client.gate
        assert 0 <= gate.rows <= gate.limits.places
    await crowd.end(stop=stop)
    assert (client.gate.rows, client.gate.tokens, client.dispatch.generations) == (0, 0, [])
    books = client.gate.statistics()
    assert books["accepted"] == sum(books["ended"].values())
    for caller in (*crowd.callers, *crowd.gone):
        await asyncio.gather(*caller.readers)
        assert len(caller.ends) == len(caller.generations), "each sequence ends once"
        assert all(generation.ended for generation in caller.generations)
    kinds = Counter(type(end).__name__ for caller in crowd.gone for end in caller.ends)
    assert kinds["TreadleError"] == 0, "every end has an error of its own"
    await client.stop()
