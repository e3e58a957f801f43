"""Owner handle: the protocol by which the event loop starts, messages and ends an owner."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Protocol

from ..core.messages import FromOwner, ToOwner
from .heartbeat import SUSPENDED_S

OnMessage = Callable[[FromOwner], None]
KILLED = "killed by SIGKILL"
"""Exit description of a killed owner, whether by its supervisor or from outside."""
OnExit = Callable[[str], None]
"""Called once with a description of the exit ("exit code 0", "killed by SIGABRT")."""


class OwnerHandle(Protocol):
    """Handle of one owner. Methods and callbacks are called on the event loop."""

    @property
    def pid(self) -> int | None:
        """Id of the owner's process."""
        ...

    async def start(self, on_message: OnMessage, on_exit: OnExit) -> None:
        """Start the owner. Returns when messages can be sent, long before it is ready."""
        ...

    def send(self, message: ToOwner) -> None:
        """Send one message. Never blocks; ignored once the owner has ended."""
        ...

    def kill(self) -> bool:
        """Kill the owner. False if that is impossible (a thread)."""
        ...

    async def ended(self) -> None:
        """Wait for the owner's end."""
        ...

    def is_suspended(self) -> bool:
        """Whether its process is known to be stopped by a signal from outside."""
        ...

    def in_steps(self) -> frozenset[int]:
        """Return `Submit.arrival` of all sequences that may be in a step, or may have been at the owner's end."""
        ...


Launch = Callable[[], OwnerHandle]


async def ends_within(owner: OwnerHandle, within_s: float) -> bool:
    """Whether `owner` ends within `within_s` seconds. If this process itself was suspended meanwhile, the owner's end
    may not have been read yet, and the wait starts again."""
    loop = asyncio.get_running_loop()
    ended = asyncio.ensure_future(owner.ended())
    try:
        late_s = math.inf
        while not ended.done() and late_s > SUSPENDED_S:
            due = loop.time() + within_s
            await asyncio.wait((ended,), timeout=within_s)
            late_s = loop.time() - due
        return ended.done()
    finally:
        ended.cancel()
