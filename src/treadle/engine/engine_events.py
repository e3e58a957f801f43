"""Callback protocol for engine life-cycle events."""

from __future__ import annotations

from typing import Protocol

from ..core.capabilities import Capabilities
from ..core.messages import FromOwner
from ..errors import EngineUnavailable, TreadleError
from .deaths import Death


class EngineEvents(Protocol):
    """Receiver of a supervisor's events, all on the event loop."""

    def on_message(self, message: FromOwner) -> None: ...

    def on_ready(self, capabilities: Capabilities) -> None: ...

    def on_death(self, death: Death) -> int:
        """A ready engine died and will be replaced. Returns the number of deaths, including this one, now explained."""
        ...

    def on_unavailable(self, waiting: EngineUnavailable) -> None:
        """The engine is temporarily unavailable: new requests fail with `waiting`."""
        ...

    def on_lost(self, running: TreadleError, waiting: TreadleError) -> None:
        """The engine has ended for good: running requests fail with `running`, waiting and new ones with `waiting`."""
        ...

    def work_since(self) -> float | None:
        """Return the time since which the engine has owed an answer, by this clock; None when it owes none."""
        ...
