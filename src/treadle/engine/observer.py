"""The observer protocol: calls that tell metrics what happens to requests. Each comes on the event loop and must be
quick."""

from __future__ import annotations

from typing import Protocol

from ..core.messages import StepReport


class Observer(Protocol):
    """Times are in seconds; `kind` is the kind of request, such as "chat"."""

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
        """A sequence that a lost engine had goes on with the next one."""
        ...

    def quarantined(self) -> None:
        """A request was found to take the engine down, and is refused from now on."""
        ...
