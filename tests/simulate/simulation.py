"""Days of seeded traffic over the real client, gate, forecast, supervisor, loop and scheduler, in simulated time.

Clients come by day and by night, in bursts, as agents with long common prompts, as requests for several answers; some
leave, some do not read; those that are sent away come back when they were told to. Engines are killed, hang, and have
steps that raise. Everything is drawn from one seed: a failure is replayed by it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import math
import random
from collections import Counter, deque
from collections.abc import Iterator, Sized
from dataclasses import dataclass, field

from tests.explore.turns import TurnLoop
from treadle.core.messages import Submit
from treadle.engine import generation as generation_module
from treadle.engine.admission import AdmissionLimits
from treadle.engine.client import EngineClient
from treadle.engine.generation import Generation
from treadle.engine.timeouts import Timeouts
from treadle.errors import Busy, EngineUnavailable, TreadleError

from .machine import VOCABULARY, Machine, SimulatedOwner, token_at

DAY_S = 86_400.0
HOUR_S = 3600.0
MAX_WAIT_S = 10.0
WAIT_SLACK_S = 8.0
"""Beyond the longest wait: the steps until the owner says so, or the client's own bound beside a stuck one."""
HANG_AFTER_S = 30.0
ATTEMPTS = 3
"""Of a client, as the official SDKs make them."""
UNREAD = 64
AGENTS = 12


@dataclass(frozen=True)
class Ask:
    """One client request. `leaves_s` after it was sent; inf: never. `reads`: whether it reads its stream."""

    prompt: tuple[int, ...]
    tokens: int
    rows: int = 1
    salt: str = ""
    leaves_s: float = math.inf
    reads: bool = True


@dataclass
class Told:
    """What came of a time at which a client was told to come back."""

    kept: int = 0
    broken: int = 0

    @property
    def share(self) -> float:
        return self.kept / max(1, self.kept + self.broken)


@dataclass
class Outcome:
    """What the days came to."""

    asked: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    first: Counter[str] = field(default_factory=Counter)  # answers to first attempts
    attempts: Counter[int] = field(default_factory=Counter)  # that requests that were served took
    returns: Told = field(default_factory=Told)
    waits_s: list[float] = field(default_factory=list)
    longest_wait_s: float = 0.0
    longest_gap_s: float = 0.0
    tokens: int = 0
    deaths: int = 0
    hangs: int = 0
    steps: int = 0
    objects: list[int] = field(default_factory=list)

    def __str__(self) -> str:
        served = self.ends["served"]
        waits = sorted(self.waits_s) or [0.0]
        return "\n".join(
            (
                f"requests {self.asked}: {dict(self.ends)}",
                f"answers to first attempts: {dict(self.first)}",
                f"served in attempts: {dict(sorted(self.attempts.items()))} ({served / max(1, self.asked):.1%} of all)",
                f"promises: {self.returns.kept + self.returns.broken}, kept {self.returns.share:.1%}",
                f"waits: p50 {waits[len(waits) // 2]:.2f} s, p99 {waits[int(0.99 * len(waits))]:.2f} s, "
                f"longest {self.longest_wait_s:.2f} s",
                f"longest time without a token: {self.longest_gap_s:.1f} s",
                f"tokens {self.tokens}, steps {self.steps}, deaths {self.deaths}, hangs {self.hangs}",
                f"entries in the books by the hour: {self.objects[0]} to {self.objects[-1]}, most {max(self.objects)}",
            )
        )


class Days:
    """One simulation. `load` is the mean demand over what the machine can do; by day it is twice that of the night."""

    def __init__(self, seed: int, days: float, *, load: float = 0.6, machine: Machine | None = None) -> None:
        self.machine = machine or Machine()
        self.chance = random.Random(seed)
        self.outcome = Outcome()
        self._end_s = days * DAY_S
        self._load = load
        self._events = TurnLoop()  # type: ignore[abstract]
        self._tasks: set[asyncio.Task[None]] = set()
        self._owner: SimulatedOwner
        self._waiting: set[Generation] = set()

    def run(self) -> Outcome:
        """Raises AssertionError where a property does not hold."""
        with self._quietly():
            slots = self.machine.slots
            self.client = EngineClient(
                self._launch,
                AdmissionLimits(slots, 2 * slots, MAX_WAIT_S, by_forecast=True),
                Timeouts(hang_after_s=HANG_AFTER_S),
                clock=self._events.time,
            )
            self.client.begin()
            self._began = self._events.time()
            self._spawn(self._traffic())
            self._spawn(self._troubles())
            self._spawn(self._bursts())
            self._until(self._began + self._end_s)
            self._drain()
        return self.outcome

    @contextlib.contextmanager
    def _quietly(self) -> Iterator[None]:
        before, unread = logging.root.manager.disable, generation_module.MAX_UNREAD_BYTES
        logging.disable(logging.CRITICAL)
        generation_module.MAX_UNREAD_BYTES = UNREAD * generation_module.TOKEN_BYTES
        asyncio._set_running_loop(self._events)
        try:
            yield
        finally:
            self._events.tasks += self._tasks
            self._events.close()
            asyncio._set_running_loop(None)
            generation_module.MAX_UNREAD_BYTES = unread
            logging.disable(before)

    def _launch(self) -> SimulatedOwner:
        if getattr(self, "_owner", None) is not None:
            self.outcome.steps += self._owner.steps
        self._owner = SimulatedOwner(self.machine, self._events)
        return self._owner

    def _spawn(self, work: object) -> None:
        task = asyncio.Task(work, loop=self._events)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._events.errors.append({"exception": error})

    # Time ----------------------------------------------------------------------------------------------------------

    def _until(self, end: float) -> None:
        hour = self._events.time() + HOUR_S
        self._events.settle()
        while (due := self._events.due()) is not None and due <= end:
            self._events.advance(max(0.0, due - self._events.now))
            self._events.settle()
            if self._events.errors:
                error = self._events.errors[0].get("exception")
                raise AssertionError(f"after {self._events.now - self._began:.0f} s: {error!r}") from error
            if self._events.now >= hour:
                hour += HOUR_S
                self._look()
        self._events.now = max(self._events.now, end)

    def _look(self) -> None:
        """Once an hour: the books agree, and they do not grow."""
        gate = self.client.gate
        assert 0 <= gate.rows <= gate.limits.places, f"{gate.rows} rows of {gate.limits.places} places"
        assert gate.tokens >= 0
        self.outcome.objects.append(held(self.client, self._owner.loop))

    def _drain(self) -> None:
        """Nobody comes any more: everything ends, and nothing is left."""
        self._end_s = 0.0
        self._until(self._events.now + 2 * HOUR_S)
        client, outcome = self.client, self.outcome
        assert client.gate.rows == client.gate.tokens == 0, f"{client.gate.rows} rows are left in the gate"
        assert not client.dispatch.generations
        assert sum(outcome.ends.values()) == outcome.asked, "each request ends once"
        assert self._owner.loop is not None
        assert self._owner.runner is not None
        assert not self._owner.loop.scheduler.has_work
        assert not self._owner.runner.rows
        books = client.gate.statistics()
        assert books["accepted"] == sum(books["ended"].values()), "each row that came in went out"
        self.outcome.steps += self._owner.steps
        self._look()

    # Who comes -----------------------------------------------------------------------------------------------------

    async def _traffic(self) -> None:
        while self._events.now - self._began < self._end_s:
            by_day = 1 - math.cos(2 * math.pi * (self._events.now - self._began) / DAY_S)
            rate = self._rate * (0.35 + 0.65 * by_day)
            await asyncio.sleep(self.chance.expovariate(rate))
            self._spawn(self._client(self._ask()))

    async def _bursts(self) -> None:
        """Now and then many at once, such as a job that fans out."""
        while True:
            await asyncio.sleep(self.chance.expovariate(1 / (2 * HOUR_S)))
            if self._events.now - self._began >= self._end_s:
                return
            for _ in range(self.chance.randint(10, 60)):
                self._spawn(self._client(self._ask()))

    @property
    def _rate(self) -> float:
        """Requests a second at which slots would be taken for `load` of the time."""
        mean_s = 60 * self.machine.capabilities().steps.decode_step_s
        return self._load * self.machine.slots / mean_s

    def _ask(self) -> Ask:
        chance = self.chance
        kind = chance.random()
        leaves_s = chance.expovariate(1 / 8) if chance.random() < 0.06 else math.inf
        reads = chance.random() > 0.01
        first = chance.randrange(VOCABULARY)
        if kind < 0.30:  # an agent's turn: a long prompt that begins as all of its own do
            agent = chance.randrange(AGENTS)
            own = tuple(range(first, first + chance.randint(10, 600)))
            trunk = tuple(range(agent * 10_000, agent * 10_000 + self.machine.trunk))
            return Ask(trunk + own, chance.randint(5, 80), salt=f"agent {agent}", leaves_s=leaves_s, reads=reads)
        if kind < 0.36:
            prompt = tuple(range(first, first + chance.randint(20, 200)))
            return Ask(prompt, chance.randint(5, 60), rows=chance.randint(2, 4), leaves_s=leaves_s)
        if kind < 0.40:
            return Ask(tuple(range(first, first + chance.randint(1500, 4000))), chance.randint(50, 300), reads=reads)
        length = max(1, int(chance.lognormvariate(4.0, 1.0)))
        tokens = max(1, min(400, int(chance.lognormvariate(3.5, 0.9))))
        return Ask(tuple(range(first, first + min(length, 2000))), tokens, leaves_s=leaves_s, reads=reads)

    async def _client(self, ask: Ask) -> None:
        """One client as an SDK is: it obeys Retry-After, and gives up after ATTEMPTS."""
        self.outcome.asked += 1
        promised = False
        for attempt in range(1, ATTEMPTS + 1):
            end, again_s = await self._attempt(ask)
            if attempt == 1:
                self.outcome.first[end] += 1
            if promised:
                self.outcome.returns.kept += end not in ("Busy", "EngineUnavailable")
                self.outcome.returns.broken += end in ("Busy", "EngineUnavailable")
            if again_s is None or attempt == ATTEMPTS:
                break
            promised = end == "Busy"
            await asyncio.sleep(again_s)
        if end == "served":
            self.outcome.attempts[attempt] += 1
        self.outcome.ends[end] += 1

    async def _attempt(self, ask: Ask) -> tuple[str, float | None]:
        """How it ended, and after how many seconds to try again, if at all."""
        began = self._events.time()
        try:
            with self.client.reserve(
                rows=ask.rows,
                prompt_tokens=ask.rows * len(ask.prompt),
                completion_tokens=ask.tokens,
                kind="chat",
                tag="t",
            ) as reservation:
                request = Submit(id="", prompt=ask.prompt, max_tokens=ask.tokens, salt=ask.salt)
                generations = reservation.submit([request] * ask.rows)
                if ask.leaves_s < math.inf:
                    self._events.call_later(ask.leaves_s, reservation.cancel)
                for generation in generations:
                    await self._read(generation, ask, began)
        except (Busy, EngineUnavailable) as error:
            return _refused(error, self._events.time() - began)
        except TreadleError as error:
            return type(error).__name__, None
        return "served", None

    async def _read(self, generation: Generation, ask: Ask, began: float) -> None:
        await generation.admitted()
        waited_s = generation.wait_s
        self.outcome.waits_s.append(waited_s)
        self.outcome.longest_wait_s = max(self.outcome.longest_wait_s, waited_s)
        if ask.rows == 1:
            assert waited_s <= MAX_WAIT_S + WAIT_SLACK_S, f"waited {waited_s:.1f} s for a slot"
        if not ask.reads and ask.tokens > 2 * UNREAD:
            while not generation.ended:
                await asyncio.sleep(1.0)
        tokens: list[int] = []
        last = self._events.time()
        async for delta in generation:
            self.outcome.longest_gap_s = max(self.outcome.longest_gap_s, self._events.time() - last)
            last = self._events.time()
            for token in delta.tokens:
                assert token == token_at(generation.request, len(tokens)), "another token than it gets alone"
                tokens.append(token)
        assert len(tokens) == ask.tokens, "each token comes once"
        self.outcome.tokens += len(tokens)

    # What goes wrong -------------------------------------------------------------------------------------------------

    async def _troubles(self) -> None:
        while self._events.now - self._began < self._end_s:
            await asyncio.sleep(self.chance.expovariate(1 / HOUR_S))
            owner = self._owner
            if owner.runner is None or owner.dead:
                continue
            match self.chance.choice(("dies", "dies", "hangs", "raises", "raises", "fails", "fails")):
                case "dies":
                    self.outcome.deaths += 1
                    owner.kill()
                case "hangs":
                    self.outcome.hangs += 1
                    owner.stuck = True
                case "raises":
                    owner.runner.raise_next = True
                case "fails":
                    owner.runner.fail_next = True


def _refused(error: TreadleError, waited_s: float) -> tuple[str, float | None]:
    """A refusal comes in time, and says when to try again in a way that SDKs obey."""
    assert waited_s <= MAX_WAIT_S + WAIT_SLACK_S, f"{type(error).__name__} after {waited_s:.1f} s"
    assert error.retry_after_s is None or 0 <= error.retry_after_s <= 60.0, f"come again in {error.retry_after_s} s"
    return type(error).__name__, error.retry_after_s


def held(*roots: object) -> int:
    """How many entries the engine's books have: its own objects, and the items of all containers that they hold."""
    seen: dict[int, object] = {}
    todo = [*roots]
    while todo:
        value = todo.pop()
        ours = type(value).__module__.startswith("treadle")
        if id(value) not in seen and (ours or isinstance(value, dict | list | tuple | set | deque)):
            seen[id(value)] = value
            todo += [item for item in gc.get_referents(value) if not isinstance(item, type)]
    return sum(1 + (len(value) if isinstance(value, Sized) else 0) for value in seen.values())
