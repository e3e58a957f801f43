"""The listener protocol: calls by which a supervisor tells of the engine's life."""

from __future__ import annotations

from typing import Protocol

from ..core.messages import Capabilities, FromOwner
from ..errors import EngineUnavailable, TreadleError
from .deaths import Death


class EngineEvents(Protocol):
    """Hears of the engine's life. All calls come on the event loop."""

    def on_message(self, message: FromOwner) -> None: ...

    def on_ready(self, capabilities: Capabilities) -> None: ...

    def on_death(self, death: Death) -> int:
        """A ready engine is gone and will be replaced; how many deaths, this one included, are explained now."""
        ...

    def on_away(self, waiting: EngineUnavailable) -> None:
        """The engine is gone for a while: new requests get `waiting`."""
        ...

    def on_lost(self, running: TreadleError, waiting: TreadleError) -> None:
        """The engine is gone for good: what ran fails with `running`, what waits or comes with `waiting`."""
        ...

    def work_since(self) -> float | None:
        """When the engine was first owed an answer that it still owes, in this clock; None when it owes nothing."""
        ...
