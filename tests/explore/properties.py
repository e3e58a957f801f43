"""What must hold in each state, and how each state must be able to end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tests.core.drive import expected
from treadle.engine.status import status_of
from treadle.engine.supervisor import MAX_FAILED_STARTS, EngineState
from treadle.errors import TreadleError

from .callers import REPLAYS, Ask, Caller
from .owner import BAD, ModelOwner, Violation, require
from .world import World

ROUNDS = 400
LONGEST_S = 120.0
"""Of simulated time, in which a fair continuation ends: a hang, three restarts with their back-offs, two waits."""
FAIR, HANGS, STOPS = "", "the owner hangs from there on", "the owner hangs from there on, and the server stops"
PROBE = Ask("probe", tokens=1)


def check(world: World) -> None:
    """The state is as it should be. Raises Violation."""
    _no_errors(world)
    _gate_tells_the_truth(world)
    _restarts_have_causes(world)
    for caller in world.callers.values():
        for label in caller.ends:
            _end_is_allowed(world, caller, label)
    if not world.events.ready:
        _callers_are_told(world)
        _ready_tells_the_truth(world)


def _no_errors(world: World) -> None:
    for task in world.events.tasks:
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            if isinstance(error, Violation):
                raise error
            raise Violation(f"a task ended with {error!r}") from error
    require(not world.events.errors, f"a callback raised: {world.events.errors}")


def _gate_tells_the_truth(world: World) -> None:
    rows = tokens = 0
    for caller in world.callers.values():
        if caller.reservation is None:
            continue
        ended = world.ends.finished_[caller.ask.name]
        require(ended <= caller.ask.rows, f"{caller.ask.name} ended {ended} times")
        held = caller.ask.rows - ended if caller.generations or not caller.left else 0
        rows += held
        tokens += held * (caller.ask.prompt + caller.ask.tokens)
    gate = world.client.gate
    require(gate.rows == rows, f"the gate counts {gate.rows} rows, and there are {rows}")
    require(gate.tokens == tokens, f"the gate counts {gate.tokens} tokens, and there are {tokens}")


def _restarts_have_causes(world: World) -> None:
    spent, supervisor = world.spent, world.client.supervisor
    poison = any(ask.poison for ask in world.scenario.asks)
    require(
        not supervisor.restarts or poison or any(spent[cause] for cause in LOSSES),
        f"the engine was restarted without a cause: {supervisor.reason}",
    )
    if supervisor.state is EngineState.FAILED:
        given_up = sum(spent[cause] for cause in LOSSES) >= MAX_FAILED_STARTS or world.thread or poison
        require(given_up, f"the engine was given up: {supervisor.reason}")


LOSSES = ("die", "crash", "breaks", "long", "badstart", "nolaunch", "hang")
ENDS: dict[str, tuple[str, ...]] = {
    "Busy": ("short", "long", "freeze", *LOSSES),
    "EngineUnavailable": ("short", "freeze", *LOSSES) if REPLAYS else LOSSES,
    "EngineDied": LOSSES,
    "ServerStopping": ("stop",),
    "StepFailed": ("raises", "raises late", "fails"),
    "Quarantined": LOSSES,
}
"""Why a request may end without its tokens, by the error it gets."""


def _end_is_allowed(world: World, caller: Caller, label: str) -> None:
    end, spent = caller.ends[label], world.spent
    if caller.ask.grammar == BAD:
        require(end != "done", f"{label} ran without its grammar")
        if end == "InvalidGrammar":
            return
    if end == "done" or (end == "RequestCancelled" and label in caller.taken_back):
        return
    if end == "ServerStopping" and spent["drain"] and not spent["stop"]:
        end = "EngineUnavailable"  # its wait ended with the engine away: a later one would be refused as well
    if end == "StepFailed":
        twice = spent["raises"] + spent["raises late"] >= 2
        require(twice or bool(spent["fails"]), f"{label} is failed for one step that raised")
    if end in ("EngineDied", "Quarantined") and not world.scenario.deaths_end:
        _is_given_up(world, caller, label)
    poison = any(ask.poison for ask in world.scenario.asks)
    lost = poison and end in ("EngineDied", "EngineUnavailable", "Quarantined")
    require(lost or any(spent[cause] for cause in ENDS.get(end, ())), f"{label} ends with {end} without a cause")


def _is_given_up(world: World, caller: Caller, label: str) -> None:
    """Where requests outlive engines, one ends with a death only if it may be at fault, or if no engine follows."""
    crashes = sum(world.spent[cause] for cause in ("crash", "breaks", "long", "hang"))
    crashes += any(ask.poison for ask in world.scenario.asks)
    failed = world.client.supervisor.state is EngineState.FAILED
    may_be = caller.ask.poison or crashes >= 2 or failed
    require(may_be, f"{label} ends with {caller.ends[label]}, and was in {crashes} crashes")


def _callers_are_told(world: World) -> None:
    for caller in world.callers.values():
        for label, generation in caller.generations.items():
            require(generation.ended == (label in caller.ends), f"{label} has ended, and its caller is not told")


def _ready_tells_the_truth(world: World) -> None:
    client = world.client
    health = client.health()
    try:
        client.gate.check_open(world.clock())
    except TreadleError:
        taken = False
    else:
        taken = True
    require(health.ready == taken, f"ready is {health.ready}, and a request is taken: {taken}")
    owner = world.owner
    require(not health.ready or (owner.started and not owner.gone), "ready, and there is no engine")


# Ends ---------------------------------------------------------------------------------------------------------------


def complete(world: World, how: str = FAIR) -> None:
    """Bring everything to its end: messages arrive, steps go on, time passes where nothing else can happen. Then
    nothing is left, a new request is served, and the server stops. With HANGS the owner of now does not move again;
    with STOPS neither, and the server is stopped at once. Raises Violation."""
    stuck = None if how == FAIR else world.owner
    world.spent["hang"] += how != FAIR
    began = world.clock()
    if how == STOPS and world.stopping is None:
        world.spent["stop"] += 1
        world._stop()
    _run(world, lambda: _submitted_have_ended(world) and _at_rest(world), stuck)
    _leave(world)
    _run(world, lambda: not world.client.busy and _at_rest(world), stuck)
    took = world.clock() - began
    require(took <= LONGEST_S, f"it takes {took:.0f} s until everyone has ended")
    _nothing_is_left(world, stuck)
    if world.client.health().ready:
        found = world.client.dispatch.quarantine.condemned > 0 or not world.poisoned
        require(found, f"a poison took {world.poisoned} engines down, and is not refused")
        _serves(world, stuck)
    _stops(world, stuck)


def _run(world: World, over: Callable[[], bool], stuck: ModelOwner | None) -> None:
    for _ in range(ROUNDS):
        world.events.settle()
        check(world)
        if not _happens(world, stuck):
            if over():
                return
            due = world.events.due()
            if due is None:
                raise Violation(f"nothing can happen any more, and not everything has ended: {_left(world)}")
            world.events.advance(max(0.0, due - world.clock()))
    raise Violation(f"no end within {ROUNDS} rounds: {_left(world)}")


def _happens(world: World, stuck: ModelOwner | None) -> bool:
    """Do what can be done without time; whether there was anything."""
    owner = world.owner
    if owner.talks:
        owner.say_next()
    elif owner.loading and owner is not stuck:
        owner.load()
    elif owner.dead and not owner.gone and owner.started:
        owner.exit()
    elif owner is not stuck and owner.serving and owner.loop is not None and (owner.inbound or not owner.sleeps):
        owner.step(len(owner.inbound))
    elif owner is not stuck and owner.serving and owner.pending:
        owner.compile(owner.pending[0])
    else:
        return _submit_next(world)
    return True


def _submit_next(world: World) -> bool:
    for caller in world.callers.values():
        if caller.reservation is not None and not caller.submitted and not caller.left:
            world._do_submit(caller.ask.name)
            return True
    return False


def _submitted_have_ended(world: World) -> bool:
    return all(generation.ended for caller in world.callers.values() for generation in caller.generations.values())


def _at_rest(world: World) -> bool:
    """The engine neither starts nor dies, and owes nothing."""
    state = world.client.supervisor.state
    if state in (EngineState.STARTING, EngineState.RESTARTING, EngineState.STOPPING):
        return False
    return world.stopping is None or world.stopping.done()


def _leave(world: World) -> None:
    for caller in world.callers.values():
        if caller.reservation is not None and not caller.left:
            world._do_leave(caller.ask.name)


def _nothing_is_left(world: World, stuck: ModelOwner | None) -> None:
    client = world.client
    require(client.busy == 0, f"{client.busy} rows are left in the gate")
    require(client.gate.tokens == 0, f"{client.gate.tokens} tokens are left in the gate")
    require(not status_of(client)["requests"], "requests are left in the status")
    for caller in world.callers.values():
        if caller.generations:
            ended = world.ends.finished_[caller.ask.name]
            require(ended == caller.ask.rows, f"of {caller.ask.name} {ended} rows of {caller.ask.rows} have ended")
            require(caller.ends.keys() == caller.generations.keys(), f"{caller.ask.name} waits for an end")
    owner = world.owner
    if owner is not stuck and owner.loop is not None and owner.runner is not None:
        require(not owner.loop.scheduler.has_work, "the scheduler has work of nobody")
        require(not owner.runner.rows, "the runner has rows of nobody")


def _serves(world: World, stuck: ModelOwner | None) -> None:
    """A server that says it is ready serves who comes now; one whose engine is stuck ends it in time."""
    world.client.gate._virtual_queue.sweep(world.clock() + LONGEST_S)  # nobody who was refused comes back here
    caller = world.callers["probe"] = Caller(PROBE)
    world._do_reserve("probe")
    require(caller.reservation is not None, f"ready, and a request is refused: {caller.refused}")
    world._do_submit("probe")
    _run(world, lambda: _submitted_have_ended(world) and not world.client.busy and _at_rest(world), stuck)
    end = caller.ends["probe.0"]
    if world.owner is not stuck and not world.spent["hang"]:
        require(end == "done", f"a request to a ready server ends with {end}")
        whole = expected(caller.generations["probe.0"].request)[0]
        require(tuple(caller.tokens["probe.0"]) == whole, "a request to a ready server lacks tokens")
    _leave(world)


def _stops(world: World, stuck: ModelOwner | None) -> None:
    if world.stopping is None:
        world.spent["stop"] += 1
        world._stop()
    _run(world, lambda: _at_rest(world), stuck)
    state = world.client.supervisor.state
    require(state in (EngineState.STOPPED, EngineState.FAILED), f"stopped, and the engine is {state.value}")
    owner = world.owner
    ended = owner.gone or not owner.started or (world.thread and owner is stuck)
    require(ended, "stopped, and the engine lives")
    waits = [task for task in world.events.tasks if not task.done()]
    require(not waits, f"stopped, and tasks wait: {waits}")
    _nothing_is_left(world, stuck)


def _left(world: World) -> str:
    waits = [label for caller in world.callers.values() for label, g in caller.generations.items() if not g.ended]
    tasks = [task.get_name() for task in world.events.tasks if not task.done() and not isinstance(task, asyncio.Future)]
    return f"requests {waits}, engine {world.client.supervisor.state.value}, tasks {tasks}"
