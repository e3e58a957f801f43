"""An owner as seen from the event loop: something to send to, that talks back, and that ends."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Protocol

from ..core.messages import FromOwner, ToOwner
from .heartbeat import STOOD_STILL_S

OnMessage = Callable[[FromOwner], None]
KILLED = "killed by SIGKILL"
"""How an owner ended that was killed, by its supervisor or from outside."""
OnExit = Callable[[str], None]
"""Called once, with how it ended, for people ("exit code 0", "killed by SIGABRT")."""


class OwnerHandle(Protocol):
    """One life of an owner. Every method is called on the event loop, and so are both callbacks."""

    @property
    def pid(self) -> int | None:
        """The process it lives in."""
        ...

    async def start(self, on_message: OnMessage, on_exit: OnExit) -> None:
        """Begin its life; returns as soon as it can be sent to, long before it is ready."""
        ...

    def send(self, message: ToOwner) -> None:
        """Hand over one message; never blocks, and is harmless once the owner has ended."""
        ...

    def kill(self) -> bool:
        """End it at once, without its help. False where that is impossible (a thread)."""
        ...

    async def ended(self) -> None:
        """Returns once it has ended."""
        ...

    def stopped(self) -> bool:
        """Whether its process stands still by a signal from outside, as far as that can be told."""
        ...

    def in_steps(self) -> frozenset[int]:
        """`Submit.arrival` of every sequence that may be, or may have been at its end, in a step."""
        ...


Launch = Callable[[], OwnerHandle]


async def ends(owner: OwnerHandle, within_s: float) -> bool:
    """Whether `owner` ends within `within_s` seconds. Where this process itself stood still meanwhile, the owner's end
    may not have been read yet: it gets the time again."""
    loop = asyncio.get_running_loop()
    ended = asyncio.ensure_future(owner.ended())
    try:
        late_s = math.inf
        while not ended.done() and late_s > STOOD_STILL_S:
            due = loop.time() + within_s
            await asyncio.wait((ended,), timeout=within_s)
            late_s = loop.time() - due
        return ended.done()
    finally:
        ended.cancel()
