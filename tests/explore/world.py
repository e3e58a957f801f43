"""A server in the small: the real client, gate, supervisor, loop and scheduler, around which everything is the
explorer's: the clients, the process, its pipes, what it computes, and time.

An action is a short text, such as "submit a" or "step 1 raises". `enabled` lists those that are possible now, `do`
performs one, `complete` brings everything to its end in a fair way. After each action the event loop runs until
nothing is ready, unless the scenario explores its turns as well.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator

from treadle.core import block_budget
from treadle.core.messages import CancelReason, Constraint, Submit
from treadle.engine.admission import AdmissionLimits
from treadle.engine.client import EngineClient
from treadle.engine.generation import Generation
from treadle.engine.timeouts import Timeouts
from treadle.errors import (
    Busy,
    EngineUnavailable,
    ServerStopping,
)

from .callers import (
    CONTEXT,
    DEATHS,
    HANG_AFTER_S,
    MAX_WAIT_S,
    START_TIMEOUT_S,
    WAITS_S,
    Caller,
    Ends,
    NotEnabled,
    Scenario,
)
from .fingerprint import fingerprint
from .owner import ModelOwner, state_of
from .turns import TurnLoop


class World:
    """See the module. `trail` are the actions so far."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.shape, self.slots, self.thread = scenario.shape, scenario.slots, scenario.thread
        self.lookahead, self.context = scenario.shape.lookahead, CONTEXT
        self.launch_fails = False
        self.poisoned = 0  # engines that a poison took down
        self._growth, block_budget.EXPECTED_TOKENS = block_budget.EXPECTED_TOKENS, scenario.growth
        self.events = TurnLoop()  # type: ignore[abstract]
        asyncio._set_running_loop(self.events)
        self.trail: list[str] = []
        self.spent: Counter[str] = Counter()
        self.owners: list[ModelOwner] = []
        self.callers = {ask.name: Caller(ask) for ask in scenario.asks}
        self.ends = Ends()
        self.stopping: asyncio.Task[None] | None = None
        self.names: dict[str, str] = {}
        self.draining = False
        self.client = EngineClient(
            self._launch,
            AdmissionLimits(scenario.slots, scenario.waiting, MAX_WAIT_S),
            Timeouts(hang_after_s=HANG_AFTER_S, start_timeout_s=START_TIMEOUT_S),
            observers=(self.ends,),
            clock=self.clock,
        )
        if (quarantine := getattr(self.client.dispatch, "quarantine", None)) is not None:
            quarantine._key = bytes(32)  # the same in all worlds
        self.client.begin()
        self.events.settle()
        self.do("load", quietly=True)
        self.do("hear", quietly=True)

    def clock(self) -> float:
        return self.events.now

    def poison(self, request: Submit) -> bool:
        return self.names.get(request.id, "").split(".")[0] in {ask.name for ask in self.scenario.asks if ask.poison}

    def _launch(self) -> ModelOwner:
        self.owners.append(ModelOwner(self))
        return self.owners[-1]

    @property
    def owner(self) -> ModelOwner:
        return self.owners[-1]

    def close(self) -> None:
        """Unwind everything that waits."""
        self.events.close()
        asyncio._set_running_loop(None)
        block_budget.EXPECTED_TOKENS = self._growth

    # Actions -----------------------------------------------------------------------------------------------------

    def enabled(self) -> list[str]:
        """What may happen now. Troubles as long as their budget lasts."""
        return [*self._plain(), *self._troubles()]

    def _plain(self) -> Iterator[str]:
        """What happens in every server."""
        if self.events.ready:
            yield "turn"
        owner = self.owner
        if owner.talks:
            yield "hear"
        if owner.loading:
            yield "load"
        if owner.dead and not owner.gone and not owner.talks and owner.started:
            yield "exit"
        if owner.serving and owner.loop is not None:
            first = 1 if owner.sleeps else 0
            for arrive in range(first, len(owner.inbound) + 1):
                yield f"step {arrive}"
            yield from (f"compile {grammar}" for grammar in owner.pending)
        for caller in self.callers.values():
            yield from self._moves(caller)

    def _moves(self, caller: Caller) -> Iterator[str]:
        name = caller.ask.name
        if caller.reservation is None:
            if not caller.refused or self.client.health().ready:
                yield f"reserve {name}"
            return
        if caller.left:
            return
        if not caller.submitted:
            yield f"submit {name}"
        yield f"leave {name}"

    def _troubles(self) -> Iterator[str]:
        owner = self.owner
        for caller in self.callers.values():
            for label, generation in caller.generations.items():
                if not generation.ended and label not in caller.taken_back and not caller.left:
                    yield from self._afford("cancel", f"cancel {label}")
                    yield from self._afford("match", f"match {label}")
        if owner.serving and owner.loop is not None:
            for arrive in range(len(owner.inbound) + 1):
                for fault in ("raises", "raises late", "breaks"):
                    yield from self._afford(fault, f"step {arrive} {fault}")
                if self._may("fails"):
                    for label in self._labels():
                        yield f"step {arrive} fails {label}"
        if not self.thread and owner.started and not owner.dead:
            for how in DEATHS:
                yield from self._afford(how, how)
                if owner.outbox._messages:
                    yield from self._afford(how, f"{how} told")
        if owner.loading:
            yield from self._afford("badstart", "badstart")
        if not self.launch_fails:
            yield from self._afford("nolaunch", "nolaunch")
        yield from self._afford("short", "wait short")
        yield from self._afford("long", "wait long")
        yield from self._afford("freeze", "freeze")
        if self.stopping is None:
            yield from self._afford("stop", "stop")
            if not self.draining:
                yield from self._afford("drain", "drain")

    def _may(self, kind: str) -> bool:
        return self.spent[kind] < self.scenario.budget.get(kind, 0)

    def _afford(self, kind: str, action: str) -> Iterator[str]:
        if self._may(kind):
            yield action

    def _labels(self) -> list[str]:
        return [
            label
            for caller in self.callers.values()
            for label, generation in caller.generations.items()
            if not generation.ended
        ]

    def do(self, action: str, *, quietly: bool = False) -> None:
        """Perform `action`. Raises NotEnabled where it is not possible or comes to nothing, and Violation."""
        verb, _, rest = action.partition(" ")
        perform = getattr(self, f"_do_{verb}", None)
        if perform is None:
            raise NotEnabled(action)
        perform(*rest.split())
        if not (self.scenario.turns and verb != "turn") or quietly:
            self.events.settle()
        if not quietly:
            self.trail.append(action)

    def _spend(self, kind: str, *, possible: bool = True) -> None:
        if not possible or not self._may(kind):
            raise NotEnabled(kind)
        self.spent[kind] += 1

    def _caller(self, name: str) -> Caller:
        if name not in self.callers:
            raise NotEnabled(name)
        return self.callers[name]

    def _do_turn(self) -> None:
        if not self.events.ready:
            raise NotEnabled("turn")
        self.events.turn()

    # The process

    def _do_hear(self) -> None:
        if not self.owner.talks:
            raise NotEnabled("hear")
        self.owner.say_next()

    def _do_load(self) -> None:
        if not self.owner.loading:
            raise NotEnabled("load")
        self.owner.load()

    def _do_exit(self) -> None:
        owner = self.owner
        if not owner.dead or owner.gone or owner.talks:
            raise NotEnabled("exit")
        owner.exit()

    def _do_compile(self, grammar: str) -> None:
        if not self.owner.serving or grammar not in self.owner.pending:
            raise NotEnabled("compile")
        self.owner.compile(grammar)

    def _do_step(self, arrive: str, *fault: str) -> None:
        owner = self.owner
        if not owner.serving or int(arrive) > len(owner.inbound):
            raise NotEnabled("step")
        if not fault:
            owner.step(int(arrive))
            return
        what = " ".join(fault)
        self._spend(fault[0] if fault[0] == "fails" else what)
        if fault[0] == "fails":
            generation = self._generation(fault[1])
            what = f"fails {generation.id}"
        if not owner.step(int(arrive), what):
            raise NotEnabled(what)

    def _do_die(self, told: str = "", how: str = "die") -> None:
        self._spend(how, possible=self.owner.started and not self.owner.dead and not self.thread)
        self.owner.die(DEATHS[how], told=bool(told))

    def _do_crash(self, told: str = "") -> None:
        self._do_die(told, "crash")

    def _do_badstart(self) -> None:
        self._spend("badstart", possible=self.owner.loading)
        self.owner.fail_to_load()

    def _do_nolaunch(self) -> None:
        self._spend("nolaunch", possible=not self.launch_fails)
        self.launch_fails = True

    # Time

    def _do_wait(self, which: str) -> None:
        """Time passes, but no longer than until an owner is killed: its end comes before the grace for it is over."""
        owner = self.owner
        ends = bool(owner.dead) and not owner.gone
        self._spend(which, possible=not ends or which == "short")
        end = self.clock() + WAITS_S[which]
        while (due := self.events.due()) is not None and due <= end and (ends or not self._is_ending()):
            self.events.advance(due - self.clock())
            self.events.settle()
        if ends or not self._is_ending():
            self.events.advance(end - self.clock())

    def _is_ending(self) -> bool:
        return bool(self.owner.dead) and not self.owner.gone

    def _do_freeze(self) -> None:
        """This process stands still, and the owner with it; all timers are late."""
        self._spend("freeze", possible=self.scenario.frozen_ends or not self._is_ending())
        for caller in self.callers.values():
            caller.frozen = caller.reservation is not None
        self.events.advance(WAITS_S["long"], at_once=True)

    # Clients

    def _do_reserve(self, name: str) -> None:
        caller = self._caller(name)
        if caller.reservation is not None:
            raise NotEnabled(name)
        ask, caller.reserved = caller.ask, self.clock()
        try:
            caller.reservation = self.client.reserve(
                rows=ask.rows,
                prompt_tokens=ask.rows * ask.prompt,
                completion_tokens=ask.tokens,
                kind=name,
                tag=name,
            )
        except (Busy, EngineUnavailable, ServerStopping) as error:
            if caller.refused == type(error).__name__:
                raise NotEnabled("refused again") from None
            caller.refused = type(error).__name__

    def _do_submit(self, name: str) -> None:
        caller = self._caller(name)
        if caller.reservation is None or caller.submitted or caller.left:
            raise NotEnabled(name)
        caller.submitted, caller.submitted_at = True, self.clock()
        ask = caller.ask
        requests = [
            Submit(
                id="",
                prompt=tuple(sum(map(ord, name)) + 10 * i + k for k in range(ask.prompt)),
                max_tokens=ask.tokens,
                constraint=Constraint(kind="lark", grammar=ask.grammar) if ask.grammar else None,
            )
            for i in range(ask.rows)
        ]
        try:
            generations = caller.reservation.submit(requests)
        except (EngineUnavailable, ServerStopping) as error:
            caller.refused = type(error).__name__
            self._do_leave(name)
            return
        for label, generation in zip(ask.labels, generations, strict=True):
            self.names[generation.id] = label
            self.names[generation.request.group] = name
            caller.generations[label] = generation
            caller.tokens[label] = []
            self.events.create_task(caller.read(label, generation))

    def _do_leave(self, name: str) -> None:
        caller = self._caller(name)
        if caller.reservation is None or caller.left:
            raise NotEnabled(name)
        caller.left = True
        caller.taken_back |= {label for label, g in caller.generations.items() if not g.ended}
        caller.reservation.__exit__(None, None, None)

    def _generation(self, label: str) -> Generation:
        generation = self._caller(label.split(".")[0]).generations.get(label)
        if generation is None or generation.ended:
            raise NotEnabled(label)
        return generation

    def _do_cancel(self, label: str) -> None:
        self._take_back("cancel", label, CancelReason.CLIENT)

    def _do_match(self, label: str) -> None:
        """A stop string is found."""
        self._take_back("match", label, CancelReason.STOP)

    def _take_back(self, kind: str, label: str, reason: CancelReason) -> None:
        generation, caller = self._generation(label), self._caller(label.split(".")[0])
        self._spend(kind, possible=label not in caller.taken_back and not caller.left)
        caller.taken_back.add(label)
        generation.cancel(reason)

    # The server

    def _do_drain(self) -> None:
        self._spend("drain", possible=not self.draining)
        self.draining = True
        self.client.drain()

    def _do_stop(self) -> None:
        self._spend("stop", possible=self.stopping is None)
        self._stop()

    def _stop(self) -> None:
        self.draining = True
        self.stopping = self.events.create_task(self.client.stop())

    # State -------------------------------------------------------------------------------------------------------

    def state(self) -> bytes:
        """The fingerprint."""
        return fingerprint(
            self.events.now,
            self.names,
            self.client,
            self.events,
            [state_of(owner) for owner in self.owners if not owner.gone],
            [caller.state() for caller in self.callers.values()],
            sorted(self.spent.items()),
            self.draining,
            self.launch_fails,
            self.poisoned,
            sorted(self.ends.finished_.items()),
        )
