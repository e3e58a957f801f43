"""Admission of requests: the size and time they are expected to take, the gate that admits or refuses them at once, and
the limits that the gate holds."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..core.capabilities import Capabilities
from ..core.finishes import over_capacity
from ..core.forecast import Lease
from ..core.gate import Gate, GateLimits
from ..core.messages import FinishReason, Submit
from ..core.refusals import Refusal
from ..core.virtual_queue import Arrival
from ..errors import ContextLengthExceeded, EngineUnavailable, ServerStopping, TreadleError
from .owner import kv_tokens

EXPECTED_COMPLETION = 1024  # tokens
USUAL_COMPLETION = 256  # tokens: an answer whose request names no lower limit, until answers have been seen


@dataclass(frozen=True)
class AdmissionLimits:
    """Sequences that may run and wait, and for how many seconds one may wait; with `by_forecast` a request may wait
    only if a slot is expected within that time. See `Settings`."""

    max_running: int
    max_waiting: int
    max_wait_s: float
    by_forecast: bool = False


class Admission:
    """The gate of one engine, closed until `open_`. `outage_s` gives the seconds until the engine is expected back;
    `on_refused` gets the reason of each refusal."""

    def __init__(
        self,
        limits: AdmissionLimits,
        closed: EngineUnavailable,
        outage_s: Callable[[], float],
        on_refused: Callable[[Refusal], None],
        clock: Callable[[], float],
    ) -> None:
        self.limits = limits
        self.capabilities: Capabilities | None = None
        self.draining = False
        self._outage_s = outage_s
        self._clock = clock
        self._released = asyncio.Event()
        self.gate = Gate(GateLimits(limits.max_running, limits.max_waiting, limits.max_wait_s), closed, on_refused)
        self.pause(closed)

    # Open and closed ---------------------------------------------------------------------------------------------

    def open_(self, capabilities: Capabilities) -> None:
        """Admit requests, now that the engine is ready; while draining only note its capabilities."""
        self.capabilities = capabilities
        if not self.draining:
            self.gate.open_(self._gate_limits(capabilities), self._clock())

    def pause(self, error: EngineUnavailable) -> None:
        """Refuse all requests with `error` and a ticket until the engine is back."""
        if not self.draining:
            self.gate.close(error, back_s=self._outage_s, now=self._clock())

    def close(self, error: TreadleError) -> None:
        """Refuse all requests with `error` for good."""
        if not self.draining:
            self.gate.close(error)

    def drain(self) -> None:
        """Refuse all requests because the server shuts down."""
        self.draining = True
        self.gate.close(ServerStopping("the server is shutting down and takes no new requests", retry_after_s=5.0))

    async def idle(self) -> None:
        """Wait until no sequence is left."""
        while self.gate.rows:
            self._released.clear()
            await self._released.wait()

    # Leases --------------------------------------------------------------------------------------------------------

    def check_room(self, arrival: Arrival | None = None) -> None:
        """Refuse a request of which only `arrival` is known, if it could not be admitted. Raises like `admit`."""
        self.gate.check_room(self._clock(), arrival)

    def admit(
        self,
        *,
        rows: int,
        prompt_tokens: int,
        completion_tokens: int | None,
        least_tokens: int,
        arrival: Arrival,
        prompts: int,
    ) -> Lease:
        """Admit a request; see `EngineClient.reserve` for the arguments and errors."""
        tokens = prompt_tokens + rows * self.completion_tokens(completion_tokens, prompt_tokens // rows)
        service_s = self._service_s(prompt_tokens // rows, _expected_tokens(completion_tokens, least_tokens))
        certain = completion_tokens is not None and completion_tokens <= max(USUAL_COMPLETION, least_tokens)
        return self.gate.admit(
            rows=rows,
            tokens=tokens,
            now=self._clock(),
            service_s=service_s,
            certain=certain and service_s > 0,
            arrival=arrival,
            prompts=prompts,
        )

    def resize(self, lease: Lease, prompt_tokens: int, completion_tokens: int | None) -> None:
        """Replace the lease's estimate by exact counts, both over all its sequences. Raises like
        `Reservation.resize`."""
        completion = lease.rows * self.completion_tokens(None, prompt_tokens // lease.rows)
        if completion_tokens is not None:
            capped = self.capabilities is not None and self.capabilities.kv.blocks
            completion = min(completion_tokens, completion) if capped else completion_tokens
        self.gate.resize(lease, tokens=prompt_tokens + completion, now=self._clock())

    def check_capacity(self, requests: Sequence[Submit]) -> None:
        """Raise ContextLengthExceeded for a sequence that would not fit into the cache even alone."""
        can = self.capabilities
        capacity = kv_tokens(can, self.limits.max_running) if can else 0
        tokens = max((len(request.prompt) + request.max_tokens for request in requests), default=0)
        if 0 < capacity < tokens:
            self.gate.refuse(Refusal.TOO_LONG)
            raise ContextLengthExceeded(over_capacity(tokens, capacity))

    def release(self, lease: Lease, outcome: str) -> None:
        """Free the place of one sequence of the lease."""
        self.gate.release(lease, outcome, self._clock())
        self._released.set()

    def completion_tokens(self, limit: int | None, prompt_tokens: int) -> int:
        """Tokens to reserve for one completion of at most `limit`. Where sequences that outgrow the cache can be
        preempted, at most EXPECTED_COMPLETION: few that may generate more do so."""
        can = self.capabilities
        left = max(1, can.context - prompt_tokens) if can else 1
        if can and can.kv.blocks:
            left = min(left, EXPECTED_COMPLETION)
        return left if limit is None else min(limit, left)

    def end(self, lease: Lease, outcome: str) -> None:
        """Free the place of one sequence of the lease, or keep it for the next one of its request."""
        if lease.upcoming and outcome == FinishReason.STOP:
            self.gate.pass_on(lease, outcome, self._clock())
        else:
            self.release(lease, outcome)

    # Measured times --------------------------------------------------------------------------------------------------

    def stepped(self, step_s: float, gained: float) -> None:
        """Correct the forecast by the time of a step in which a sequence has gained so many tokens, in the mean: drafts
        that are accepted and forced tokens make one worth several plain ones."""
        if self.capabilities is not None and self.capabilities.steps.decode_step_s:
            self.gate.stepped(step_s / gained / self.capabilities.steps.decode_step_s)

    def _service_s(self, prompt_tokens: int, answer_tokens: int) -> float:
        """Seconds that a sequence is expected to hold its slot in a full batch, by the warm-up's step times; 0 where
        those were not measured. In that time each slot gets a new prompt once."""
        can = self.capabilities
        if can is None:
            return 0.0
        prompts = self.limits.max_running * prompt_tokens
        return answer_tokens * can.steps.decode_step_s + prompts * can.steps.prompt_token_s

    def _gate_limits(self, can: Capabilities) -> GateLimits:
        """The gate's limits: running sequences fit the cache; a waiting one may hold as much as a running one."""
        running, waiting = self.limits.max_running, self.limits.max_waiting
        held = kv_tokens(can, running)
        return GateLimits(
            running=running,
            waiting=waiting,
            max_wait_s=self.limits.max_wait_s,
            tokens=held + held * waiting // running,
            by_forecast=self.limits.by_forecast,
        )


def _expected_tokens(limit: int | None, least: int) -> int:
    """The expected length of an answer. A limit above the usual length is more often a bound than a wish: the geometric
    mean of both is wrong by the same factor either way."""
    if limit is None:
        return max(USUAL_COMPLETION, least)
    expected = limit if limit <= USUAL_COMPLETION else min(math.isqrt(limit * USUAL_COMPLETION), EXPECTED_COMPLETION)
    return max(expected, min(least, limit))
