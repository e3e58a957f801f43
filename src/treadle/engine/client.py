"""The engine as the fronts see it, on the event loop: reserve, submit, read, cancel; jobs; status and health.

Order of a request: `reserve` (before any work, refuses at once), `resize` (the exact size), `submit`, then each
`Generation`'s `admitted()` and deltas. Leaving the reservation's `with` block takes back whatever still lives; its
places come free with the engine's terminal events, or with the end of the last engine. A sequence outlives the engine
that computes it: `replay` sends it to the next one, unless `quarantine` refuses it from then on.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import msgspec

from ..core.finishes import cancelled
from ..core.forecast import Lease
from ..core.gate import Gate, GateLimits
from ..core.messages import (
    Cancel,
    CancelJob,
    CancelReason,
    Capabilities,
    FinishReason,
    FromOwner,
    JobDone,
    Output,
    RunJob,
    StepReport,
    Submit,
)
from ..core.refusals import Refusal
from ..core.virtual_queue import Arrival
from ..errors import EngineDied, EngineUnavailable, InvalidRequest, Quarantined, ServerStopping, TreadleError
from .deaths import Death
from .generation import Generation
from .handle import Launch
from .jobs import Jobs
from .observer import Observer
from .owner import kv_tokens
from .quarantine import EXPIRY_S, Quarantine, quarantined
from .queue_timeout import SLACK_S, enforce_queue_timeout
from .replay import Replay
from .status import status_of
from .supervisor import EngineState, Supervisor
from .suspects import Verdict
from .timeouts import Timeouts

log = logging.getLogger(__name__)

EXPECTED_COMPLETION = 1024  # tokens
USUAL_COMPLETION = 256  # tokens: an answer whose request names no lower limit, until answers have been seen


@dataclass(frozen=True)
class Admission:
    """Rows that may run and wait, and for how many seconds one may wait; with `by_forecast` only those may wait for
    whom a slot is expected within that time. See `Settings`."""

    max_running: int
    max_waiting: int
    max_wait_s: float
    by_forecast: bool = False


@dataclass(frozen=True)
class Health:
    """`live`: the process answers. `ready`: a request sent now would be taken, or refused for lack of room alone.
    `retry_after_s`: in how many seconds it is expected to be ready, where it is not."""

    live: bool
    ready: bool
    state: str
    reason: str = ""
    retry_after_s: float | None = None


class EngineClient:
    """One per server. Everything here is on the event loop, and nothing in it blocks."""

    def __init__(
        self,
        launch: Launch,
        admission: Admission,
        patience: Timeouts | None = None,
        *,
        observers: Sequence[Observer] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.capabilities: Capabilities | None = None
        self.admission = admission
        self.observers: list[Observer] = list(observers)
        self.report: StepReport | None = None
        self.jobs = Jobs(self._send_job)
        self.clock = clock
        limits = GateLimits(admission.max_running, admission.max_waiting, admission.max_wait_s)
        self.supervisor = Supervisor(launch, self, patience or Timeouts(), clock)
        self._away: TreadleError | None = EngineUnavailable("the engine is loading its model")
        self.gate = Gate(limits, self._away, self._tell_refused)
        self.gate.close(self._away, back_s=self.supervisor.outage.left_s, now=clock())
        self.quarantine = Quarantine(clock)
        self.replay = Replay(self._send_sequence, self._withdraw)
        self._live: dict[str, tuple[Generation, Lease]] = {}
        self._numbers = itertools.count(1)
        self._arrivals = itertools.count(1)
        self._owed: float | None = None
        self._restarts_told = 0
        self._draining = False
        self._left = asyncio.Event()

    # Life --------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the engine; returns when it is ready. Raises StartFailed."""
        await self.supervisor.start()

    def begin(self) -> None:
        """Start the engine and return at once; `supervisor` says how it goes."""
        self.supervisor.begin()

    def drain(self) -> None:
        """Take nothing new; what runs goes on (C3), but for trials of suspects whose clients have left."""
        self._draining = True
        for generation, _ in list(self._live.values()):
            if generation.ended and generation.cancelled is not None:
                self._cancel(generation, generation.cancelled)
        self.gate.close(ServerStopping("the server is shutting down and takes no new requests", retry_after_s=5.0))

    async def stop(self, grace_s: float = 5.0) -> None:
        """End the engine. Everyone who still waits or runs gets one terminal event."""
        self.drain()
        await self.supervisor.stop(grace_s)

    @property
    def busy(self) -> int:
        """Rows that have not ended."""
        return self.gate.rows

    async def idle(self) -> None:
        """Returns once no row is left."""
        while self.gate.rows:
            self._left.clear()
            await self._left.wait()

    # Requests ----------------------------------------------------------------------------------------------------

    def check_room(self, arrival: Arrival | None = None) -> None:
        """Refuse a request of which no more than `arrival` is known, where it could not come in. Raises like
        `reserve`."""
        self.gate.check_room(self.clock(), arrival)

    def reserve(
        self,
        *,
        rows: int,
        prompt_tokens: int,
        completion_tokens: int | None,
        least_tokens: int = 0,
        kind: str,
        tag: str,
        tenant: str = "",
        arrival: Arrival | None = None,
        prompts: int = 1,
    ) -> Reservation:
        """Room for `rows` sequences with about `prompt_tokens` in all and up to `completion_tokens` each (None: what
        the context leaves), of which `least_tokens` are sure to come. It counts against the share of `tenant`;
        `arrival`, whose tenant goes first, is what a refused client is recognised by when it comes back. The rows are
        those of `prompts` prompts. Decides at once.

        Raises Busy, or EngineUnavailable where an engine follows, with `retry_after_s` and `ticket`; ServerStopping
        with `retry_after_s`; InvalidRequest for what can't ever fit.
        """
        tokens = prompt_tokens + rows * self._completion(completion_tokens, prompt_tokens // rows)
        answer = self._answer_tokens(completion_tokens, least_tokens)
        service_s = self._service_s(prompt_tokens // rows, answer)
        certain = completion_tokens is not None and completion_tokens <= max(USUAL_COMPLETION, least_tokens)
        visit = self.gate.admit(
            rows=rows,
            tokens=tokens,
            now=self.clock(),
            service_s=service_s,
            certain=certain and service_s > 0,
            arrival=arrival or Arrival(tenant),
            prompts=prompts,
        )
        return Reservation(self, visit, kind=kind, tag=tag)

    def _completion(self, asked: int | None, prompt_tokens: int) -> int:
        """Tokens to reserve for one row's completion. Where rows that outgrow the cache can wait for others' ends, no
        more than EXPECTED_COMPLETION: few that ask for many get there."""
        can = self.capabilities
        left = max(1, can.context - prompt_tokens) if can else 1
        if can and can.kv_blocks:
            left = min(left, EXPECTED_COMPLETION)
        return left if asked is None else min(asked, left)

    def _service_s(self, prompt_tokens: int, answer_tokens: int) -> float:
        """How long a row is expected to hold its slot where all slots are taken, by the steps of the warm-up; 0 where
        those were not measured. In that time each slot gets a new prompt once."""
        can = self.capabilities
        if can is None:
            return 0.0
        prompts = self.admission.max_running * prompt_tokens
        return answer_tokens * can.decode_step_s + prompts * can.prompt_token_s

    def _answer_tokens(self, limit: int | None, least: int) -> int:
        """How long an answer is expected to be. A limit above a usual answer's length is a bound more often than a
        wish: the geometric mean of both is wrong by the same factor either way."""
        if limit is None:
            return max(USUAL_COMPLETION, least)
        expected = (
            limit if limit <= USUAL_COMPLETION else min(math.isqrt(limit * USUAL_COMPLETION), EXPECTED_COMPLETION)
        )
        return max(expected, min(least, limit))

    def _submit(self, request: Submit, visit: Lease, kind: str, tag: str) -> Generation:
        generation = Generation(request, kind=kind, tag=tag, now=self.clock(), cancel=self._cancel)
        self.replay.submit(generation)
        self._live[request.id] = (generation, visit)
        return generation

    def _send_sequence(self, generation: Generation) -> None:
        """To the owner that lives now, with what is left of its wait."""
        left_s = generation.submitted + generation.request.max_wait_s - self.clock()
        began = False
        if generation.sent:
            began = self._live[generation.id][1].began
            self._tell(lambda observer: observer.replayed())
        self._send(generation.resume(max(SLACK_S, left_s), group_began=began))

    def _cancel(self, generation: Generation, reason: CancelReason) -> None:
        """Take it back. A suspect's client is answered at once, and its trial goes on for its place: a poison that is
        sent and taken back again and again would else never be found."""
        if self.replay.accuses(generation) and not self._draining:
            self._answer(generation, reason)
        elif self.replay.holds(generation):
            self._answer(generation, reason)
            self._end_answered(generation)
        else:
            self._send(Cancel(id=generation.id, reason=reason))

    def _withdraw(self, generation: Generation) -> None:
        self._send(Cancel(id=generation.id))

    def _answer(self, generation: Generation, reason: CancelReason) -> None:
        """The terminal event for the caller, unless it had one."""
        if not generation.ended:
            generation.push(Output(id=generation.id, finish=cancelled(reason)), self.clock())

    def _check_harmless(self, requests: Sequence[Submit]) -> None:
        """Raises Quarantined where one of them took the engine down before."""
        distinct = {id(request.prompt): request for request in requests}  # choices of one prompt differ in their seeds
        try:
            for request in distinct.values():
                self.quarantine.check(request)
        except Quarantined:
            self.gate.refuse(Refusal.QUARANTINED)
            raise

    def _bound_wait(self, generations: Sequence[Generation], left_s: float) -> None:
        step_s = 0.0 if self.report is None else self.report.statistics.step_s
        enforce_queue_timeout(generations, left_s, step_s, self._refuse)

    def _refuse(self, generation: Generation) -> None:
        """End a wait that the owner did not end: it is away, says nothing, or is stuck in a step."""
        _, visit = self._live[generation.id]
        if self._away is not None:
            error = self.gate.postpone(visit, Refusal.ENGINE_UNAVAILABLE, self.clock())
        elif self._silent_since(generation.submitted):
            error = EngineUnavailable("the engine does not answer", retry_after_s=self.supervisor.hang_left_s())
            self.gate.refuse(Refusal.ENGINE_UNAVAILABLE)
        else:
            error = self.gate.postpone(visit, Refusal.WAIT_OVER, self.clock())
        self._turn_away(generation, FinishReason.EXPIRED.value, error)

    def _turn_away(self, generation: Generation, outcome: str, error: TreadleError) -> None:
        """Answer a sequence that has not begun with `error`. Its place comes free once no owner has it."""
        if self.replay.holds(generation):
            self._drop(generation, outcome, error)
        else:
            generation.cancel()
            generation.fail(error)

    def _silent_since(self, when: float) -> bool:
        """Whether the owner has said nothing since `when`, though nothing runs that would keep it in a step."""
        last = self.supervisor.last_beat
        if any(generation.started is not None for generation, _ in self._live.values()):
            return False
        return last is None or last < when

    def _leave(self, visit: Lease, outcome: str) -> None:
        self.gate.release(visit, outcome, self.clock())
        self._left.set()

    def _send_job(self, message: RunJob | CancelJob) -> None:
        if self._away is not None:
            raise type(self._away)(self._away.message, retry_after_s=self.supervisor.outage.left_s())
        self._send(message)

    def _send(self, message: Any) -> None:
        self.supervisor.send(message)
        if self.work_since() is None:
            self._owed = self.clock()

    def _tell(self, tell: Callable[[Observer], None]) -> None:
        """An observer that raises costs nobody an answer."""
        for observer in self.observers:
            try:
                tell(observer)
            except Exception:
                log.exception("an observer failed")

    def _tell_refused(self, reason: Refusal) -> None:
        self._tell(lambda observer: observer.refused(reason.value))

    # What the engine says ------------------------------------------------------------------------------------------

    def on_message(self, message: FromOwner) -> None:
        if isinstance(message, StepReport):
            self._on_step(message)
        else:
            assert isinstance(message, JobDone)
            self.jobs.done(message)
        if self.work_since() is None:
            self._owed = None

    def on_ready(self, capabilities: Capabilities) -> None:
        self.capabilities = capabilities
        self._away = None
        if self._restarts_told < self.supervisor.restarts:
            restart, held = self.supervisor.restarts, self.replay.held
            log.warning("the engine is ready again (restart %d); sequences that go on with it: %d", restart, held)
        while self._restarts_told < self.supervisor.restarts:  # more than one where starts have failed
            self._restarts_told += 1
            self._tell(lambda observer: observer.restarted())
        if not self._draining:
            self.gate.open_(self._limits(capabilities), self.clock())
        self.replay.back()

    def on_death(self, death: Death) -> int:
        self._owed = None
        self._tell(lambda observer: observer.died(death.cause.value))
        self.jobs.lost(EngineDied(f"the engine was lost while this job ran ({death.reason})"))
        live = [generation for generation, _ in self._live.values()]
        verdict = self.replay.died(death, live, self.clock())
        explained = 0 if verdict is None else self._judge(verdict, death)
        for generation, visit in list(self._live.values()):
            visit.interrupted = True
            if generation.begun:
                visit.began = True
            if generation.cancelled is not None:
                self._cancel(generation, generation.cancelled)
        return explained

    def _judge(self, verdict: Verdict, death: Death) -> int:
        """End the sequence at fault, and all like it; how many deaths that explains."""
        guilty, _ = self._live[verdict.id]
        if not verdict.proven:
            killed = "the engine was killed from outside each time it ran this request alone (SIGKILL: out of memory?)"
            log.error("request %s ends with engine_died: %s; %s", guilty.tag, killed, death.cause.hint)
            self._drop(guilty, "lost", EngineDied(killed))
            return verdict.deaths
        mark = self.quarantine.add(guilty.request)
        log.error(
            "request %s took the engine down and is quarantined (deaths: %d); it and the same request again get 422 "
            "request_quarantined, for %g min or until the server is restarted; report it with the lines above",
            guilty.tag,
            verdict.deaths,
            EXPIRY_S / 60,
        )
        self._tell(lambda observer: observer.quarantined())
        for generation, _ in list(self._live.values()):
            if self.quarantine.fingerprint(generation.request) == mark:
                self._drop(generation, "quarantined", quarantined())
        return verdict.deaths

    def on_away(self, waiting: EngineUnavailable) -> None:
        self._away = waiting
        if not self._draining:
            self.gate.close(waiting, back_s=self.supervisor.outage.left_s, now=self.clock())

    def on_lost(self, running: TreadleError, waiting: TreadleError) -> None:
        self._owed = None
        self._away = waiting
        if not self._draining:
            self.gate.close(waiting)
        self.jobs.lost(running)
        self.replay.drop_all()
        for generation, _ in list(self._live.values()):
            self._drop(generation, "lost", copy.copy(running if generation.runs else waiting))

    def _drop(self, generation: Generation, outcome: str, error: TreadleError) -> None:
        """End a sequence that no owner has, with `error`."""
        generation.fail(error)
        self._gone(generation, outcome)

    def _end_answered(self, generation: Generation) -> None:
        """Free the place of a sequence whose caller was answered before, and that no owner has."""
        _, visit = self._live[generation.id]
        self._gone(generation, _answered(generation, visit))

    def _gone(self, generation: Generation, outcome: str) -> None:
        """A sequence has ended: its place is free."""
        _, visit = self._live.pop(generation.id)
        self._leave(visit, outcome)
        total_s = self.clock() - visit.entered
        self._tell(lambda observer: observer.finished(generation.kind, outcome, total_s))
        self.replay.ended(generation)

    def work_since(self) -> float | None:
        return self._owed if self._live or self.jobs.pending else None

    def _on_step(self, report: StepReport) -> None:
        self.report = report
        now = self.clock()
        if self.capabilities is not None and self.capabilities.decode_step_s:
            self.gate.stepped(report.statistics.step_s / self.capabilities.decode_step_s)
        for output in report.outputs:
            entry = self._live.get(output.id)
            if entry is not None:
                self._on_output(*entry, output, now)
        if self.replay.trying:
            self.replay.progress(len(self._live) - self.replay.held)
        self._tell(lambda observer: observer.step(report))

    def _on_output(self, generation: Generation, visit: Lease, output: Output, now: float) -> None:
        if generation.ended:
            if self.replay.accuses(generation):
                generation.follow(output)
            if output.finish is not None:  # its caller was answered before: all that is left is its place
                self._end_answered(generation)
            return
        if output.admitted and generation.started is None:
            self._on_admitted(generation, visit, output.wait_s, now)
        if output.tokens:
            self._on_tokens(generation, len(output.tokens), now)
        generation.push(output, now)
        if output.finish is not None:
            if output.finish.reason is FinishReason.EXPIRED:  # while its visit still says what it asks for
                generation.expired(self.gate.postpone(visit, Refusal.WAIT_OVER, now))
            self._gone(generation, output.finish.reason.value)

    def _on_admitted(self, generation: Generation, visit: Lease, wait_s: float, now: float) -> None:
        self.gate.started(visit, wait_s, now)
        self._tell(lambda observer: observer.admitted(generation.kind, wait_s))

    def _on_tokens(self, generation: Generation, count: int, now: float) -> None:
        last, generation.last_token = generation.last_token, now
        if last is None:
            self._tell(lambda observer: observer.first_token(generation.kind, now - generation.submitted))
        else:
            self._tell(lambda observer: observer.tokens(generation.kind, count, now - last))

    def _limits(self, can: Capabilities) -> GateLimits:
        """The gate's limits: what runs fits the cache, and what waits is as much again per place."""
        running, waiting = self.admission.max_running, self.admission.max_waiting
        held = kv_tokens(can, running)
        return GateLimits(
            running=running,
            waiting=waiting,
            max_wait_s=self.admission.max_wait_s,
            tokens=held + held * waiting // running,
            by_forecast=self.admission.by_forecast,
        )

    # What it says of itself ------------------------------------------------------------------------------------------

    def health(self) -> Health:
        """Cheap, and true: `ready` only while the engine takes work and its steps go on (C4)."""
        state = self.supervisor.state
        back_s = None if state in (EngineState.READY, EngineState.FAILED) else self.supervisor.outage.left_s()
        if self._draining and state is EngineState.READY:
            return Health(live=True, ready=False, state="draining", reason="the server is shutting down")
        reason = self.supervisor.told or ("" if state is EngineState.READY else self.supervisor.stage)
        ready = state is EngineState.READY
        return Health(live=True, ready=ready, state=state.value, reason=reason, retry_after_s=back_s)

    def status(self) -> dict[str, Any]:
        """Plain values for `/v1/status` (D3): admission, requests, engine. Needs nothing of the engine."""
        return status_of(self, [generation for generation, _ in self._live.values()])


class Reservation:
    """Room that a client request holds. Use as `with client.reserve(...) as reservation:`."""

    def __init__(self, client: EngineClient, visit: Lease, *, kind: str, tag: str) -> None:
        self._client = client
        self._visit = visit
        self._kind = kind
        self._tag = tag
        self._unused = visit.rows
        self._generations: list[Generation] = []
        self._displaced: TreadleError | None = None
        visit.give_way = self._give_way

    def resize(self, *, prompt_tokens: int, completion_tokens: int | None = None) -> None:
        """The exact size, once it is known: prompt tokens over all rows, completion tokens over all rows (None: as
        reserved). Raises Busy when it no longer fits, InvalidRequest when it never can."""
        rows = self._visit.rows
        completion = rows * self._client._completion(None, prompt_tokens // rows)
        if completion_tokens is not None:
            can = self._client.capabilities
            completion = min(completion_tokens, completion) if can and can.kv_blocks else completion_tokens
        tokens = prompt_tokens + completion
        client = self._client
        client.gate.resize(self._visit, tokens=tokens, now=client.clock())

    def submit(self, requests: Sequence[Submit]) -> list[Generation]:
        """Send the sequences to the engine; ids, group and the time left to wait are filled in.

        Raises EngineUnavailable or ServerStopping when the engine went away since `reserve`, Quarantined for a request
        that took the engine down before, and Busy when the place was given to a tenant that holds less.
        """
        client = self._client
        if self._displaced is not None:
            raise self._displaced
        if len(requests) > self._unused:
            raise InvalidRequest(f"{len(requests)} sequences, but {self._unused} were reserved")
        client.gate.check_open(client.clock(), self._visit)
        client._check_harmless(requests)
        group = f"{next(client._numbers):x}"
        waited_s = client.clock() - self._visit.entered
        left_s = max(0.0, self._visit.max_wait_s - waited_s)
        for i, request in enumerate(requests):
            request = msgspec.structs.replace(
                request,
                id=f"{group}.{i}",
                group=group,
                max_wait_s=left_s,
                tenant=self._visit.arrival.tenant,
                arrival=next(client._arrivals),
            )
            self._generations.append(client._submit(request, self._visit, self._kind, self._tag))
            self._unused -= 1
        client._bound_wait(self._generations, left_s)
        return self._generations

    def cancel(self, reason: CancelReason = CancelReason.CLIENT) -> None:
        """Take back everything that still lives."""
        for generation in self._generations:
            generation.cancel(reason)

    def _give_way(self, error: TreadleError) -> None:
        """End the wait of all rows with `error`. Their places come free with the engine's terminal events."""
        self._displaced = error
        for generation in self._generations:
            self._client._turn_away(generation, Refusal.DISPLACED.value, copy.copy(error))

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.cancel()
        for _ in range(self._unused):
            self._client._leave(self._visit, "unused")
        self._unused = 0


def _answered(generation: Generation, visit: Lease) -> str:
    """The outcome of a sequence whose caller was answered, or turned away, before its end came."""
    if generation.finish is not None:
        return generation.finish.reason.value
    return Refusal.DISPLACED.value if visit.displaced else FinishReason.EXPIRED.value
