"""Ends the waits that the owner does not end in time.

The owner refuses those whose time is up between two steps. One that is stuck in a step refuses nobody, and those who
wait must not be kept until it is found to hang (D2): they are refused here, on the event loop. Their places stay taken
until the owner, or its death, gives them back.
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
    """Call `refuse` for each of `generations`, one group, that still waits well after `within_s`: a slack for the
    owner to say so itself, which takes it up to a step or two of `step_s`. Once one of them runs, none is refused.
    Nothing is kept of those that end before."""
    _look_in(within_s + SLACK_S + SLACK_STEPS * step_s, tuple(map(weakref.ref, generations)), refuse)


def _look_in(seconds: float, group: tuple[weakref.ref[Generation], ...], refuse: Callable[[Generation], None]) -> None:
    loop = asyncio.get_running_loop()
    due = loop.time() + seconds

    def look() -> None:
        generations = [found for entry in group if (found := entry()) is not None]
        if len(generations) < len(group) or any(generation.runs for generation in generations):
            return
        waiting = tuple(generation for generation in generations if generation.waits)
        if waiting and loop.time() - due > SLACK_S:
            _look_in(SLACK_S, group, refuse)  # the event loop was held up: what the owner said is not read yet
            return
        for generation in waiting:
            refuse(generation)

    loop.call_at(due, look)
