"""Live sequences: submitted to the owner, cancelled, given the outputs of its steps, and ended.

A sequence outlives the owner that computes it: `replay` sends it to the next one, unless `quarantine` refuses it from
then on. Its place at the gate is freed by the owner's terminal event, or with the end of the last owner.
"""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from ..core.finishes import cancelled
from ..core.forecast import Lease
from ..core.messages import Cancel, CancelReason, FinishReason, Output, StepReport, Submit
from ..core.refusals import Refusal
from ..errors import EngineDied, EngineUnavailable, Quarantined, TreadleError
from .admission import Admission
from .deaths import Death
from .generation import Generation
from .observer import Observers
from .quarantine import EXPIRY_S, Quarantine, quarantined
from .queue_timeout import SLACK_S, enforce_queue_timeout
from .replay import Replay
from .supervisor import Supervisor
from .suspects import Verdict

log = logging.getLogger(__name__)


class Dispatch:
    """The sequences of one engine client. Lives on the event loop. `send` takes messages for the owner; `away` is the
    error of waiting sequences while there is no owner, None while there is one."""

    def __init__(
        self,
        admission: Admission,
        supervisor: Supervisor,
        send: Callable[[Any], None],
        observers: Observers,
        clock: Callable[[], float],
        away: TreadleError,
    ) -> None:
        self.away: TreadleError | None = away
        self.report: StepReport | None = None
        self.quarantine = Quarantine(clock)
        self.replay = Replay(self._send_sequence, self._withdraw)
        self._admission = admission
        self._supervisor = supervisor
        self._send = send
        self._observers = observers
        self._clock = clock
        self._live: dict[str, tuple[Generation, Lease]] = {}
        self._groups = itertools.count(1)
        self._arrivals = itertools.count(1)

    def __len__(self) -> int:
        return len(self._live)

    @property
    def generations(self) -> list[Generation]:
        """All live sequences, in the order of their submission."""
        return [generation for generation, _ in self._live.values()]

    # From reservations -----------------------------------------------------------------------------------------------

    def check(self, requests: Sequence[Submit], lease: Lease) -> None:
        """Raise EngineUnavailable or ServerStopping while the gate is closed, Quarantined if one of `requests` took the
        engine down before."""
        self._admission.gate.check_open(self._clock(), lease)
        self.check_quarantine(requests)

    def check_next(self, request: Submit, lease: Lease) -> None:
        """Raise the same for one of the upcoming sequences of a request that has begun. A server that drains lets those
        end."""
        if self.away is not None:
            self.check([request], lease)
        self.check_quarantine([request])

    def check_quarantine(self, requests: Sequence[Submit]) -> None:
        """Raise Quarantined if one of `requests` took the engine down before."""
        distinct = {id(request.prompt): request for request in requests}  # choices of one prompt differ in their seeds
        try:
            for request in distinct.values():
                self.quarantine.check(request)
        except Quarantined:
            self._admission.gate.refuse(Refusal.QUARANTINED)
            raise

    def wait_left_s(self, lease: Lease) -> float:
        """Seconds for which sequences of `lease` may still wait for a slot."""
        return max(0.0, lease.max_wait_s - (self._clock() - lease.entered))

    def group(self, requests: Sequence[Submit], lease: Lease, left_s: float) -> Iterator[Submit]:
        """`requests` as one group of sequences, with ids and numbers of arrival, which may wait for `left_s` seconds
        each."""
        group = f"{next(self._groups):x}"
        for i, request in enumerate(requests):
            yield msgspec.structs.replace(
                request,
                id=f"{group}.{i}",
                group=group,
                max_wait_s=left_s,
                tenant=lease.arrival.tenant,
                arrival=next(self._arrivals),
            )

    def submit(self, request: Submit, lease: Lease, kind: str, tag: str) -> Generation:
        """Send one sequence to the owner, at once or after the trial of a suspect."""
        generation = Generation(request, kind=kind, tag=tag, now=self._clock(), cancel=self._cancel)
        self.replay.submit(generation)
        self._live[request.id] = (generation, lease)
        return generation

    def enforce_queue_timeout(self, generations: Sequence[Generation], left_s: float) -> None:
        """End the wait of `generations`, one group, after `left_s` where the owner does not."""
        step_s = 0.0 if self.report is None else self.report.statistics.step_s
        enforce_queue_timeout(generations, left_s, step_s, self._refuse)

    def turn_away(self, generation: Generation, outcome: str, error: TreadleError) -> None:
        """Answer a sequence that has not begun with `error`. Its place is freed once no owner has it."""
        if self.replay.is_held(generation):
            self._drop(generation, outcome, error)
        else:
            generation.cancel()
            generation.fail(error)

    # From the owner ------------------------------------------------------------------------------------------------

    def step(self, report: StepReport) -> None:
        """Hand the outputs of a step to their generations."""
        self.report = report
        now = self._clock()
        gained = [len(output.tokens) for output in report.outputs if output.tokens]
        self._admission.stepped(report.statistics.step_s, sum(gained) / len(gained) if gained else 1.0)
        for output in report.outputs:
            entry = self._live.get(output.id)
            if entry is not None:
                self._on_output(*entry, output, now)
        if self.replay.trying:
            self.replay.progress(len(self._live) - self.replay.held)
        self._observers.tell(lambda observer: observer.step(report))

    def resume(self) -> None:
        """Send what was held back, now that an owner is ready."""
        self.away = None
        self.replay.on_ready()

    def died(self, death: Death) -> int:
        """Hold back all sequences after the owner's death, and end the one that caused it, if it is found. Returns the
        number of deaths explained."""
        verdict = self.replay.died(death, self.generations, self._clock())
        explained = 0 if verdict is None else self._judge(verdict, death)
        for generation, lease in list(self._live.values()):
            lease.interrupted = True
            if generation.may_have_run:
                lease.began = True
            if generation.cancelled is not None:
                self._cancel(generation, generation.cancelled)
        return explained

    def lost(self, running: TreadleError, waiting: TreadleError) -> None:
        """End all sequences: no other owner will follow. `running` is the error of those that ran."""
        self.away = waiting
        self.replay.clear()
        for generation in self.generations:
            self._drop(generation, "lost", copy.copy(running if generation.runs else waiting))

    def drain(self) -> None:
        """End trials of suspects whose clients have left."""
        for generation in self.generations:
            if generation.ended and generation.cancelled is not None:
                self._cancel(generation, generation.cancelled)

    # Sending and cancelling ------------------------------------------------------------------------------------------

    def _send_sequence(self, generation: Generation) -> None:
        """Send a sequence to the present owner, with the rest of its waiting time."""
        left_s = generation.submitted + generation.request.max_wait_s - self._clock()
        began = False
        if generation.times_sent:
            began = self._live[generation.id][1].began
            self._observers.tell(lambda observer: observer.replayed())
        self._send(generation.resume(max(SLACK_S, left_s), group_began=began))

    def _cancel(self, generation: Generation, reason: CancelReason) -> None:
        """Cancel a sequence. A suspect's client is answered at once, and its trial goes on: otherwise a poison that is
        sent and cancelled again and again would never be found."""
        if self.replay.is_suspect(generation) and not self._admission.draining:
            self._answer(generation, reason)
        elif self.replay.is_held(generation):
            self._answer(generation, reason)
            self._end_answered(generation)
        else:
            self._send(Cancel(id=generation.id, reason=reason))

    def _withdraw(self, generation: Generation) -> None:
        self._send(Cancel(id=generation.id))

    def _answer(self, generation: Generation, reason: CancelReason) -> None:
        """Give the caller its terminal event, unless it had one."""
        if not generation.ended:
            generation.push(Output(id=generation.id, finish=cancelled(reason)), self._clock())

    def _refuse(self, generation: Generation) -> None:
        """End a wait that the owner did not end: it is away, silent, or stuck in a step."""
        _, lease = self._live[generation.id]
        gate, now = self._admission.gate, self._clock()
        if self.away is not None:
            error = gate.postpone(lease, Refusal.ENGINE_UNAVAILABLE, now)
        elif self._silent_since(generation.submitted):
            error = EngineUnavailable("the engine does not answer", retry_after_s=self._supervisor.hang_left_s())
            gate.refuse(Refusal.ENGINE_UNAVAILABLE)
        else:
            error = gate.postpone(lease, Refusal.WAIT_OVER, now)
        self.turn_away(generation, FinishReason.EXPIRED.value, error)

    def _silent_since(self, when: float) -> bool:
        """Whether the owner has been silent since `when`, though no sequence runs that would keep it in a step."""
        last = self._supervisor.last_beat
        if any(generation.started is not None for generation, _ in self._live.values()):
            return False
        return last is None or last < when

    # Outputs -----------------------------------------------------------------------------------------------------

    def _on_output(self, generation: Generation, lease: Lease, output: Output, now: float) -> None:
        if generation.ended:
            if self.replay.is_suspect(generation):
                generation.track(output)
            if output.finish is not None:  # its caller was answered before: only its place is left
                self._end_answered(generation)
            return
        if output.admitted and generation.started is None:
            self._on_admitted(generation, lease, output.wait_s, now)
        if output.tokens:
            self._on_tokens(generation, len(output.tokens), now)
        generation.push(output, now)
        if output.finish is not None:
            if output.finish.reason is FinishReason.EXPIRED:  # while the lease still has its sequences and tokens
                generation.set_wait_error(self._admission.gate.postpone(lease, Refusal.WAIT_OVER, now))
            self._end(generation, output.finish.reason.value)

    def _on_admitted(self, generation: Generation, lease: Lease, wait_s: float, now: float) -> None:
        self._admission.gate.started(lease, wait_s, now)
        self._observers.tell(lambda observer: observer.admitted(generation.kind, wait_s))

    def _on_tokens(self, generation: Generation, count: int, now: float) -> None:
        last, generation.last_token = generation.last_token, now
        if last is None:
            self._observers.tell(lambda observer: observer.first_token(generation.kind, now - generation.submitted))
        else:
            self._observers.tell(lambda observer: observer.tokens(generation.kind, count, now - last))

    # Ends ----------------------------------------------------------------------------------------------------------

    def _judge(self, verdict: Verdict, death: Death) -> int:
        """End the sequence at fault, and all like it. Returns the number of deaths that this explains."""
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
        self._observers.tell(lambda observer: observer.quarantined())
        for generation in self.generations:
            if self.quarantine.fingerprint(generation.request) == mark:
                self._drop(generation, "quarantined", quarantined())
        return verdict.deaths

    def _drop(self, generation: Generation, outcome: str, error: TreadleError) -> None:
        """End a sequence that no owner has, with `error`."""
        generation.fail(error)
        self._end(generation, outcome)

    def _end_answered(self, generation: Generation) -> None:
        """Free the place of a sequence whose caller was answered before, and that no owner has."""
        _, lease = self._live[generation.id]
        self._end(generation, _answered(generation, lease))

    def _end(self, generation: Generation, outcome: str) -> None:
        """Forget a sequence that has ended, and free its place."""
        _, lease = self._live.pop(generation.id)
        self._admission.end(lease, outcome)
        total_s = self._clock() - lease.entered
        self._observers.tell(lambda observer: observer.finished(generation.kind, outcome, total_s))
        self.replay.ended(generation)


def _answered(generation: Generation, lease: Lease) -> str:
    """The outcome of a sequence whose caller was answered, or turned away, before its end came."""
    if generation.finish is not None:
        return generation.finish.reason.value
    return Refusal.DISPLACED.value if lease.displaced else FinishReason.EXPIRED.value
