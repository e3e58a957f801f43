"""Observer protocol: callbacks for metrics about requests and steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from ..core.messages import StepReport

log = logging.getLogger(__name__)


class Observer(Protocol):
    """Observer of the engine client. Called on the event loop; must be fast. Times are in seconds; `kind` is the kind
    of request, such as "chat"."""

    def admitted(self, kind: str, wait_s: float) -> None: ...

    def first_token(self, kind: str, ttft_s: float) -> None: ...

    def tokens(self, kind: str, count: int, gap_s: float) -> None:
        """`count` more tokens arrived `gap_s` after those before."""
        ...

    def finished(self, kind: str, reason: str, total_s: float) -> None: ...

    def refused(self, reason: str) -> None:
        """`reason` is the value of a `core.refusals.Refusal`."""
        ...

    def step(self, report: StepReport) -> None: ...

    def restarted(self) -> None: ...

    def died(self, cause: str) -> None:
        """The engine died; `cause` is the value of a `deaths.Cause`."""
        ...

    def replayed(self) -> None:
        """A sequence of a lost engine was sent to the next one."""
        ...

    def quarantined(self) -> None:
        """A request was found to kill the engine, and is refused from now on."""
        ...


class Observers:
    """The observers of one engine client."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = tuple(observers)

    def tell(self, event: Callable[[Observer], None]) -> None:
        """Call `event` with each observer. One that raises is logged and costs no request its answer."""
        for observer in self._observers:
            try:
                event(observer)
            except Exception:
                log.exception("a metrics observer failed; its counts may be too low")
