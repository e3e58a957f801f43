"""Plan of clients and faults: a function of the seed alone, independent of the machine's speed.

A run is made of segments. Each has its requests, its number of clients, and faults that happen when a given number of
its requests have begun. A segment can be run again by itself.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from .recipes import PRIORITIES, SALTS, Recipe, recipes


class Manner(StrEnum):
    """Behaviour of a client. Those below HALF_CLOSE leave before the end."""

    WHOLE = "whole"
    STREAM = "stream"
    KEEP_ALIVE = "keep-alive"
    PIPELINE = "pipeline"
    SLOW_READ = "slow-read"
    SLOW_WRITE = "slow-write"
    BAD = "bad"
    WRONG_KEY = "wrong-key"
    TOO_LONG = "too-long"
    RAISES = "raises"  # a row that fails every step it takes part in
    ASK = "ask"  # not for text: status, metrics, models
    TWICE = "twice"  # the same request id again while it runs
    EARLY_ABORT = "early-abort"
    ABORT = "abort"
    HALF_CLOSE = "half-close"
    RST = "rst"
    FIN = "fin"
    TORN = "torn"  # leaves in the middle of the request
    DEADLINE = "deadline"
    CANCEL = "cancel"
    HANG_UP = "hang-up"  # closes the whole gRPC channel


class Fault(StrEnum):
    """Fault of the server. See `faults`."""

    NONE = "none"
    KILL = "kill"
    ABRT = "abrt"
    SEGV = "segv"
    STEP_SEGV = "step-segv"
    STEP_ABORT = "step-abort"
    BROKEN = "broken"
    RAISE_PLAN = "raise-plan"
    POISON = "poison"
    STOP = "stop"
    STOP_CONT = "stop-cont"
    HANG = "hang"
    PARENT_STOP = "parent-stop"
    RAISE = "raise"
    RAISE_READ = "raise-read"
    RAISE_RELEASE = "raise-release"
    ALLOCATE = "allocate"
    MEMORY = "memory"
    STARVE = "starve"
    SLOW = "slow"
    BABBLE = "babble"
    DEAF = "deaf"
    HOARD = "hoard"
    HOARD_KILL = "hoard-kill"
    FLUSH = "flush"
    DRAIN = "drain"
    FULL_DISK = "full-disk"


HTTP_MANNERS = {
    Manner.WHOLE: 14,
    Manner.STREAM: 24,
    Manner.KEEP_ALIVE: 6,
    Manner.PIPELINE: 4,
    Manner.SLOW_READ: 4,
    Manner.SLOW_WRITE: 4,
    Manner.BAD: 6,
    Manner.WRONG_KEY: 2,
    Manner.TOO_LONG: 2,
    Manner.ASK: 3,
    Manner.HALF_CLOSE: 4,
    Manner.RST: 8,
    Manner.FIN: 8,
    Manner.TORN: 4,
    Manner.DEADLINE: 4,
}
RPC_MANNERS = {
    Manner.WHOLE: 12,
    Manner.STREAM: 24,
    Manner.SLOW_READ: 4,
    Manner.BAD: 6,
    Manner.TOO_LONG: 2,
    Manner.ASK: 3,
    Manner.TWICE: 2,
    Manner.EARLY_ABORT: 3,
    Manner.ABORT: 8,
    Manner.CANCEL: 10,
    Manner.DEADLINE: 5,
    Manner.HANG_UP: 3,
    Manner.WRONG_KEY: 2,
}
RARE = {Manner.RAISES: 0.002}
LEAVERS = frozenset(
    (Manner.HALF_CLOSE, Manner.RST, Manner.FIN, Manner.TORN, Manner.DEADLINE, Manner.CANCEL, Manner.HANG_UP)
)
GROUPS = frozenset((Manner.KEEP_ALIVE, Manner.PIPELINE))
DEATHS = (
    Fault.KILL,
    Fault.ABRT,
    Fault.SEGV,
    Fault.STEP_SEGV,
    Fault.STEP_ABORT,
    Fault.BROKEN,
    Fault.RAISE_PLAN,
    Fault.POISON,
    Fault.STOP,
    Fault.HANG,
    Fault.STARVE,
    Fault.HOARD_KILL,
)
HARMLESS = (
    Fault.NONE,
    Fault.NONE,
    Fault.STOP_CONT,
    Fault.PARENT_STOP,
    Fault.RAISE,
    Fault.RAISE_READ,
    Fault.RAISE_RELEASE,
    Fault.ALLOCATE,
    Fault.MEMORY,
    Fault.SLOW,
    Fault.BABBLE,
    Fault.DEAF,
    Fault.HOARD,
    Fault.FLUSH,
)
FRESH_STARTS = (Fault.DRAIN, Fault.FULL_DISK)
DEATH_EVERY = 5  # segments: after a death within a minute of another the server waits longer
FRESH_STARTS_AT = {1: Fault.DRAIN, 3: Fault.FULL_DISK}  # by segment: early, as the drift of memory is of one process
CLIENTS = (4, 8, 8, 12, 16, 40)


@dataclass(frozen=True)
class Request:
    """One client. `recipes` are sent one after the other on a connection by a group, else there is one. `after` is the
    point at which it leaves, in events, bytes or seconds, as a part of 1. `number` counts requests over the run."""

    number: int
    wire: str  # http, mlx or vllm
    manner: Manner
    recipes: tuple[Recipe, ...]
    stream: bool
    after: float
    salt: str = ""
    priority: int = 0
    variant: int = 0  # of bad requests and questions

    @property
    def recipe(self) -> Recipe:
        return self.recipes[0]

    @property
    def leaves(self) -> bool:
        return self.manner in LEAVERS


@dataclass(frozen=True)
class Planned:
    """A fault that happens when `at` clients of the segment have begun."""

    at: int
    fault: Fault


@dataclass(frozen=True)
class Segment:
    index: int
    clients: int
    requests: Sequence[Request]
    faults: Sequence[Planned]

    @property
    def size(self) -> int:
        """Requests in it: a group of a keep-alive connection is several."""
        return sum(len(request.recipes) for request in self.requests)


@dataclass(frozen=True)
class Plan:
    """`faults` are those that may happen; None for all."""

    seed: int
    pool: int = 200
    size: int = 400  # clients a segment
    wires: tuple[str, ...] = ("http", "http", "http", "mlx", "vllm")
    faults: frozenset[Fault] | None = None
    deaths_every: int = DEATH_EVERY
    recipes: list[Recipe] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        self.recipes.extend(recipes(self.seed, self.pool))

    def segment(self, index: int) -> Segment:
        """Return the segment of that index, from 0; the same each time."""
        rng = random.Random(f"segment/{self.seed}/{index}")
        number = index * self.size
        requests = [self._request(rng, number + i) for i in range(self.size)]
        return Segment(index, rng.choice(CLIENTS), requests, self._faults(rng, index))

    def _request(self, rng: random.Random, number: int) -> Request:
        wire = rng.choice(self.wires)
        manners = HTTP_MANNERS if wire == "http" else RPC_MANNERS
        manner = rng.choices(list(manners), list(manners.values()))[0]
        rare = rng.random()
        manner = next((one for one, part in RARE.items() if rare < part), manner)
        count = rng.randint(2, 4) if manner in GROUPS else 1
        return Request(
            number=number,
            wire=wire,
            manner=manner,
            recipes=tuple(self._recipe(rng, wire, manner) for _ in range(count)),
            stream=manner is Manner.STREAM or (manner is not Manner.WHOLE and rng.random() < 0.7),
            after=rng.random(),
            salt=rng.choice(SALTS),
            priority=rng.choice(PRIORITIES),
            variant=rng.randrange(1000),
        )

    def _recipe(self, rng: random.Random, wire: str, manner: Manner) -> Recipe:
        """Choose a recipe; clients that leave early get long answers, which they can leave at more points."""
        sizes = ("middle", "long") if manner in LEAVERS or manner is Manner.ABORT else ("short", "middle", "long")
        fit = [one for one in self.recipes if one.size in sizes and (wire == "http" or one.fits(wire))]
        return rng.choice(fit)

    def _faults(self, rng: random.Random, index: int) -> list[Planned]:
        at = rng.randint(self.size // 5, self.size // 2)
        if (fault := FRESH_STARTS_AT.get(index)) and self._may(fault):
            return [Planned(at, fault)]
        deadly = index % self.deaths_every == self.deaths_every - 1
        deck = [fault for fault in (DEATHS if deadly else HARMLESS) if self._may(fault)]
        if not deck:
            return []
        turn = index // self.deaths_every if deadly else index - index // self.deaths_every
        shuffled = random.Random(f"deck/{self.seed}/{deadly}/{turn // len(deck)}").sample(deck, len(deck))
        return [Planned(at, shuffled[turn % len(deck)])]

    def _may(self, fault: Fault) -> bool:
        return self.faults is None or fault in self.faults
