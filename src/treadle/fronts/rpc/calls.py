"""Which requests are alive, by the ids that clients gave them, and which were taken back before they came."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

from ...core.messages import CancelReason
from ...engine.client import Reservation
from ...errors import InvalidRequest
from .ask import MAX_REQUEST_ID_CHARS

EARLY_S = 30.0
MOST_EARLY = 10_000


class Call:
    """One live request. `aborted` is set by an Abort that came before it had anything to cancel."""

    def __init__(self) -> None:
        self.aborted = False
        self._reservation: Reservation | None = None

    def hold(self, reservation: Reservation) -> None:
        """From now on an abort cancels what `reservation` holds."""
        self._reservation = reservation

    def abort(self) -> None:
        """Idempotent, never blocks."""
        self.aborted = True
        if self._reservation is not None:
            self._reservation.cancel(CancelReason.CLIENT)


class Calls:
    """The live requests of one server, both wires together. Lives on the event loop."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._live: dict[str, Call] = {}
        self._early: OrderedDict[str, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._live)

    @contextlib.contextmanager
    def live(self, request_id: str) -> Iterator[Call]:
        """The call with this id for as long as the block runs. Raises InvalidRequest while another has it."""
        if request_id in self._live:
            raise InvalidRequest(
                f"a request with the id '{request_id[:80]}' is still running: give each request its own",
                param="request_id",
            )
        call = self._live[request_id] = Call()
        call.aborted = self._was_early(request_id)
        try:
            yield call
        finally:
            del self._live[request_id]

    def abort(self, request_ids: Iterable[str]) -> None:
        """Take requests back. Ids that nobody has are remembered for EARLY_S seconds: their request may be on its
        way."""
        now = self._clock()
        for request_id in request_ids:
            call = self._live.get(request_id)
            if call is not None:
                call.abort()
            elif len(request_id) <= MAX_REQUEST_ID_CHARS:
                self._early.pop(request_id, None)
                self._early[request_id] = now
        self._forget(now)

    def _was_early(self, request_id: str) -> bool:
        self._forget(self._clock())
        return self._early.pop(request_id, None) is not None

    def _forget(self, now: float) -> None:
        while self._early and (len(self._early) > MOST_EARLY or now - next(iter(self._early.values())) > EARLY_S):
            self._early.popitem(last=False)
