"""An owner whose process, pipes and runner are a model: the loop, the mailbox and the outbox in it are the real ones.

A message waits in `inbound` until a step takes it in, and in the outbox and then in `wire` until the other side hears
it. So each may be as late as the explorer likes, and a death loses what has not left the outbox.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from tests.core.drive import HashRunner, Shape, expected
from tests.support.capabilities import capabilities
from tests.support.inert import Inert
from treadle.core.capabilities import Capabilities
from treadle.core.grammar_state import PENDING, GrammarStatus
from treadle.core.messages import (
    Cancel,
    Constraint,
    Failed,
    FromOwner,
    Ready,
    StepReport,
    Stop,
    Stopped,
    Submit,
    ToOwner,
)
from treadle.core.plan import StepPlan, StepResult
from treadle.engine.handle import OnExit, OnMessage
from treadle.engine.in_flight_table import InFlightTable
from treadle.engine.loop import EngineLoop
from treadle.engine.mailbox import Mailbox
from treadle.engine.outbox import Outbox
from treadle.engine.owner import OwnerLimits, scheduler_for
from treadle.runner.base import Job, RunnerBroken

MERGE_AFTER = 2
BAD, POISON = "bad", "poison"
"""Grammars: one that can't be compiled, and one whose compiling ends the process."""


class Violation(AssertionError):
    """A property does not hold."""


def require(holds: bool, what: str) -> None:
    if not holds:
        raise Violation(what)


class Crash(BaseException):
    """The process is gone in the middle of a step, as by a signal."""


class ExploredRunner(Inert, HashRunner):
    """A hash runner that fulfils the whole protocol. `fault` is the trouble of the next step; each step with a row of
    `poison` in it ends the process."""

    def __init__(self, max_running: int, shape: Shape, context: int, poison: Callable[[Submit], bool]) -> None:
        super().__init__(max_running, shape)
        self.fault = ""
        self.grammar_changed: Callable[[], None] = lambda: None
        self._context = context
        self._poison = poison

    def grammar_state(self, constraint: Constraint) -> GrammarStatus:
        return HashRunner.grammar_state(self, constraint)

    def has_features(self, hash_: bytes) -> bool:
        return HashRunner.has_features(self, hash_)

    def notify_grammars(self, changed: Callable[[], None]) -> None:
        self.grammar_changed = changed

    @property
    def pending(self) -> list[str]:
        """The grammars that it compiles."""
        return [grammar for grammar, status in self.grammars.items() if status is PENDING]

    def capabilities(self) -> Capabilities:
        return capabilities(
            model="explored",
            architecture="none",
            vocabulary=1000,
            context=self._context,
            device="cpu",
            dtype="float32",
            kv_token_bytes=0 if self.shape.blocks else 1,
            kv_budget_bytes=0 if self.shape.blocks else 1000,
            kv_block=self.shape.block,
            kv_blocks=self.shape.blocks,
            lookahead=self.shape.lookahead,
            draft_tokens=self.shape.drafts,
        )

    def start(self, plan: StepPlan) -> None:
        ids = {a.request.id for a in plan.admit} | {c.id for c in plan.prefill} | {d.id for d in plan.decode}
        if self.fault == "breaks":
            self.fault = ""
            raise RunnerBroken("broken by the explorer")
        if self.fault == "crashes" or any(self._poison(self.rows[i].request) for i in ids if i in self.rows):
            raise Crash
        if any(self._poison(admit.request) for admit in plan.admit):
            raise Crash
        if self.fault.startswith("fails ") and self.fault[6:] in ids:
            self.failures[self.fault[6:]] = "failed by the explorer"
            self.fault = ""
        self.raises = lambda plan: self.fault == "raises"
        try:
            super().start(plan)
        finally:
            self.fault = "" if self.fault == "raises" else self.fault

    def finish(self) -> StepResult:
        self.raises_late = lambda plan: self.fault == "raises late"
        try:
            return super().finish()
        finally:
            self.fault = "" if self.fault == "raises late" else self.fault

    def jobs(self) -> Mapping[str, Job]:
        return {"work": lambda context, args: dict(args)}


class Watch:
    """What one owner was asked and has said, held to the protocol."""

    def __init__(self) -> None:
        self.asked: dict[str, Submit] = {}
        self.said: dict[str, list[int]] = {}
        self.ended: set[str] = set()
        self.last = False

    def sent(self, message: ToOwner) -> None:
        if isinstance(message, Submit):
            live = message.id in self.asked and message.id not in self.ended
            require(not live, f"{message.id} is submitted while it lives")
            self.asked[message.id] = message
            self.said[message.id] = []
            self.ended.discard(message.id)

    def told(self, message: FromOwner) -> None:
        require(not self.last, f"{type(message).__name__} after the owner's last word")
        self.last = isinstance(message, Stopped | Failed)
        if isinstance(message, StepReport):
            for output in message.outputs:
                require(output.id in self.asked, f"news of {output.id}, which nobody sent")
                require(output.id not in self.ended, f"news of {output.id} after its end")
                self.said[output.id] += output.tokens
                self._in_order(output.id)
                if output.finish is not None:
                    self.ended.add(output.id)

    def over(self, id_: str) -> bool:
        """Whether nothing more is owed to `id_`."""
        return id_ not in self.asked or id_ in self.ended

    def _in_order(self, id_: str) -> None:
        request, said = self.asked[id_], self.said[id_]
        had = already(request)
        tokens = expected(request)[0]
        require(tuple(said) == tokens[had : had + len(said)], f"{id_} was told tokens {said}, not {tokens[had:]}")


def already(request: Submit) -> int:
    """How many tokens a request has from an earlier owner, where requests are replayed."""
    return len(getattr(request, "generated", ()))


class World(Protocol):
    """What an owner needs of the world that it lives in."""

    lookahead: int
    shape: Shape
    slots: int
    context: int
    thread: bool
    launch_fails: bool
    poisoned: int

    def clock(self) -> float: ...

    def poison(self, request: Submit) -> bool: ...


class ModelOwner:
    """One life of an owner. `step` and what follows are the explorer's."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.pid = 1
        self.watch = Watch()
        self.inbound: list[ToOwner] = []
        self.wire: list[FromOwner] = []
        self.outbox = Outbox(MERGE_AFTER)
        self.mailbox = Mailbox()
        self.table = InFlightTable()
        self.loop: EngineLoop | None = None
        self.runner: ExploredRunner | None = None
        self.started = False
        self.dead = ""
        self.gone = False
        self._ended = asyncio.Event()
        self._on_message: OnMessage
        self._on_exit: OnExit

    # As the supervisor sees it

    async def start(self, on_message: OnMessage, on_exit: OnExit) -> None:
        if self.world.launch_fails:
            self.world.launch_fails = False
            raise OSError("too many open files")
        self._on_message, self._on_exit = on_message, on_exit
        self.started = True

    def send(self, message: ToOwner) -> None:
        if not self.dead:
            self.watch.sent(message)
            self.inbound.append(message)

    def kill(self) -> bool:
        if self.world.thread:
            self.inbound.append(Stop())
            return False
        if self.started:
            self.die("killed by SIGKILL", told=True)
        return True

    async def ended(self) -> None:
        await self._ended.wait()

    def is_suspended(self) -> bool:
        return False

    def in_steps(self) -> frozenset[int]:
        return self.table.read()

    # As the explorer sees it

    @property
    def loading(self) -> bool:
        return self.started and self.loop is None and not self.dead

    @property
    def serving(self) -> bool:
        return self.loop is not None and not self.dead

    @property
    def talks(self) -> bool:
        return bool(self.wire or self.outbox._messages)

    def load(self) -> None:
        world = self.world
        self.runner = ExploredRunner(world.slots, world.shape, world.context, world.poison)
        can = self.runner.capabilities()
        limits = OwnerLimits(world.slots, 2)
        scheduler = scheduler_for(can, limits, self.runner.match_prefix, self.runner.grammar_state)
        self.loop = EngineLoop(self.runner, scheduler, self.mailbox, self._say, world.clock, self.table)
        self._say(Ready(capabilities=can, pid=self.pid))

    def fail_to_load(self) -> None:
        self._say(Failed(code="start_failed", message="no memory"))
        self.die("exit code 3", told=True)

    @property
    def pending(self) -> list[str]:
        return [] if self.runner is None else self.runner.pending

    @property
    def sleeps(self) -> bool:
        """Whether its loop waits for a message, a grammar, or for the next sequence to expire."""
        assert self.loop is not None
        return not (self.loop.has_work or self.mailbox._woken or self.loop.grammar_wait_s == 0.0)

    def compile(self, grammar: str) -> None:
        """End the compiling of a grammar, which may be bad, or may end the process."""
        assert self.runner is not None
        if grammar == POISON:
            self.world.poisoned += bool(self.loop and self.loop.scheduler._queue.held)  # else its client has left
            self.die("killed by SIGSEGV", told=True)
        else:
            self.runner.compile(grammar, "it is bad" if grammar == BAD else "")
            self.runner.grammar_changed()

    def step(self, arrive: int, fault: str = "") -> bool:
        """Take in the first `arrive` messages and run the loop once; whether `fault` came to pass."""
        assert self.loop is not None
        assert self.runner is not None
        arrived = self.inbound[:arrive]
        for message in arrived:
            self.mailbox.put(message)
        del self.inbound[:arrive]
        self.runner.fault = fault
        try:
            self.loop.run_once(wait_s=0.0)
        except Crash:
            self.world.poisoned += fault != "crashes"
            self.die("killed by SIGSEGV", told=True)
            return True
        except Violation:
            raise
        except Exception as error:
            require(isinstance(error, RunnerBroken) and fault == "breaks", f"the loop raised {error!r}")
            self.loop.die(str(error))
            self.die("exit code 3", told=True)
            return True
        happened = not self.runner.fault
        self.runner.fault = ""
        self.loop.scheduler.check_integrity()
        for message in arrived:
            taken_back = message.id if isinstance(message, Cancel) else ""
            require(self.watch.over(taken_back), f"{taken_back} goes on after its cancel was taken")
        if self.loop.stopped:
            self.die("exit code 0", told=True)
        elif not self.loop.scheduler.has_work:
            require(not self.runner.rows, f"the runner keeps {sorted(self.runner.rows)} of nobody")
        return happened

    def say_next(self) -> None:
        """The other side hears the oldest message."""
        if not self.wire:
            self.wire = self.outbox.take_nowait()
        self._on_message(self.wire.pop(0))

    def die(self, how: str, *, told: bool) -> None:
        """The process is gone; what its sender had not taken yet is lost, unless it is `told`."""
        if self.dead:
            return
        self.dead = how
        if told:
            self.wire += self.outbox.take_nowait()
        self.outbox = Outbox(MERGE_AFTER)
        self.inbound.clear()
        self.loop = self.runner = None

    def exit(self) -> None:
        """Its end is seen, after all that it said."""
        self.gone = True
        self._ended.set()
        self._on_exit(self.dead)

    def _say(self, message: FromOwner) -> None:
        self.watch.told(message)
        if isinstance(message, Stopped):
            on_the_way = {m.id for m in self.inbound if isinstance(m, Submit)}
            left = self.watch.asked.keys() - self.watch.ended - on_the_way
            require(not left, f"the owner ends without a word on {sorted(left)}")
        self.outbox.put(message)


def state_of(owner: ModelOwner) -> tuple[Any, ...]:
    """What of an owner matters to what comes."""
    plain = (owner.started, owner.dead, owner.gone, sorted(owner.in_steps()))
    return (*plain, owner.inbound, owner.wire, owner.outbox, owner.mailbox, owner.loop)
