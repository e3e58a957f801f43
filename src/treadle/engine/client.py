"""The engine as the fronts see it, on the event loop: its life, health and jobs, and the reservations of requests.

Order of a request: `reserve` (before any work; admits or refuses at once), `Reservation.resize` (the exact size),
`Reservation.submit`, then each `Generation`'s `admitted()` and deltas. `admission` has the gate, `dispatch` the live
sequences, `supervisor` the owner.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..core.capabilities import Capabilities
from ..core.gate import Gate
from ..core.messages import CancelJob, FromOwner, JobDone, RunJob, StepReport
from ..core.refusals import Refusal
from ..core.virtual_queue import Arrival
from ..errors import EngineDied, EngineUnavailable, TreadleError
from .admission import Admission, AdmissionLimits
from .block_event_feeds import BlockFeeds
from .deaths import Death
from .dispatch import Dispatch
from .handle import Launch
from .jobs import Jobs
from .observer import Observer, Observers
from .reservation import Reservation
from .supervisor import EngineState, Supervisor
from .timeouts import Timeouts

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Health:
    """`live`: the process answers. `ready`: a request sent now would be taken, or refused for lack of room alone.
    `retry_after_s`: seconds until it is expected to be ready, where it is not."""

    live: bool
    ready: bool
    state: str
    reason: str = ""
    retry_after_s: float | None = None


class EngineClient:
    """The client of one engine. Lives on the event loop; nothing in it blocks."""

    def __init__(
        self,
        launch: Launch,
        limits: AdmissionLimits,
        timeouts: Timeouts | None = None,
        *,
        observers: Sequence[Observer] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock = clock
        self.jobs = Jobs(self._send_job)
        self.supervisor = Supervisor(launch, self, timeouts or Timeouts(), clock)
        self.blocks = BlockFeeds(self.supervisor.send)
        self._observers = Observers(observers)
        loading = EngineUnavailable("the engine is loading its model")
        self.admission = Admission(limits, loading, self.supervisor.outage.left_s, self._on_refused, clock)
        self.dispatch = Dispatch(self.admission, self.supervisor, self._send, self._observers, clock, loading)
        self._owed: float | None = None
        self._restarts_reported = 0

    @property
    def capabilities(self) -> Capabilities | None:
        """Capabilities of the engine; None until it is ready for the first time."""
        return self.admission.capabilities

    @property
    def report(self) -> StepReport | None:
        """The report of the last step."""
        return self.dispatch.report

    @property
    def gate(self) -> Gate:
        """The admission controller."""
        return self.admission.gate

    # Life --------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the engine; returns when it is ready. Raises StartFailed."""
        await self.supervisor.start()

    def begin(self) -> None:
        """Start the engine and return at once; `supervisor` reports its progress."""
        self.supervisor.begin()

    def drain(self) -> None:
        """Refuse new requests; running ones go on (C3), except trials of suspects whose clients have left."""
        self.admission.drain()
        self.dispatch.drain()

    async def stop(self, grace_s: float = 5.0) -> None:
        """End the engine. All waiting and running sequences get one terminal event."""
        self.drain()
        await self.supervisor.stop(grace_s)

    @property
    def busy(self) -> int:
        """Number of sequences that have not ended."""
        return self.gate.rows

    async def idle(self) -> None:
        """Wait until no sequence is left."""
        await self.admission.idle()

    def health(self) -> Health:
        """Whether the engine takes work and its steps go on (C4). Cheap: the engine is not asked."""
        state = self.supervisor.state
        back_s = None if state in (EngineState.READY, EngineState.FAILED) else self.supervisor.outage.left_s()
        if self.admission.draining and state is EngineState.READY:
            return Health(live=True, ready=False, state="draining", reason="the server is shutting down")
        reason = self.supervisor.public_reason or self._stage_of(state)
        ready = state is EngineState.READY
        return Health(live=True, ready=ready, state=state.value, reason=reason, retry_after_s=back_s)

    def _stage_of(self, state: EngineState) -> str:
        """Return what an engine without a reason of its own is about; empty where it is ready."""
        if state in (EngineState.STOPPING, EngineState.STOPPED):
            return "the engine was stopped"
        return "" if state is EngineState.READY else self.supervisor.stage

    # Requests ----------------------------------------------------------------------------------------------------

    def check_room(self, arrival: Arrival | None = None) -> None:
        """Refuse a request of which only `arrival` is known, if it could not be admitted. Raises like `reserve`."""
        self.admission.check_room(arrival)

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
        upcoming: int = 0,
    ) -> Reservation:
        """Admit a request for `rows` sequences with about `prompt_tokens` in all and up to `completion_tokens` each
        (None: what the context leaves), of which `least_tokens` are sure to come. It counts against the share of
        `tenant`; `arrival`, which has a tenant of its own, identifies a refused client that returns.
        The sequences are those of `prompts` prompts; `upcoming` more of the request come later, each in the place of
        one that has ended (`Reservation.submit_next`). Decides at once.

        Raises Busy, or EngineUnavailable where an engine follows, with `retry_after_s` and `ticket`; ServerStopping
        with `retry_after_s`; InvalidRequest for a request that can never fit.
        """
        lease = self.admission.admit(
            rows=rows,
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            least_tokens=least_tokens,
            arrival=arrival or Arrival(tenant),
            prompts=prompts,
        )
        lease.upcoming = upcoming
        return Reservation(self.admission, self.dispatch, lease, kind=kind, tag=tag)

    # Events of the owner ---------------------------------------------------------------------------------------------

    def on_message(self, message: FromOwner) -> None:
        if isinstance(message, StepReport):
            self.dispatch.step(message)
            self.blocks.take(message.events)
        else:
            assert isinstance(message, JobDone)
            self.jobs.done(message)
        if self.work_since() is None:
            self._owed = None

    def on_ready(self, capabilities: Capabilities) -> None:
        if self._restarts_reported < self.supervisor.restarts:
            restart, held = self.supervisor.restarts, self.dispatch.replay.held
            log.warning("the engine is ready again (restart %d); sequences that go on with it: %d", restart, held)
        while self._restarts_reported < self.supervisor.restarts:  # more than one where starts have failed
            self._restarts_reported += 1
            self._observers.tell(lambda observer: observer.restarted())
        self.admission.open_(capabilities)
        self.blocks.ready()
        self.dispatch.resume()

    def on_death(self, death: Death) -> int:
        self._owed = None
        self.blocks.lose()
        self._observers.tell(lambda observer: observer.died(death.cause.value))
        self.jobs.fail_all(EngineDied(f"the engine was lost while this job ran ({death.reason})"))
        return self.dispatch.died(death)

    def on_unavailable(self, waiting: EngineUnavailable) -> None:
        self.dispatch.away = waiting
        self.admission.pause(waiting)

    def on_lost(self, running: TreadleError, waiting: TreadleError) -> None:
        self._owed = None
        self.admission.close(waiting)
        self.blocks.close(waiting)
        self.jobs.fail_all(running)
        self.dispatch.lost(running, waiting)

    def work_since(self) -> float | None:
        """Time since which the owner has had work; None while it has none."""
        return self._owed if len(self.dispatch) or self.jobs.pending else None

    # Sending -----------------------------------------------------------------------------------------------------

    def _send_job(self, message: RunJob | CancelJob) -> None:
        away = self.dispatch.away
        if away is not None:
            raise type(away)(away.message, retry_after_s=self.supervisor.outage.left_s())
        self._send(message)

    def _send(self, message: Any) -> None:
        self.supervisor.send(message)
        if self.work_since() is None:
            self._owed = self.clock()

    def _on_refused(self, reason: Refusal) -> None:
        self._observers.tell(lambda observer: observer.refused(reason.value))
