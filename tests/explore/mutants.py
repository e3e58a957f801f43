"""Faults put into the engine on purpose, to see that the explorer finds each.

A mutant replaces one function for the time of a search. `python -m tests.explore --mutants` prints the actions that
show it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any
from unittest import mock

import msgspec

from treadle.core.gate import Gate
from treadle.core.grammar_state import GrammarState
from treadle.core.grammar_wait import GrammarWait
from treadle.core.messages import StepReport
from treadle.core.queue import Queue
from treadle.core.scheduler import Scheduler
from treadle.core.sequence import Sequence
from treadle.engine import dispatch as dispatch_module
from treadle.engine import outbox as outbox_module
from treadle.engine.admission import Admission
from treadle.engine.client import EngineClient, Health
from treadle.engine.generation import Generation
from treadle.engine.loop import EngineLoop
from treadle.engine.mailbox import Mailbox
from treadle.engine.replay import Replay
from treadle.engine.reservation import Reservation
from treadle.engine.supervisor import EngineState, Supervisor

from .callers import REPLAYS

backoff_module = import_module("treadle.engine.deaths" if REPLAYS else "treadle.engine.supervisor")
ON_DEATH = "on_death" if REPLAYS else "on_lost"


@dataclass(frozen=True)
class Mutant:
    """`change` wraps the function `name` of `owner`. `scenario` is where it shows."""

    name: str
    owner: Any
    function: str
    change: Callable[[Callable[..., Any]], Any]
    scenario: str

    @contextlib.contextmanager
    def alive(self) -> Iterator[None]:
        with mock.patch.object(self.owner, self.function, self.change(getattr(self.owner, self.function))):
            yield


def _nothing(was: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: None


def _queues_all(was: Callable[..., Any]) -> Callable[..., Any]:
    def ask(self: GrammarWait) -> list[Any]:
        self._enqueued = False
        for seq in list(self._queue.held):
            constraint = seq.request.constraint
            if constraint is not None and self._lookup(constraint).state is not GrammarState.PENDING:
                self._queue.push(seq)
        return []

    return ask


def _only_running(was: Any) -> property:
    return property(lambda self: [seq.order for seq in self._running.values() if seq.joined])


def _tells_ends_twice(was: Callable[..., None]) -> Callable[..., None]:
    def report(self: EngineLoop, outputs: Any) -> None:
        was(self, outputs)
        if any(output.finish for output in outputs):
            was(self, outputs)

    return report


def _leaks_cancelled(was: Callable[..., None]) -> Callable[..., None]:
    def release(self: Admission, lease: Any, outcome: str) -> None:
        if outcome != "cancelled":
            was(self, lease, outcome)

    return release


def _leaks_tokens(was: Callable[..., None]) -> Callable[..., None]:
    def release(self: Gate, lease: Any, outcome: str, now: float) -> None:
        before = self._capacity.tokens
        was(self, lease, outcome, now)
        self._capacity.tokens = before

    return release


def _keeps_unused(was: Callable[..., None]) -> Callable[..., None]:
    def leave(self: Reservation, *args: Any) -> None:
        self._unused = 0
        was(self, *args)

    return leave


def _loses_tokens(was: Callable[..., None]) -> Callable[..., None]:
    def forget(self: Sequence) -> None:
        was(self)
        self.tokens.clear()

    return forget


def _keeps_released(was: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self: (was(self), ())[1]


def _sends_twice(was: Callable[..., None]) -> Callable[..., None]:
    def send(self: EngineClient, message: Any) -> None:
        was(self, message)
        was(self, message)

    return send


def _takes_the_last(was: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, timeout_s: was(self, timeout_s)[-1:]


def _merges_badly(was: Callable[..., Any]) -> Callable[..., Any]:
    def merge(first: StepReport, second: StepReport) -> StepReport:
        return second

    return merge


def _forgets_ends(was: Callable[..., None]) -> Callable[..., None]:
    return lambda self, output, now: was(self, msgspec.structs.replace(output, finish=None), now)


def _ready_for_ever(was: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self: Health(live=True, ready=self.supervisor.state is EngineState.READY, state="ready")


def _stays_open(was: Callable[..., None]) -> Callable[..., None]:
    def close(self: Gate, error: Any, **until: Any) -> None:
        if "restarting" not in str(error):
            was(self, error, **until)

    return close


def _expires_all(was: Callable[..., Any]) -> Callable[..., Any]:
    def expired(self: Queue, now: float) -> list[Sequence]:
        return [row for row in self.waiting if now - row.arrived >= row.request.max_wait_s]

    return expired


def _blames_all(was: Callable[..., Any]) -> Callable[..., Any]:
    def recover(self: Scheduler, plan: Any, message: str) -> Any:
        for row in self._running.values():
            row.suspect = True
        return was(self, plan, message)

    return recover


def _overtakes(was: Callable[..., None]) -> Callable[..., None]:
    """A row that is preempted or rewound says its last token again."""

    def take(self: Sequence, token: int) -> Any:
        finish = was(self, token)
        return None if len(self.tokens) == 1 and finish is not None else finish

    return take


MUTANTS = (
    Mutant("a cancel is dropped", Scheduler, "cancel", _nothing, "one"),
    Mutant("an end is told twice", EngineLoop, "_report", _tells_ends_twice, "one"),
    Mutant("a cancelled row keeps its place", Admission, "release", _leaks_cancelled, "one"),
    Mutant("tokens stay taken in the gate", Gate, "release", _leaks_tokens, "one"),
    Mutant("what was reserved and not used stays taken", Reservation, "__exit__", _keeps_unused, "one"),
    Mutant("a rewound row loses its tokens", Sequence, "rewind", _loses_tokens, "faults"),
    Mutant("a preempted row loses its tokens", Sequence, "_forget", _loses_tokens, "memory"),
    Mutant("the runner is not told who has ended", Scheduler, "take_released_ids", _keeps_released, "one"),
    Mutant("a request is submitted twice", EngineClient, "_send", _sends_twice, "one"),
    Mutant("the mailbox loses messages", Mailbox, "take", _takes_the_last, "two"),
    Mutant("reports that merge lose tokens", outbox_module, "merge", _merges_badly, "one"),
    Mutant("an end does not reach its reader", Generation, "push", _forgets_ends, "one"),
    Mutant("ready while it drains", EngineClient, "health", _ready_for_ever, "stops"),
    Mutant("the gate stays open after a death", Gate, "close", _stays_open, "one"),
    Mutant("nobody is told of a death", EngineClient, ON_DEATH, lambda was: lambda self, *args: 0, "one"),
    Mutant(
        "who hangs up is no suspect", Replay, "is_suspect", lambda was: lambda self, generation: False, "poison leaves"
    ),
    Mutant("waits of a group that has begun end", Queue, "expired", _expires_all, "waits"),
    Mutant("waits do not end where the engine hangs", dispatch_module, "enforce_queue_timeout", _nothing, "two"),
    Mutant("a hang is not noticed", Supervisor, "_kill_reason", lambda was: lambda self, *began: "", "one"),
    Mutant("all rows are blamed for a step", Scheduler, "recover", _blames_all, "lookahead"),
    Mutant("a row runs on past its end", Sequence, "append", _overtakes, "two"),
    Mutant(
        "a stop waits for an engine that hangs",
        Supervisor,
        "_wait_or_kill",
        lambda was: lambda self, grace_s: self._owner.ended(),
        "one",
    ),
    Mutant("a compiled grammar wakes nobody", Mailbox, "wake", _nothing, "grammar"),
    Mutant("a grammar that fails ends nothing", GrammarWait, "ask", _queues_all, "bad grammar"),
    Mutant("what compiles is no suspect", Scheduler, "exposed_arrivals", _only_running, "poisoned grammar"),
    Mutant("a restart never comes", backoff_module, "BACKOFF_S", lambda was: (1e9,), "one"),
)
