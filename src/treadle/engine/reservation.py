"""The hold of one admitted request on the engine: its lease at the gate and its sequences."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from types import TracebackType

from ..core.forecast import Lease
from ..core.messages import CancelReason, Submit
from ..core.refusals import Refusal
from ..errors import InvalidRequest, TreadleError
from .admission import Admission
from .dispatch import Dispatch
from .generation import Generation


class Reservation:
    """An admitted request. Use as `with client.reserve(...) as reservation:`. Leaving the block cancels all sequences
    that still live; their places are freed by the engine's terminal events."""

    def __init__(self, admission: Admission, dispatch: Dispatch, lease: Lease, *, kind: str, tag: str) -> None:
        self._admission = admission
        self._dispatch = dispatch
        self._lease = lease
        self._kind = kind
        self._tag = tag
        self._unused = lease.rows
        self._generations: list[Generation] = []
        self._displaced: TreadleError | None = None
        lease.give_way = self._give_way

    def resize(self, *, prompt_tokens: int, completion_tokens: int | None = None) -> None:
        """Replace the estimate by exact counts: prompt tokens and completion tokens (None: as reserved), both over all
        sequences. Raises Busy when the request no longer fits, InvalidRequest when it never can."""
        self._admission.resize(self._lease, prompt_tokens, completion_tokens)

    def submit(self, requests: Sequence[Submit]) -> list[Generation]:
        """Send the sequences to the engine; ids, group and the time left to wait are filled in.

        Raises EngineUnavailable or ServerStopping when the engine went away since `reserve`, Quarantined for a request
        that took the engine down before, ContextLengthExceeded when the cache could not hold one of the sequences even
        alone, and Busy when the place was given to a tenant that holds less. Nothing is sent then.
        """
        if self._displaced is not None:
            raise self._displaced
        if len(requests) > self._unused:
            raise InvalidRequest(f"{len(requests)} sequences, but {self._unused} were reserved")
        self._dispatch.check(requests, self._lease)
        self._admission.check_capacity(requests)
        left_s = self._dispatch.wait_left_s(self._lease)
        for request in self._dispatch.group(requests, self._lease, left_s):
            self._generations.append(self._dispatch.submit(request, self._lease, self._kind, self._tag))
            self._unused -= 1
        self._dispatch.enforce_queue_timeout(self._generations, left_s)
        return list(self._generations)

    def submit_next(self, request: Submit) -> Generation:
        """Send one of the upcoming sequences in the place of one that has ended. It waits for its slot like any other,
        but for as long as it takes: the request has begun. Raises like `submit`."""
        if not self._lease.vacant:
            raise InvalidRequest("no sequence has left a place for another one")
        self._dispatch.check_next(request, self._lease)
        self._admission.check_capacity([request])
        (submit,) = self._dispatch.group([request], self._lease, math.inf)
        self._lease.vacant -= 1
        generation = self._dispatch.submit(submit, self._lease, self._kind, self._tag)
        self._generations = [one for one in self._generations if not one.ended]
        self._generations.append(generation)
        return generation

    def cancel(self, reason: CancelReason = CancelReason.CLIENT) -> None:
        """Cancel all sequences that still live."""
        for generation in self._generations:
            generation.cancel(reason)

    def _give_way(self, error: TreadleError) -> None:
        """End the wait of all sequences with `error`. Their places are freed by the engine's terminal events."""
        self._displaced = error
        for generation in self._generations:
            self._dispatch.turn_away(generation, Refusal.DISPLACED.value, copy.copy(error))

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._lease.upcoming = 0
        self.cancel()
        for _ in range(self._unused + self._lease.vacant):
            self._admission.release(self._lease, "unused")
        self._unused = self._lease.vacant = 0
