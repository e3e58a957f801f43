"""Consistency of the scheduler's books."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from .inflight_step import InFlightStep
from .queue import Queue
from .sequence import Sequence


def check(holds: bool, claim: str) -> None:
    """Raise AssertionError with `claim` unless it holds."""
    if not holds:
        raise AssertionError(f"scheduler books: {claim}")


def check_books(
    sequences: Mapping[str, Sequence],
    running: Mapping[str, Sequence],
    queue: Queue,
    in_flight: Iterable[InFlightStep],
    max_running: int,
) -> None:
    """Raise AssertionError if the books disagree."""
    waiting = [seq.id for seq in queue.waiting]
    check(sorted((*waiting, *running)) == sorted(sequences), "each live sequence either waits or runs, once")
    check(len(running) <= max_running, "no more sequences than slots")
    check(queue.check(len(sequences)), "groups count their sequences")
    sampled = tokens_in_flight(in_flight)
    check(
        all(seq.tokens_in_flight + seq.superseded == sampled[seq] for seq in sequences.values()),
        "sequences count their tokens in flight",
    )


def tokens_in_flight(steps: Iterable[InFlightStep]) -> Counter[Sequence | None]:
    """Count the tokens that `steps` sample of each sequence, if they accept all drafts."""
    sampled: Counter[Sequence | None] = Counter()
    for step in steps:
        for decode in step.plan.decode:
            sampled[step.sequences.get(decode.id)] += 1 + decode.drafts
    return sampled
