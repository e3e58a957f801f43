"""Queue timeout on the event loop, for an owner that does not expire waiting sequences itself.

The owner expires waiting sequences between two steps. One that is stuck in a step can't, and its clients must not wait
until the hang is detected (D2), so they are refused here. Their slots stay taken until the owner, or its death, frees
them.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Sequence

from .generation import Generation

SLACK_S = 1.0
SLACK_STEPS = 2.0


def enforce_queue_timeout(
    generations: Sequence[Generation], within_s: float, step_s: float, refuse: Callable[[Generation], None]
) -> None:
    """Call `refuse` for each of `generations` (one group) that still waits after `within_s` seconds and a slack, which
    leaves the owner up to two steps of `step_s` seconds to expire it itself. Once one of the group has started, none is
    refused. Only weak references are kept."""
    _check_after(within_s + SLACK_S + SLACK_STEPS * step_s, tuple(map(weakref.ref, generations)), refuse)


def _check_after(
    seconds: float, group: tuple[weakref.ref[Generation], ...], refuse: Callable[[Generation], None]
) -> None:
    loop = asyncio.get_running_loop()
    due = loop.time() + seconds

    def check() -> None:
        generations = [found for entry in group if (found := entry()) is not None]
        if len(generations) < len(group) or any(generation.runs for generation in generations):
            return
        waiting = tuple(generation for generation in generations if generation.is_waiting)
        if waiting and loop.time() - due > SLACK_S:
            _check_after(SLACK_S, group, refuse)  # the event loop was late: messages of the owner may be unread
            return
        for generation in waiting:
            refuse(generation)

    loop.call_at(due, check)
